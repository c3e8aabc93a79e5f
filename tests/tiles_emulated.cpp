// The attention kernels for AMX with its registers emulated, for machines that have none.
#define BAM_ISA tiles_emulated
#define BAM_EMULATE_TILES
#include "src/cpu/isa/attention.cpp"

#include "tiles_emulated.h"

namespace bam::test {

const Kernels& tiles_emulated_kernels() {
    static const Kernels kernels = [] {
        Kernels k = kernels_for(Isa::base);
        k.attention_forward_scratch = tiles_emulated::attention_forward_scratch;
        k.attention_forward = tiles_emulated::attention_forward;
        k.attention_backward_scratch = tiles_emulated::attention_backward_scratch;
        k.attention_backward = tiles_emulated::attention_backward;
        return k;
    }();
    return kernels;
}

}  // namespace bam::test
