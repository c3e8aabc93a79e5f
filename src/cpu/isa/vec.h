// One SIMD vector of fp32 lanes in GCC's vector extensions, as wide as the instruction set this file is compiled for.
// Works on any machine; the few places where the compiler does badly use intrinsics. Everything has internal linkage
// (kernels.h).
#pragma once
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Int __attribute__((vector_size(W * 4)));
typedef uint32_t UInt __attribute__((vector_size(W * 4)));
typedef uint16_t Half __attribute__((vector_size(W * 2)));
typedef double Double __attribute__((vector_size(W * 4)));  // W/2 lanes

#define BAM_INLINE inline __attribute__((always_inline))

// Tags for a whole vector and for the n < W last elements of a row.
struct Whole {};
struct Part {
    int n;
};

// f(i, tag) over [0, n) in steps of a vector.
template <typename F>
BAM_INLINE void each(int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, Whole{});
    if (i < n) f(i, Part{int(n - i)});
}

BAM_INLINE Vec splat(float x) {
    return x - Vec{};
}  // x - 0: keeps -0 and compiles to a broadcast
BAM_INLINE Int splat(int32_t x) {
    return x - Int{};
}

BAM_INLINE Vec load(const float* p, Whole = {}) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
BAM_INLINE void store(float* p, Vec v, Whole = {}) {
    __builtin_memcpy(p, &v, sizeof v);
}

BAM_INLINE Vec widen(Half h) {
#if defined(__AVX512F__)
    return (Vec)((UInt)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h) << 16);
#elif defined(__AVX2__)
    return (Vec)((UInt)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (Vec)(__builtin_convertvector(h, UInt) << 16);
#endif
}

// Round to nearest even; a NaN stays one.
BAM_INLINE Half narrow(Vec v) {
#if defined(__AVX512BF16__)
    return (Half)_mm512_cvtneps_pbh((__m512)v);
#else
    const UInt u = (UInt)v;
    const UInt rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const UInt quiet = (u >> 16) | 0x40u;
    return __builtin_convertvector(v != v ? quiet : rounded, Half);
#endif
}

// Two rows of bf16 interleaved: lane i holds a[i] below b[i].
BAM_INLINE UInt interleave(Half a, Half b) {
    return (UInt)widen(a) >> 16 | (UInt)widen(b);
}

BAM_INLINE UInt narrow_pair(Vec a, Vec b) {
#if defined(__AVX512BF16__)
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    const auto order = (__m512i)(UInt{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001u + 0x100000u);
    return (UInt)_mm512_permutexvar_epi16(order, both);
#else
    return interleave(narrow(a), narrow(b));
#endif
}

BAM_INLINE Vec load(const uint16_t* p, Whole = {}) {
    Half h;
    __builtin_memcpy(&h, p, sizeof h);
    return widen(h);
}
BAM_INLINE void store(uint16_t* p, Vec v, Whole = {}) {
    const Half h = narrow(v);
    __builtin_memcpy(p, &h, sizeof h);
}

#if defined(__AVX512F__)
BAM_INLINE __mmask16 mask_of(Part t) {
    return __mmask16((1u << t.n) - 1);
}
BAM_INLINE Vec load(const float* p, Part t) {
    return (Vec)_mm512_maskz_loadu_ps(mask_of(t), p);
}
BAM_INLINE Vec load(const uint16_t* p, Part t) {
    return widen((Half)_mm256_maskz_loadu_epi16(mask_of(t), p));
}
BAM_INLINE void store(float* p, Vec v, Part t) {
    _mm512_mask_storeu_ps(p, mask_of(t), (__m512)v);
}
BAM_INLINE void store(uint16_t* p, Vec v, Part t) {
    _mm256_mask_storeu_epi16(p, mask_of(t), (__m256i)narrow(v));
}
#else
BAM_INLINE Vec load(const float* p, Part t) {
    Vec v{};
    for (int i = 0; i < t.n; ++i) v[i] = p[i];
    return v;
}
BAM_INLINE Vec load(const uint16_t* p, Part t) {
    Half h{};
    for (int i = 0; i < t.n; ++i) h[i] = p[i];
    return widen(h);
}
BAM_INLINE void store(float* p, Vec v, Part t) {
    for (int i = 0; i < t.n; ++i) p[i] = v[i];
}
BAM_INLINE void store(uint16_t* p, Vec v, Part t) {
    const Half h = narrow(v);
    for (int i = 0; i < t.n; ++i) p[i] = h[i];
}
#endif

// v with the lanes past the end of the row replaced.
BAM_INLINE Vec keep(Vec v, Vec, Whole) {
    return v;
}
BAM_INLINE Vec keep(Vec v, Vec other, Part t) {
    for (int i = t.n; i < W; ++i) v[i] = other[i];
    return v;
}

// a > b ? a : b in each lane: b where either is NaN.
BAM_INLINE Vec vmax(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_mask_max_ps((__m512)a, 0xffff, (__m512)a, (__m512)b);  // no mask: gcc 12 warns of its own header
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 1/x for normal x, to 1.5 ulp.
BAM_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
    const Vec r = (Vec)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

// Whether any lane of a comparison holds.
BAM_INLINE bool any(Int v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)v) != 0;
#else
    int32_t x = 0;
    for (int i = 0; i < W; ++i) x |= v[i];
    return x != 0;
#endif
}

