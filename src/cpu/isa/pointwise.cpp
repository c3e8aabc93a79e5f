// Conversions, sums, RoPE, SwiGLU and the optimizer's update: one pass over memory each.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace {

using bam::UpdateArgs;

template <typename T>
void rope_token(T* x, const float* table, int heads, int D, bool half, float sign) {
    const int first = half ? 1 : 2, second = half ? D / 2 : 1;  // pair i: elements first*i and first*i + second
    for (int h = 0; h < heads; ++h, x += D) {
        for (int i = 0; i < D / 2; ++i) {
            float a[2];
            T* p = x + first * i;
            T* q = p + second;
            const float c = table[2 * i], s = sign * table[2 * i + 1];
            if constexpr (sizeof(T) == 2) {
                a[0] = __builtin_bit_cast(float, uint32_t(*p) << 16);
                a[1] = __builtin_bit_cast(float, uint32_t(*q) << 16);
                store(p, splat(a[0] * c - a[1] * s), Part{1});
                store(q, splat(a[0] * s + a[1] * c), Part{1});
            } else {
                a[0] = *p, a[1] = *q;
                *p = a[0] * c - a[1] * s;
                *q = a[0] * s + a[1] * c;
            }
        }
    }
}

BAM_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + vexp(-x)); }

template <typename T>
void swiglu_rows(T* y, const T* gate_up, int64_t rows, int64_t F) {
    for (int64_t r = 0; r < rows; ++r, y += F, gate_up += 2 * F)
        each(F, [&](int64_t i, auto tag) {
            const Vec g = load(gate_up + i, tag);
            store(y + i, g * sigmoid(g) * load(gate_up + F + i, tag), tag);
        });
}

template <typename T>
void swiglu_rows_backward(T* d, const T* dy, const T* gate_up, int64_t rows, int64_t F) {
    for (int64_t r = 0; r < rows; ++r, dy += F, gate_up += 2 * F, d += 2 * F)
        each(F, [&](int64_t i, auto tag) {
            const Vec g = load(gate_up + i, tag), u = load(gate_up + F + i, tag), t = load(dy + i, tag);
            const Vec s = sigmoid(g);
            store(d + i, t * u * s * (1.0f + g * (1.0f - s)), tag);
            store(d + F + i, t * g * s, tag);
        });
}

// p (1 - lr wd) - lr c1 m / (c2 sqrt(v) + eps); see UpdateStep.
template <bool adaptive>
void update_range(const UpdateArgs& a) {
    const float keep_p = 1.0f - a.lr * a.weight_decay, step = a.lr * a.c1;
    each(a.n, [&](int64_t i, auto tag) {
        const Vec g = load(a.g + i, tag) * a.grad_scale;
        const Vec m = load(a.m + i, tag) * a.beta1 + g * a.rest1;
        const Vec v = load(a.v + i, tag) * a.beta2 + g * g * a.rest2;
        const Vec p = load(a.p + i, tag) * keep_p;
        store(a.m + i, m, tag);
        store(a.v + i, v, tag);
        store(a.p + i, adaptive ? p - step * m / (vsqrt(v) * a.c2 + a.eps) : p - step * m, tag);
    });
}

}  // namespace

namespace bam::BAM_ISA {

void to_bf16(uint16_t* y, const float* x, int64_t n) {
    each(n, [&](int64_t i, auto tag) { store(y + i, load(x + i, tag), tag); });
}

void to_fp32(float* y, const uint16_t* x, int64_t n) {
    each(n, [&](int64_t i, auto tag) { store(y + i, load(x + i, tag), tag); });
}

void round_to_bf16(float* y, const float* x, int64_t n) {
    each(n, [&](int64_t i, auto tag) { store(y + i, widen(narrow(load(x + i, tag))), tag); });
}

void add(float* y, const float* x, int64_t n) {
    each(n, [&](int64_t i, auto tag) { store(y + i, load(y + i, tag) + load(x + i, tag), tag); });
}

double sum_squares(const float* x, int64_t n) {
    Double a{}, b{};
    each(n, [&](int64_t i, auto tag) {
        const Vec v = load(x + i, tag);
        const Double l = low_half(v), h = high_half(v);
        a += l * l;
        b += h * h;
    });
    return sum(a + b);
}

void exp(float* y, const float* x, int64_t n) {
    each(n, [&](int64_t i, auto tag) { store(y + i, vexp(load(x + i, tag)), tag); });
}

void rope(void* x, bool low, const float* table, int heads, int D, bool half, bool inverse) {
    const float sign = inverse ? -1.0f : 1.0f;
    if (low) rope_token(static_cast<uint16_t*>(x), table, heads, D, half, sign);
    else rope_token(static_cast<float*>(x), table, heads, D, half, sign);
}

void swiglu_forward(void* y, bool low, const void* gate_up, int64_t rows, int64_t F) {
    if (low) swiglu_rows(static_cast<uint16_t*>(y), static_cast<const uint16_t*>(gate_up), rows, F);
    else swiglu_rows(static_cast<float*>(y), static_cast<const float*>(gate_up), rows, F);
}

void swiglu_backward(void* d, bool low, const void* dy, const void* gate_up, int64_t rows, int64_t F) {
    using Low = uint16_t;
    if (low) swiglu_rows_backward(static_cast<Low*>(d), static_cast<const Low*>(dy), static_cast<const Low*>(gate_up), rows, F);
    else
        swiglu_rows_backward(static_cast<float*>(d), static_cast<const float*>(dy), static_cast<const float*>(gate_up), rows, F);
}

void update(const UpdateArgs& a) { a.adaptive ? update_range<true>(a) : update_range<false>(a); }

}  // namespace bam::BAM_ISA
