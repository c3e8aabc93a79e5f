// Cross-entropy of one row: -ln softmax(logits)[target] as lse - logit, and its gradient. Nothing overflows, whatever the
// spread of the logits; a NaN among them gives a NaN loss.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace {

template <typename T>
void write_gradient(T* d, const float* logits, int64_t V, float max, float factor) {
    each(V, [&](int64_t i, auto tag) {
        store(d + i, exp2_nonpositive((load(logits + i, tag) - max) * kLog2e) * factor, tag);
    });
}

}  // namespace

namespace bam::BAM_ISA {

float cross_entropy(void* dlogits, bool low, const float* logits, int64_t V, int32_t target, float scale) {
    if (target < 0) {
        if (dlogits) __builtin_memset(dlogits, 0, V * (low ? 2 : 4));
        return 0;
    }
    Vec maxima = splat(-kInfinity);
    each(V, [&](int64_t i, auto tag) { maxima = vmax(keep(load(logits + i, tag), splat(-kInfinity), tag), maxima); });
    const float max = maximum(maxima);
    Vec sums{};
    each(V, [&](int64_t i, auto tag) {
        sums += keep(exp2_nonpositive((load(logits + i, tag) - max) * kLog2e), Vec{}, tag);
    });
    const float total = sum(sums), logit = logits[target];
    if (dlogits) {
        const float factor = scale / total;
        const Vec own = exp2_nonpositive(splat((logit - max) * kLog2e)) * factor - scale;
        if (low) {
            uint16_t* d = static_cast<uint16_t*>(dlogits);
            write_gradient(d, logits, V, max, factor);
            store(d + target, own, Part{1});
        } else {
            float* d = static_cast<float*>(dlogits);
            write_gradient(d, logits, V, max, factor);
            store(d + target, own, Part{1});
        }
    }
    return __builtin_logf(total) + (max - logit);
}

}  // namespace bam::BAM_ISA
