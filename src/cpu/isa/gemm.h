// Small dense products for attention's tiles, C (M, N) fp32 {=, +=} A (M, k) B (k, N), all in cache. A is row-major
// with k contiguous; B is row-major fp32, or bf16 with two rows interleaved (a 32-bit unit holds k and k + 1 of one
// column, as vdpbf16ps and AMX want it). M is a multiple of 8, N of the vector width (AMX: 16, k of 32); operands are
// padded with zeros.
#pragma once
#include "cpu/isa/vec.h"
#if defined(__AMX_BF16__)
#define BAM_TILES
#include "cpu/isa/tiles.h"
#endif

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxColumns = 4;  // vectors of C a row of registers holds; 32 registers
#else
constexpr int kMaxColumns = 2;  // 16 registers
#endif

constexpr int64_t round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}

// The kinds of product: what elements operands have, what their dimensions are padded to, and acc += A B for one k
// (fp32) or two (bf16): `b` is a row of B, `a` the matching element or pair of A.
struct Fp32 {
    using Elem = float;
    static constexpr int kStep = 1;              // k's a 32-bit unit of B holds
    static constexpr int kPadD = W > 8 ? W : 8;  // head size along k
    static constexpr int kPadWidth = kPadD;      // head size along M and N
    static constexpr int kPadKeys = 8, kPadQueries = W;

    static BAM_INLINE Vec multiply_add(Vec acc, const float* a, Vec b) { return acc + splat(*a) * b; }
};

#if defined(__AVX512BF16__)
struct Bf16 {
    using Elem = uint16_t;
    static constexpr int kStep = 2;
    static constexpr int kPadD = 16, kPadWidth = 16;
    static constexpr int kPadKeys = 8, kPadQueries = 16;

    static BAM_INLINE Vec multiply_add(Vec acc, const uint16_t* a, Vec b) {
        int32_t pair;
        __builtin_memcpy(&pair, a, 4);
        return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)splat(pair), (__m512bh)b);
    }
};
#endif

#if defined(BAM_TILES)
struct Bf16Tiles {
    using Elem = uint16_t;
    static constexpr int kStep = 2;
    static constexpr int kPadD = 32, kPadWidth = 16;
    static constexpr int kPadKeys = 32, kPadQueries = 32;
};
#endif

// The kind for bf16 tensors; without bf16 arithmetic they are widened when they are packed.
#if defined(BAM_TILES)
using LowOp = Bf16Tiles;
#elif defined(__AVX512BF16__)
using LowOp = Bf16;
#else
using LowOp = Fp32;
#endif

// Around all products of a thread's task.
template <typename Op>
struct ProductScope {
#if defined(BAM_TILES)
    ProductScope() {
        if constexpr (sizeof(typename Op::Elem) == 2) begin_tiles();
    }
    ~ProductScope() {
        if constexpr (sizeof(typename Op::Elem) == 2) end_tiles();
    }
#else
    ProductScope() {}  // not trivial: no warning that it is unused
#endif
};

template <typename Op, int R, int V>
BAM_INLINE void gemm_tile(float* c, int ldc, const typename Op::Elem* a, int lda, const float* b, int ldb, int k,
                          bool accumulate) {
    Vec acc[R][V];
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) acc[i][j] = accumulate ? load(c + i * ldc + j * W) : Vec{};
    for (int u = 0; u < k; u += Op::kStep, b += ldb) {
        Vec row[V];
        for (int j = 0; j < V; ++j) row[j] = load(b + j * W);
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < V; ++j) acc[i][j] = Op::multiply_add(acc[i][j], a + i * lda + u, row[j]);
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) store(c + i * ldc + j * W, acc[i][j]);
}

// All rows of V vectors of columns: R at a time, then 4, then 2.
template <typename Op, int R, int V>
void gemm_columns(float* c, int ldc, const typename Op::Elem* a, int lda, const float* b, int ldb, int M, int k,
                  bool accumulate) {
    int i = 0;
    for (; M - i >= R; i += R) gemm_tile<Op, R, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    for (; M - i >= 4; i += 4) gemm_tile<Op, 4, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    for (; i < M; i += 2) gemm_tile<Op, 2, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
}

template <typename Op>
void vector_gemm(float* c, int ldc, const typename Op::Elem* a, int lda, const float* b, int ldb, int M, int N, int k,
                 bool accumulate) {
    int n = 0;
    if constexpr (kMaxColumns == 4) {
        for (; N - n >= 4 * W; n += 4 * W) gemm_columns<Op, 6, 4>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
        for (; N - n >= 3 * W; n += 3 * W) gemm_columns<Op, 8, 3>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
        for (; N - n >= 2 * W; n += 2 * W) gemm_columns<Op, 12, 2>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
        for (; n < N; n += W) gemm_columns<Op, 16, 1>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
    } else {
        for (; N - n >= 2 * W; n += 2 * W) gemm_columns<Op, 4, 2>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
        for (; n < N; n += W) gemm_columns<Op, 8, 1>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
    }
}

// ldb counts 32-bit units.
template <typename Op>
void gemm(float* c, int ldc, const typename Op::Elem* a, int lda, const void* b_data, int ldb, int M, int N, int k,
          bool accumulate) {
    const float* b = static_cast<const float*>(b_data);
#if defined(BAM_TILES)
    if constexpr (sizeof(*a) == 2)
        return tile_gemm(c, ldc, a, lda, b, ldb, M, N, k, accumulate);
    else
#endif
        vector_gemm<Op>(c, ldc, a, lda, b, ldb, M, N, k, accumulate);
}

}  // namespace
