// AMX: eight registers of 16 rows of 64 bytes. Products of bf16 tiles with fp32 sums, for gemm.h. With
// BAM_EMULATE_TILES the registers are plain memory, so that tests on machines without AMX run the same loops.
#pragma once
#include "cpu/isa/vec.h"

namespace {

#if defined(BAM_EMULATE_TILES)

inline thread_local char tile_memory[8][16][64];

inline void tile_load(int t, const void* p, int64_t stride) {
    for (int i = 0; i < 16; ++i) __builtin_memcpy(tile_memory[t][i], static_cast<const char*>(p) + i * stride, 64);
}
inline void tile_store(int t, void* p, int64_t stride) {
    for (int i = 0; i < 16; ++i) __builtin_memcpy(static_cast<char*>(p) + i * stride, tile_memory[t][i], 64);
}
inline float tile_bf16(int t, int row, int i) {
    uint16_t bits;
    __builtin_memcpy(&bits, tile_memory[t][row] + 2 * i, 2);
    return __builtin_bit_cast(float, uint32_t(bits) << 16);
}
inline void tile_multiply(int c, int a, int b) {
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            float sum;
            __builtin_memcpy(&sum, tile_memory[c][m] + 4 * n, 4);
            for (int k = 0; k < 32; ++k) sum += tile_bf16(a, m, k) * tile_bf16(b, k / 2, 2 * n + k % 2);
            __builtin_memcpy(tile_memory[c][m] + 4 * n, &sum, 4);
        }
}
#define BAM_TILE_ZERO(t) __builtin_memset(tile_memory[t], 0, 1024)
#define BAM_TILE_LOAD(t, p, stride) tile_load(t, p, stride)
#define BAM_TILE_STORE(t, p, stride) tile_store(t, p, stride)
#define BAM_TILE_MULTIPLY(c, a, b) tile_multiply(c, a, b)
inline void begin_tiles() {}
inline void end_tiles() {}

#else

// gcc 12 writes these as asm that does not say it touches memory: hence the barriers in tile_gemm.
#define BAM_TILE_ZERO(t) _tile_zero(t)
#define BAM_TILE_LOAD(t, p, stride) _tile_loadd(t, p, stride)
#define BAM_TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define BAM_TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)

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

#endif

// R x V tiles of C: 0..3; A's rows in 4, 5; B's columns in 6, 7.
template <int R, int V>
BAM_INLINE void tile_block(float* c, int ldc, const uint16_t* a, int lda, const float* b, int ldb, int k,
                           bool accumulate) {
    const int64_t c_row = int64_t(ldc) * 4, a_row = int64_t(lda) * 2, b_row = int64_t(ldb) * 4;
    float* c2 = c + 16 * ldc;
    if (accumulate) {
        BAM_TILE_LOAD(0, c, c_row);
        if constexpr (V > 1) BAM_TILE_LOAD(1, c + 16, c_row);
        if constexpr (R > 1) BAM_TILE_LOAD(2, c2, c_row);
        if constexpr (R > 1 && V > 1) BAM_TILE_LOAD(3, c2 + 16, c_row);
    } else {
        BAM_TILE_ZERO(0);
        if constexpr (V > 1) BAM_TILE_ZERO(1);
        if constexpr (R > 1) BAM_TILE_ZERO(2);
        if constexpr (R > 1 && V > 1) BAM_TILE_ZERO(3);
    }
    for (int u = 0; u < k; u += 32, a += 32, b += 16 * ldb) {
        BAM_TILE_LOAD(6, b, b_row);
        BAM_TILE_LOAD(4, a, a_row);
        BAM_TILE_MULTIPLY(0, 4, 6);
        if constexpr (V > 1) {
            BAM_TILE_LOAD(7, b + 16, b_row);
            BAM_TILE_MULTIPLY(1, 4, 7);
        }
        if constexpr (R > 1) {
            BAM_TILE_LOAD(5, a + 16 * lda, a_row);
            BAM_TILE_MULTIPLY(2, 5, 6);
            if constexpr (V > 1) BAM_TILE_MULTIPLY(3, 5, 7);
        }
    }
    BAM_TILE_STORE(0, c, c_row);
    if constexpr (V > 1) BAM_TILE_STORE(1, c + 16, c_row);
    if constexpr (R > 1) BAM_TILE_STORE(2, c2, c_row);
    if constexpr (R > 1 && V > 1) BAM_TILE_STORE(3, c2 + 16, c_row);
}

template <int V>
void tile_columns(float* c, int ldc, const uint16_t* a, int lda, const float* b, int ldb, int M, int k,
                  bool accumulate) {
    int i = 0;
    for (; M - i >= 32; i += 32) tile_block<2, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    if (i < M) tile_block<1, V>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
}

// M and N multiples of 16, k of 32; ldb in 32-bit units.
inline void tile_gemm(float* c, int ldc, const uint16_t* a, int lda, const float* b, int ldb, int M, int N, int k,
                      bool accumulate) {
    asm volatile("" ::: "memory");
    int n = 0;
    for (; N - n >= 32; n += 32) tile_columns<2>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
    if (n < N) tile_columns<1>(c + n, ldc, a, lda, b + n, ldb, M, k, accumulate);
    asm volatile("" ::: "memory");
}

}  // namespace
