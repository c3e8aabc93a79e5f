// The attention kernels with AMX's tiles, and nothing beyond the oldest instruction set around them.
#include "amx_base.h"

#if defined(__x86_64__) && defined(__linux__)
#define BAM_ISA amx_base
#include "src/cpu/isa/attention.cpp"

namespace bam::test {

const Kernels* amx_base_kernels() {
    static const Kernels kernels = [] {
        Kernels k = kernels_for(Isa::base);
        k.attention_forward_scratch = amx_base::attention_forward_scratch;
        k.attention_forward = amx_base::attention_forward;
        k.attention_backward_scratch = amx_base::attention_backward_scratch;
        k.attention_backward = amx_base::attention_backward;
        return k;
    }();
    return &kernels;
}

}  // namespace bam::test

#else

const bam::Kernels* bam::test::amx_base_kernels() {
    return nullptr;
}

#endif
