// Cross-entropy of one row: -ln softmax(logits)[target] as lse - logit, and its gradient. Nothing overflows, whatever
// the spread of the logits; a NaN among them gives a NaN loss.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace {

constexpr int64_t kBlock = 1024;  // logits whose powers share a maximum: they stay in the first cache
constexpr int64_t kMaxBlocks = 1 << 12;

float block_maximum(const float* x, int64_t n) {
    Vec m[4];
    for (Vec& v : m) v = splat(-kInfinity);
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int u = 0; u < 4; ++u) m[u] = vmax(load(x + i + u * W), m[u]);
    each(n - i, [&](int64_t j, auto tag) { m[0] = vmax(keep(load(x + i + j, tag), splat(-kInfinity), tag), m[0]); });
    return maximum(vmax(vmax(m[0], m[1]), vmax(m[2], m[3])));
}

// The sum of e^(x - max); y, where given, holds the terms (it may be x).
float block_sum(float* y, const float* x, int64_t n, float max) {
    Vec sums[2] = {};
    auto term = [&](int64_t i, auto tag) {
        const Vec e = exp2_nonpositive<5>((load(x + i, tag) - max) * kLog2e);
        if (y) store(y + i, e, tag);
        return keep(e, Vec{}, tag);
    };
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int u = 0; u < 2; ++u) sums[u] += term(i + u * W, Whole{});
    each(n - i, [&](int64_t j, auto tag) { sums[0] += term(i + j, tag); });
    return sum(sums[0] + sums[1]);
}

template <typename T>
void scale_block(T* y, const float* x, int64_t n, float factor) {
    each(n, [&](int64_t i, auto tag) { store(y + i, load(x + i, tag) * factor, tag); });
}

float power(float x) {
    return exp2_nonpositive<6>(splat(x * kLog2e))[0];
}

}  // namespace

namespace bam::BAM_ISA {

float cross_entropy(void* dlogits, bool low, float* logits, int64_t V, int32_t target, float scale) {
    if (target < 0) {
        if (dlogits) __builtin_memset(dlogits, 0, V * (low ? 2 : 4));
        return 0;
    }
    const float logit = logits[target];
    const int64_t block = V <= kBlock * kMaxBlocks ? kBlock : (V + kMaxBlocks - 1) / kMaxBlocks;
    float maxima[kMaxBlocks], max = -kInfinity, total = 0;
    for (int64_t b = 0, i = 0; i < V; ++b, i += block) {
        const int64_t n = V - i < block ? V - i : block;
        const float m = maxima[b] = block_maximum(logits + i, n),
                    s = block_sum(dlogits ? logits + i : nullptr, logits + i, n, m);
        if (m > max)
            total = total * power(max - m) + s, max = m;
        else
            total += s * power(m - max);  // a NaN in s or m gets through
    }
    if (dlogits) {
        for (int64_t b = 0, i = 0; i < V; ++b, i += block) {
            const int64_t n = V - i < block ? V - i : block;
            const float factor = scale / total * power(maxima[b] - max);
            if (low)
                scale_block(static_cast<uint16_t*>(dlogits) + i, logits + i, n, factor);
            else
                scale_block(static_cast<float*>(dlogits) + i, logits + i, n, factor);
        }
        const Vec own = splat(scale * (power(logit - max) / total) - scale);
        if (low)
            store(static_cast<uint16_t*>(dlogits) + target, own, Part{1});
        else
            store(static_cast<float*>(dlogits) + target, own, Part{1});
    }
    return __builtin_logf(total) + (max - logit);
}

}  // namespace bam::BAM_ISA
