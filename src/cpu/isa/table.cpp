// The table of one instruction set's kernels.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace bam::BAM_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    .isa = Isa::BAM_ISA,
    .lanes = W,
    .to_bf16 = to_bf16,
    .to_fp32 = to_fp32,
    .round_to_bf16 = round_to_bf16,
    .transpose16 = transpose16,
    .pack_kn = pack_kn,
    .pack_nk = pack_nk,
    .add = add,
    .sum_squares = sum_squares,
    .exp = exp,
    .norm_forward = norm_forward,
    .norm_backward = norm_backward,
    .rope = rope,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .cross_entropy = cross_entropy,
    .update = update,
    .tile_norms = tile_norms,
    .tile_ranges = tile_ranges,
    .attention_forward_scratch = attention_forward_scratch,
    .attention_forward = attention_forward,
    .attention_backward_scratch = attention_backward_scratch,
    .attention_backward = attention_backward,
};

}  // namespace bam::BAM_ISA
