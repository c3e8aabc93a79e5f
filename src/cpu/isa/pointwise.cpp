// Conversions, sums, RoPE, SwiGLU and the optimizer's update: one pass over memory each.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace {

using bam::kMaxHeadSize;
using bam::UpdateArgs;

// What element i of a head is multiplied by, and what the other element of its pair is.
struct Turn {
    float own[kMaxHeadSize], other[kMaxHeadSize];

    Turn(const float* table, int D, bool half, float sign) {
        for (int i = 0; i < D / 2; ++i) {
            const int first = half ? i : 2 * i, second = half ? i + D / 2 : 2 * i + 1;
            own[first] = own[second] = table[2 * i];
            other[second] = sign * table[2 * i + 1];
            other[first] = -other[second];
        }
    }
};

BAM_INLINE Vec swap_pairs(Vec x) {
    Int order{};
    for (int i = 0; i < W; ++i) order[i] = i ^ 1;
    return __builtin_shuffle(x, order);
}

template <typename T>
void rope_interleaved(T* x, const Turn& t, int heads, int D) {
    for (int h = 0; h < heads; ++h, x += D)
        each(D, [&](int64_t i, auto tag) {
            const Vec v = load(x + i, tag);
            store(x + i, v * load(t.own + i, tag) + swap_pairs(v) * load(t.other + i, tag), tag);
        });
}

template <typename T>
void rope_half(T* x, const Turn& t, int heads, int D) {
    const int half = D / 2;
    for (int h = 0; h < heads; ++h, x += D)
        each(half, [&](int64_t i, auto tag) {
            const Vec a = load(x + i, tag), b = load(x + half + i, tag), c = load(t.own + i, tag),
                      s = load(t.other + half + i, tag);
            store(x + i, a * c - b * s, tag);
            store(x + half + i, a * s + b * c, tag);
        });
}

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
    const Turn turn(table, D, half, inverse ? -1.0f : 1.0f);
    auto run = [&](auto* to) { half ? rope_half(to, turn, heads, D) : rope_interleaved(to, turn, heads, D); };
    if (low)
        run(static_cast<uint16_t*>(x));
    else
        run(static_cast<float*>(x));
}

void swiglu_forward(void* y, bool low, const void* gate_up, int64_t rows, int64_t F) {
    if (low)
        swiglu_rows(static_cast<uint16_t*>(y), static_cast<const uint16_t*>(gate_up), rows, F);
    else
        swiglu_rows(static_cast<float*>(y), static_cast<const float*>(gate_up), rows, F);
}

void swiglu_backward(void* d, bool low, const void* dy, const void* gate_up, int64_t rows, int64_t F) {
    using Low = uint16_t;
    if (low)
        swiglu_rows_backward(static_cast<Low*>(d), static_cast<const Low*>(dy), static_cast<const Low*>(gate_up), rows,
                             F);
    else
        swiglu_rows_backward(static_cast<float*>(d), static_cast<const float*>(dy), static_cast<const float*>(gate_up),
                             rows, F);
}

void update(const UpdateArgs& a) {
    a.adaptive ? update_range<true>(a) : update_range<false>(a);
}

}  // namespace bam::BAM_ISA
