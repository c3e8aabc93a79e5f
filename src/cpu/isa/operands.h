// Rows in memory brought into the shapes in which gemm.h takes its operands.
#pragma once
#include "cpu/isa/gemm.h"

namespace {

template <int kShift>
BAM_INLINE void exchange(Int& a, Int& b) {
    Int first, second;
    for (int l = 0; l < W; ++l) {
        first[l] = l & kShift ? W + (l ^ kShift) : l;
        second[l] = l & kShift ? W + l : l ^ kShift;
    }
    const Int x = a, y = b;
    a = __builtin_shuffle(x, y, first);
    b = __builtin_shuffle(x, y, second);
}

template <int kShift>
BAM_INLINE void exchange_rows(Int (&r)[W]) {
    for (int i = 0; i < W; ++i)
        if (!(i & kShift)) exchange<kShift>(r[i], r[i + kShift]);
    if constexpr (kShift > 1) exchange_rows<kShift / 2>(r);
}

// y (columns, rows) = x (rows, columns) of 32-bit units; rows a multiple of W. Reads up to W - 1 units past a row's
// end.
inline void transpose32(void* y_data, int y_stride, const void* x_data, int x_stride, int rows, int columns) {
    float* y = static_cast<float*>(y_data);
    const float* x = static_cast<const float*>(x_data);
    for (int i = 0; i < rows; i += W)
        for (int j = 0; j < columns; j += W) {
            Int tile[W];
            for (int r = 0; r < W; ++r) tile[r] = (Int)load(x + (i + r) * x_stride + j);
            exchange_rows<W / 2>(tile);
            const int n = columns - j < W ? columns - j : W;
            for (int r = 0; r < W; ++r)
                if (r < n) store(y + (j + r) * y_stride + i, (Vec)tile[r]);
        }
}

// For short runs, where a call of memcpy would cost more than the copying.
template <typename T>
BAM_INLINE void copy(T* y, const T* x, int n) {
    constexpr int kWhole = int(sizeof(Vec) / sizeof(T)), kSome = 16 / int(sizeof(T));
    int i = 0;
    for (; i + kWhole <= n; i += kWhole) __builtin_memcpy(y + i, x + i, sizeof(Vec));
    for (; i + kSome <= n; i += kSome) __builtin_memcpy(y + i, x + i, 16);
    for (; i < n; ++i) y[i] = x[i];
}

// Rows [0, n) of x (stride apart, D wide) as Elem, zero up to (rows, width).
template <typename Elem, typename T>
void copy_rows(Elem* y, int width, const T* x, int64_t stride, int n, int rows, int D) {
    constexpr int kAhead = 16;
    for (int r = 0; r < n; ++r, y += width, x += stride) {
        // Rows lie kilobytes apart, where the hardware does not prefetch.
        if (r + kAhead < n)
            for (int i = 0; i < D * int(sizeof(T)); i += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(x + kAhead * stride) + i);
        if constexpr (sizeof(T) == sizeof(Elem)) {
            copy(y, x, D);
        } else {
            each(D, [&](int64_t i, auto tag) { store(y + i, load(x + i, tag), tag); });
        }
        for (int i = D; i < width; ++i) y[i] = 0;
    }
    if (rows > n) __builtin_memset(y, 0, int64_t(rows - n) * width * sizeof(Elem));
}

// bf16 rows in pairs: unit (r/2, c) of y = x[r][c], x[r + 1][c].
inline void interleave_rows(uint16_t* y, const uint16_t* x, int width, int rows) {
    for (int r = 0; r < rows; r += 2, x += 2 * width, y += 2 * width)
        for (int c = 0; c < width; c += W) {
            Half a, b;
            __builtin_memcpy(&a, x + c, sizeof a);
            __builtin_memcpy(&b, x + width + c, sizeof b);
            store(reinterpret_cast<float*>(y + 2 * c), (Vec)interleave(a, b));
        }
}

// The four shapes in which rows x (rows, width), already padded, enter a product. `scratch` holds rows * width elements
// and a vector more.
template <typename Op>
struct Pack {
    using Elem = typename Op::Elem;

    // As B with k along the row: (width, rows).
    static void b_transposed(Elem* y, int ldb, const Elem* x, int width, int rows) {
        transpose32(y, ldb, x, width / Op::kStep, int(round_up(rows, W)), width / Op::kStep);
    }
    // As B with k across the rows: (rows, width).
    static void b_rows(Elem* y, const Elem* x, int width, int rows) {
        if constexpr (Op::kStep == 1)
            __builtin_memcpy(y, x, int64_t(rows) * width * sizeof(Elem));
        else
            interleave_rows(y, x, width, rows);
    }
    // As A with k across the rows: (width, rows), lda elements apart.
    static void a_transposed(Elem* y, int lda, const Elem* x, int width, int rows, Elem* scratch) {
        if constexpr (Op::kStep == 1) {
            transpose32(y, lda, x, width, int(round_up(rows, W)), width);
        } else {
            interleave_rows(scratch, x, width, rows);
            transpose32(y, lda / 2, scratch, width, int(round_up(rows / 2, W)), width);
        }
    }
};

}  // namespace
