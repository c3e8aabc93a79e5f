// AMX: eight registers of 16 rows of 64 bytes. Products of bf16 tiles with fp32 sums, for gemm.h.
#pragma once
#include <immintrin.h>

#include "cpu/isa/vec.h"

namespace {

// All eight registers whole. oneDNN sets its own shapes at the beginning of each of its kernels.
inline void begin_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}
inline void end_tiles() {
    _tile_release();
}

// R x V tiles of C: 0..3; A's rows in 4, 5; B's columns in 6, 7.
template <int R, int V>
BAM_INLINE void tile_block(float* c, int ldc, const uint16_t* a, int lda, const float* b, int ldb, int k,
                           bool accumulate) {
    const int64_t c_row = int64_t(ldc) * 4, a_row = int64_t(lda) * 2, b_row = int64_t(ldb) * 4;
    float* c2 = c + 16 * ldc;
    if (accumulate) {
        _tile_loadd(0, c, c_row);
        if constexpr (V > 1) _tile_loadd(1, c + 16, c_row);
        if constexpr (R > 1) _tile_loadd(2, c2, c_row);
        if constexpr (R > 1 && V > 1) _tile_loadd(3, c2 + 16, c_row);
    } else {
        _tile_zero(0);
        if constexpr (V > 1) _tile_zero(1);
        if constexpr (R > 1) _tile_zero(2);
        if constexpr (R > 1 && V > 1) _tile_zero(3);
    }
    for (int u = 0; u < k; u += 32, a += 32, b += 16 * ldb) {
        _tile_loadd(6, b, b_row);
        _tile_loadd(4, a, a_row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (V > 1) {
            _tile_loadd(7, b + 16, b_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R > 1) {
            _tile_loadd(5, a + 16 * lda, a_row);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_row);
    if constexpr (V > 1) _tile_stored(1, c + 16, c_row);
    if constexpr (R > 1) _tile_stored(2, c2, c_row);
    if constexpr (R > 1 && V > 1) _tile_stored(3, c2 + 16, c_row);
}

template <int V>
void tile_columns(float* c, int ldc, const uint16_t* a, int lda, const float* b, int ldb, int M, int k,
                  bool accumulate) {
    int i = 0;
    for (; M - i >= 32; i += 32) tile_block<2, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    if (i < M) tile_block<1, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
}

// M and N multiples of 16, k of 32; ldb in 32-bit units. gcc 12 writes the tile intrinsics as asm that does not say it
// touches memory: hence the barriers.
inline void tile_gemm(float* c, int ldc, const uint16_t* a, int lda, const float* b, int ldb, int M, int N, int k,
                      bool accumulate) {
    asm volatile("" ::: "memory");
    int n = 0;
    for (; N - n >= 32; n += 32) tile_columns<2>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
    if (n < N) tile_columns<1>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
    asm volatile("" ::: "memory");
}

}  // namespace