BAM_INLINE Vec vsqrt(Vec a) {
#if defined(__AVX512F__)
    return (Vec)_mm512_mask_sqrt_ps((__m512)a, 0xffff, (__m512)a);
#elif defined(__AVX2__)
    return (Vec)_mm256_sqrt_ps((__m256)a);
#else
    for (int i = 0; i < W; ++i) a[i] = __builtin_sqrtf(a[i]);
    return a;
#endif
}

// Lanes summed in a fixed tree.
BAM_INLINE float sum(Vec v) {
    float x[W];
    store(x, v);
    for (int s = W / 2; s; s /= 2)
        for (int i = 0; i < s; ++i) x[i] += x[i + s];
    return x[0];
}
BAM_INLINE double sum(Double v) {
    double s = 0;
    for (int i = 0; i < W / 2; ++i) s += v[i];
    return s;
}
BAM_INLINE float maximum(Vec v) {
    float m = v[0];
    for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
    return m;
}

// The two halves of v as doubles.
BAM_INLINE Double low_half(Vec v) {
    typedef float HalfVec __attribute__((vector_size(W * 2)));
    HalfVec h;
    __builtin_memcpy(&h, &v, sizeof h);
    return __builtin_convertvector(h, Double);
}
BAM_INLINE Double high_half(Vec v) {
    typedef float HalfVec __attribute__((vector_size(W * 2)));
    HalfVec h;
    __builtin_memcpy(&h, reinterpret_cast<const char*>(&v) + sizeof h, sizeof h);
    return __builtin_convertvector(h, Double);
}

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// 2^f for f in [-1/2, 1/2] times 2^n, n in the low bits of `bits`: minimax polynomials that give 2^0 = 1, with relative
// error 3e-6 (degree 4: enough for what becomes bf16), 1e-7 (5) or 2e-8 (6).
template <int kDegree>
BAM_INLINE Vec exp2_reduced(Vec f, Int bits) {
    Vec p;
    if constexpr (kDegree == 4) {
        p = 9.58285388e-3f * f + 5.59064299e-2f;
        p = p * f + 2.40240991e-1f;
        p = p * f + 6.93124175e-1f;
    } else if constexpr (kDegree == 5) {
        p = 1.32647273e-3f * f + 9.67151299e-3f;
        p = p * f + 5.55073358e-2f;
        p = p * f + 2.40222424e-1f;
        p = p * f + 6.93147004e-1f;
    } else {
        p = 1.53533605e-4f * f + 1.3398875e-3f;
        p = p * f + 9.61843692e-3f;
        p = p * f + 5.55033237e-2f;
        p = p * f + 2.40226477e-1f;
        p = p * f + 6.93147182e-1f;
    }
    p = p * f + 1.0f;
    return (Vec)((UInt)p + ((UInt)bits << 23));
}

constexpr float kRound =
    12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to an integer held in the low bits

// 2^x for x <= 0 (a little above is fine): below 2^-126 exactly 0, NaN stays NaN.
template <int kDegree = 6>
BAM_INLINE Vec exp2_nonpositive(Vec x) {
    const Vec y = vmax(splat(-126.0f), x);
    const Vec r = y + kRound;
    const Vec p = exp2_reduced<kDegree>(y - (r - kRound), (Int)r);
    return x < -126.0f ? Vec{} : p;
}

// 1 / (1 + e^-x); 0 below -87, NaN stays NaN.
BAM_INLINE Vec sigmoid(Vec x) {
    const Vec t = vmax(splat(-126.0f), -vmax(splat(-126.0f), x * kLog2e));  // -x in powers of two, within +-126
    const Vec r = t + kRound;
    const Vec e = exp2_reduced<6>(t - (r - kRound), (Int)r);
    return x < -87.0f ? Vec{} : reciprocal(1.0f + e);
}

// e^x everywhere: 0 below 2^-126, infinity above the largest float, NaN stays NaN. 1.5 ulp.
BAM_INLINE Vec vexp(Vec x) {
    Vec y = x < -87.33654f ? splat(-87.33654f) : x;
    y = y > 88.72283f ? splat(88.72283f) : y;
    const Vec r = y * kLog2e + kRound;
    const Vec n = r - kRound;
    // e^(y - n ln 2), ln 2 in two parts (Cody and Waite).
    const Vec f = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    // 2^128 does not fit: multiply in two steps.
    const Int half = (Int)r - (Int)splat(kRound);
    const Vec p = exp2_reduced<6>(f * kLog2e, half + (half > 127));
    const Vec q = half > 127 ? p + p : p;
    const Vec t = x <= 88.72283f ? q : x * kInfinity;
    return x < -87.33654f ? Vec{} : t;
}

}  // namespace
