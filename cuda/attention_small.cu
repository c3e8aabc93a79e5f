// Attention on tensor cores for heads up to 64. The build fails if one of these kernels spills registers (Makefile).
#include "cuda/attention_tensor.h"

namespace bam {

template struct TensorAttention<16>;
template struct TensorAttention<32>;
template struct TensorAttention<48>;
template struct TensorAttention<64>;

}  // namespace bam
