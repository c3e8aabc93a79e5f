// Matrices as oneDNN's matmul wants them: transposed, or in its blocks for the second operand B (k, n) of a bf16
// product: [n / 64][k / 32] blocks of [16][64][2], two k's beside each other, zero past the ends.
#include "cpu/isa/declare.h"
#include "cpu/isa/operands.h"

namespace {

using bam::kPackK;
using bam::kPackN;

BAM_INLINE Half load_half(const uint16_t* p, int n) {
    Half h{};
    if (n >= W)
        __builtin_memcpy(&h, p, sizeof h);
    else
        for (int i = 0; i < n; ++i) h[i] = p[i];
    return h;
}
BAM_INLINE Half load_half(const float* p, int n) {
    return narrow(n >= W ? load(p) : n > 0 ? load(p, Part{n}) : Vec{});
}

BAM_INLINE UInt load_pair(const uint16_t* a, const uint16_t* b, int n) {
    return interleave(load_half(a, n), load_half(b, n));
}
BAM_INLINE UInt load_pair(const float* a, const float* b, int n) {
    if (n >= W) return narrow_pair(load(a), load(b));
    return interleave(load_half(a, n), load_half(b, n));
}

// kFar: past the caches where the address allows it, so that the old contents of lines need not be fetched.
template <bool kFar>
BAM_INLINE void put(void* p, Vec v) {
#if defined(__AVX512F__)
    if (kFar && reinterpret_cast<uintptr_t>(p) % 64 == 0)
        return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
    store(static_cast<float*>(p), v);
}
BAM_INLINE void end_puts() {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

int clamp(int64_t n, int limit) {
    return int(n < 0 ? 0 : n < limit ? n : limit);
}

template <bool kFar, typename T>
void pack_rows(uint16_t* y, const T* x, int64_t rows, int64_t stride, int columns) {
    for (int64_t k = 0; k < rows; k += 2, y += 2 * kPackN) {
        const T *a = x + k * stride, *b = k + 1 < rows ? a + stride : a;
        for (int c = 0; c < kPackN; c += W) {
            const UInt u = load_pair(a + c, b + c, columns - c);
            put<kFar>(y + 2 * c, (Vec)(k + 1 < rows ? u : u & 0xffffu));
        }
    }
    for (int64_t k = round_up(rows, 2); k < round_up(rows, kPackK); k += 2, y += 2 * kPackN)
        __builtin_memset(y, 0, 2 * kPackN * sizeof *y);
    end_puts();
}

template <bool kFar>
void pack_columns(uint16_t* y, const float* x, int64_t rows, int64_t stride, int columns) {
    for (int64_t k = 0; k < rows; k += 2 * W, y += 2 * W * kPackN)
        for (int c = 0; c < kPackN; c += W) {
            Int tile[W] = {};
            for (int r = 0; r < W; ++r) {
                if (c + r >= columns) continue;
                const float* row = x + (c + r) * stride + k;
                const Half halves[2] = {load_half(row, clamp(rows - k, W)), load_half(row + W, clamp(rows - k - W, W))};
                __builtin_memcpy(&tile[r], halves, sizeof tile[r]);
            }
            exchange_rows<W / 2>(tile);
            for (int r = 0; r < W; ++r) put<kFar>(y + 2 * (r * kPackN + c), (Vec)tile[r]);
        }
    for (int64_t k = round_up(rows, 2 * W); k < round_up(rows, kPackK); k += 2, y += 2 * kPackN)
        __builtin_memset(y, 0, 2 * kPackN * sizeof *y);
    end_puts();
}

template <bool kFar>
void transpose(uint16_t* y, const uint16_t* x, int64_t rows, int64_t columns, int64_t y_stride, int64_t x_stride) {
    for (int64_t j = 0; j < columns; j += W)
        for (int64_t i = 0; i < rows; i += 2 * W) {
            const int n = clamp(columns - j, W), m = clamp(rows - i, 2 * W);
            Int tile[W];
            for (int r = 0; r < 2 * W; ++r)  // the next rows: strides of kilobytes are not foreseen by the hardware
                if (i + 2 * W + r < rows) __builtin_prefetch(x + (i + 2 * W + r) * x_stride + j);
            for (int r = 0; r < W; ++r) {
                const uint16_t* row = x + (i + 2 * r) * x_stride + j;
                const Half a = load_half(row, 2 * r < m ? n : 0);
                const Half b = load_half(row + (2 * r + 1 < m ? x_stride : 0), 2 * r + 1 < m ? n : 0);
                tile[r] = (Int)interleave(a, b);
            }
            exchange_rows<W / 2>(tile);
            for (int r = 0; r < n; ++r) {
                if (m == 2 * W)
                    put<kFar>(y + (j + r) * y_stride + i, (Vec)tile[r]);
                else
                    __builtin_memcpy(y + (j + r) * y_stride + i, &tile[r], m * sizeof *y);
            }
        }
    end_puts();
}

}  // namespace

namespace bam::BAM_ISA {

// One column of blocks: x (rows, columns <= 64), rows of it `stride` apart, k along the rows of x. rows is a multiple
// of 32 but at the matrix's end.
void pack_kn(uint16_t* y, const void* x, bool low, int64_t rows, int64_t stride, int columns, bool far) {
    auto run = [&](const auto* from) {
        far ? pack_rows<true>(y, from, rows, stride, columns) : pack_rows<false>(y, from, rows, stride, columns);
    };
    if (low)
        run(static_cast<const uint16_t*>(x));
    else
        run(static_cast<const float*>(x));
}

// The same column of blocks from its transpose: x (columns <= 64, rows) fp32, k along the columns of x.
void pack_nk(uint16_t* y, const float* x, int64_t rows, int64_t stride, int columns, bool far) {
    far ? pack_columns<true>(y, x, rows, stride, columns) : pack_columns<false>(y, x, rows, stride, columns);
}

// y (columns, rows) = x (rows, columns) transposed.
void transpose16(uint16_t* y, const uint16_t* x, int64_t rows, int64_t columns, int64_t y_stride, int64_t x_stride,
                 bool far) {
    far ? transpose<true>(y, x, rows, columns, y_stride, x_stride)
        : transpose<false>(y, x, rows, columns, y_stride, x_stride);
}

}  // namespace bam::BAM_ISA
