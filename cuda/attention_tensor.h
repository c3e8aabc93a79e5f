// Attention on tensor cores: bf16 heads, fp32 softmax and sums. Instantiated in attention_small.cu and attention_large.cu.
//
// A warp owns 16 rows of a tile (forward: twice 16 for small heads) and computes them against 64 columns of the other side with
// mma.m16n8k16 (register maps: ptx.h): lane 4g + t holds rows g and g + 8, columns 2t and 2t + 1 of every eight. What the softmax leaves
// in these registers is, packed to bf16, the left operand of the next product. Tiles lie in shared memory with rows padded by 16 bytes,
// so that ldmatrix meets no bank conflicts, and arrive by cp.async while the tile before is worked on.
//
// The bias of a tile depends on row - column only: a window of rows + columns numbers, held twice, the second time moved by one, so
// that any two neighbours can be read as one aligned pair.
#pragma once
#include "cuda/attention.h"

namespace bam {

namespace tensor {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kColumns = 64;  // of the other side in a tile

template <int D>
struct Shape {
    static constexpr int kLd = D + 8;
    static constexpr int kStages = D <= 64 ? 2 : 1;          // tiles of the other side in shared memory
    static constexpr int kForwardTiles = D <= 64 ? 2 : 1;    // of 16 rows a warp
    static constexpr int kForwardRows = 16 * kWarps * kForwardTiles;
    static constexpr int kBackwardRows = 16 * kWarps;
};

// Rows [first, first + N) of a matrix of heads, D elements each; zeros past `end` and past the head's size.
template <int N, int D>
__device__ __forceinline__ void fetch_rows(Bf16* to, const Heads& m, int b, int head, int first, int end, int size) {
    const Bf16* from = static_cast<const Bf16*>(m.data) + b * m.batch_stride + int64_t(head) * size;
    for (int i = int(threadIdx.x); i < N * (D / 8); i += kThreads) {
        const int r = i / (D / 8), d = i % (D / 8) * 8;
        const bool inside = first + r < end && d < size;
        async_copy16(to + r * Shape<D>::kLd + d, inside ? from + (first + r) * m.token_stride + d : from, inside);
    }
}

// table[lowest .. lowest + N) twice, zeros outside the table.
template <int N>
__device__ __forceinline__ void fetch_window(float* to, const float* table, int64_t distances, int lowest) {
    for (int i = int(threadIdx.x); i < 2 * N; i += kThreads) {
        const int d = lowest + (i < N ? i : i - N + 1);
        const bool inside = d >= 0 && d < distances;
        async_copy4(to + i, inside ? table + d : table, inside);
    }
}

// A window of N from which pairs at odd or at even places are read: those of one thread are all of one kind.
template <int N>
__device__ __forceinline__ const float* for_pairs(const float* window, int odd) { return odd ? window + N - 1 : window; }
// Entries i and i + 1.
__device__ __forceinline__ float2 pair_at(const float* window, int i) { return *reinterpret_cast<const float2*>(window + i); }

// Left operand: 16 rows from `row`, 16 elements from column k.
template <int D>
__device__ __forceinline__ void left_operand(uint32_t a[4], const Bf16* tile, int row, int k) {
    const int lane = int(threadIdx.x % 32);
    load_matrices(a, tile + (row + lane % 16) * Shape<D>::kLd + k + lane / 16 * 8);
}
// Right operands b[0..1], b[2..3] of columns `row` .. + 8, + 8 .. + 16: the tile's rows are the product's columns.
template <int D>
__device__ __forceinline__ void right_operand(uint32_t b[4], const Bf16* tile, int row, int k) {
    const int lane = int(threadIdx.x % 32);
    load_matrices(b, tile + (row + lane % 8 + lane / 16 * 8) * Shape<D>::kLd + k + lane / 8 % 2 * 8);
}
// The same where the tile's rows are summed over: 16 of them from `row`, columns from `column`.
template <int D>
__device__ __forceinline__ void right_operand_by_rows(uint32_t b[4], const Bf16* tile, int row, int column) {
    const int lane = int(threadIdx.x % 32);
    load_matrices_transposed(b, tile + (row + lane % 16) * Shape<D>::kLd + column + lane / 16 * 8);
}
// Results of two products of eight columns as the left operand of the next.
__device__ __forceinline__ void as_left_operand(uint32_t a[4], const float lower[4], const float upper[4]) {
    a[0] = pack_bf16(lower[0], lower[1]);
    a[1] = pack_bf16(lower[2], lower[3]);
    a[2] = pack_bf16(upper[0], upper[1]);
    a[3] = pack_bf16(upper[2], upper[3]);
}

// out (16 rows of a warp, D) += left (16, 16 from k) right (16 from `row`, D).
template <int D>
__device__ __forceinline__ void accumulate(float out[D / 8][4], const uint32_t left[4], const Bf16* right, int row) {
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        right_operand_by_rows<D>(b, right, row, 16 * n);
        mma(out[2 * n], left, b);
        mma(out[2 * n + 1], left, b + 2);
    }
}

// Query rows of a block and the keys they see.
struct Queries {
    int b, h, kv, first, position;  // position: key index of the first query
    int begin, end;                 // keys seen by any of them

    __device__ static Queries of(const AttentionArgs& a, int rows) {
        Queries q;
        q.b = int(blockIdx.z), q.h = int(blockIdx.y), q.kv = q.h / (a.H / a.K);
        q.first = (int(gridDim.x) - 1 - int(blockIdx.x)) * rows;  // the last rows see most keys: first
        q.position = (a.offset ? a.offset[q.b] : 0) + q.first;
        q.begin = a.key_begin[int64_t(q.b) * a.T + q.first];
        q.end = q.position + min(rows, a.T - q.first);
        return q;
    }
    // Whether some query of `rows` from first + `row` does not see all keys from `key`.
    __device__ bool partly_seen(const AttentionArgs& a, int row, int rows, int key) const {
        return key + kColumns - 1 > position + row || first + row + rows > a.T || a.key_begin[int64_t(b) * a.T + first + row + rows - 1] > key;
    }
};

// ---- forward ----------------------------------------------------------------------------------------------------------------

template <int D>
constexpr size_t forward_shared(bool bias) {
    using S = Shape<D>;
    return sizeof(Bf16) * (S::kForwardRows + 2 * S::kStages * kColumns) * S::kLd +
           (bias ? sizeof(float) * S::kStages * 2 * (S::kForwardRows + kColumns) : 0);
}

template <int D, bool kBias>
__global__ void __launch_bounds__(kThreads) forward_kernel(AttentionArgs a) {
    using S = Shape<D>;
    constexpr int kRows = S::kForwardRows, kTiles = S::kForwardTiles, kTile = kColumns * S::kLd, kWindow = kRows + kColumns;
    Bf16* queries = dynamic_shared<Bf16>();
    Bf16* keys = queries + kRows * S::kLd;
    Bf16* values = keys + S::kStages * kTile;
    float* windows = reinterpret_cast<float*>(values + S::kStages * kTile);
    const Queries q = Queries::of(a, kRows);
    const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4, warp_row = int(threadIdx.x / 32) * 16 * kTiles;
    const auto fetch = [&](int stage, int first) {
        fetch_rows<kColumns, D>(keys + stage * kTile, a.k, q.b, q.kv, first, q.end, a.D);
        fetch_rows<kColumns, D>(values + stage * kTile, a.v, q.b, q.kv, first, q.end, a.D);
        if (kBias) fetch_window<kWindow>(windows + stage * 2 * kWindow, a.bias + q.h * a.distances, a.distances, q.position - first - kColumns + 1);
        async_commit();
    };
    float score_scale[kTiles][2], bias_scale[kTiles][2], top[kTiles][2], sum[kTiles][2];
    int begin[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Query row = Query::at(a, q.b, q.h, q.first + warp_row + 16 * m + g + 8 * r);
            score_scale[m][r] = row.score_scale, bias_scale[m][r] = row.bias_scale, begin[m][r] = row.begin;
            top[m][r] = kLowest, sum[m][r] = 0;
        }
    fetch_rows<kRows, D>(queries, a.q, q.b, q.h, q.first, a.T, a.D);
    if (S::kStages == 2) fetch(0, q.begin);
    float out[kTiles][D / 8][4] = {};
    for (int first = q.begin, step = 0; first < q.end; first += kColumns, ++step) {
        const int stage = S::kStages == 2 ? step % 2 : 0;
        if (S::kStages == 1) {
            __syncthreads();  // the tile before is read
            fetch(0, first);
        }
        async_wait<0>();
        __syncthreads();
        if (S::kStages == 2 && first + kColumns < q.end) fetch(1 - stage, first + kColumns);
        if (first > q.position + warp_row + 16 * kTiles - 1) continue;  // the warp's queries see none of these keys
        const Bf16 *key_tile = keys + stage * kTile, *value_tile = values + stage * kTile;
        const float* window = for_pairs<kWindow>(windows + stage * 2 * kWindow, g % 2);

        float x[kTiles][kColumns / 8][4] = {};
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            uint32_t left[kTiles][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) left_operand<D>(left[m], queries, warp_row + 16 * m, k);
#pragma unroll
            for (int n = 0; n < kColumns / 16; ++n) {
                uint32_t right[4];
                right_operand<D>(right, key_tile, 16 * n, k);
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    mma(x[m][2 * n], left[m], right);
                    mma(x[m][2 * n + 1], left[m], right + 2);
                }
            }
        }

        const bool masked = q.partly_seen(a, warp_row, 16 * kTiles, first);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = warp_row + 16 * m + g + 8 * r;
                float most = top[m][r];
#pragma unroll
                for (int n = 0; n < kColumns / 8; ++n) {
                    float2 bias{0, 0};  // of column 2t + 1, of column 2t
                    if (kBias) bias = pair_at(window, row - 8 * n - 2 * t + kColumns - 2);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& v = x[m][n][2 * r + e];
                        v = fmaf(v, score_scale[m][r], (e ? bias.x : bias.y) * bias_scale[m][r]);
                        const int key = first + 8 * n + 2 * t + e;
                        if (masked && (key < begin[m][r] || key > q.position + row)) v = -INFINITY;
                        most = fmaxf(most, v);
                    }
                }
                most = quad_max(most);
                const float shrink = exp2_fast(top[m][r] - most);
                top[m][r] = most;
                sum[m][r] *= shrink;
#pragma unroll
                for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& v = x[m][n][2 * r + e];
                        v = exp2_fast(v - most);
                        sum[m][r] += v;
                    }
#pragma unroll
                for (int d = 0; d < D / 8; ++d) out[m][d][2 * r] *= shrink, out[m][d][2 * r + 1] *= shrink;
            }
#pragma unroll
        for (int k = 0; k < kColumns / 16; ++k)
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                uint32_t left[4];
                as_left_operand(left, x[m][2 * k], x[m][2 * k + 1]);
                accumulate<D>(out[m], left, value_tile, 16 * k);
            }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float total = quad_sum(sum[m][r]), inverse = 1.0f / total;
            const int row = q.first + warp_row + 16 * m + g + 8 * r;
            if (row >= a.T) continue;
            Bf16* to = static_cast<Bf16*>(a.out) + ((int64_t(q.b) * a.T + row) * a.H + q.h) * a.D;
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                if (8 * d < a.D) *reinterpret_cast<uint32_t*>(to + 8 * d + 2 * t) = pack_bf16(out[m][d][2 * r] * inverse, out[m][d][2 * r + 1] * inverse);
            if (a.lse && t == 0) a.lse[(int64_t(q.b) * a.H + q.h) * a.T + row] = top[m][r] * kLn2 + logf(total);
        }
}

// ---- backward: dQ and the rows' sums ------------------------------------------------------------------------------------------

constexpr int kWindows = 1 + kMaxThetas;  // of the bias, of its derivatives

template <int D>
constexpr size_t backward_q_shared(bool bias) {
    using S = Shape<D>;
    return sizeof(Bf16) * (2 * S::kBackwardRows + 2 * S::kStages * kColumns) * S::kLd +
           (bias ? sizeof(float) * S::kStages * kWindows * 2 * (S::kBackwardRows + kColumns) : 0);
}

// Two products of 16 rows by 32 columns: x = left_x right_x, y = left_y right_y.
template <int D>
__device__ __forceinline__ void two_products(float x[4][4], float y[4][4], const Bf16* left_x, const Bf16* left_y, int row, const Bf16* right_x,
                                             const Bf16* right_y, int column) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t lx[4], ly[4];
        left_operand<D>(lx, left_x, row, k);
        left_operand<D>(ly, left_y, row, k);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            uint32_t rx[4], ry[4];
            right_operand<D>(rx, right_x, column + 16 * n, k);
            right_operand<D>(ry, right_y, column + 16 * n, k);
            mma(x[2 * n], lx, rx);
            mma(x[2 * n + 1], lx, rx + 2);
            mma(y[2 * n], ly, ry);
            mma(y[2 * n + 1], ly, ry + 2);
        }
    }
}

template <int D, bool kBias>
__global__ void __launch_bounds__(kThreads) backward_q_kernel(AttentionArgs a) {
    using S = Shape<D>;
    constexpr int kRows = S::kBackwardRows, kTile = kColumns * S::kLd, kWindow = kRows + kColumns;
    Bf16* queries = dynamic_shared<Bf16>();
    Bf16* douts = queries + kRows * S::kLd;
    Bf16* keys = douts + kRows * S::kLd;
    Bf16* values = keys + S::kStages * kTile;
    float* windows = reinterpret_cast<float*>(values + S::kStages * kTile);
    const Queries q = Queries::of(a, kRows);
    const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4, warp_row = int(threadIdx.x / 32) * 16;
    const Heads dout{const_cast<void*>(a.dout), int64_t(a.T) * a.H * a.D, int64_t(a.H) * a.D};
    const auto fetch = [&](int stage, int first) {
        fetch_rows<kColumns, D>(keys + stage * kTile, a.k, q.b, q.kv, first, q.end, a.D);
        fetch_rows<kColumns, D>(values + stage * kTile, a.v, q.b, q.kv, first, q.end, a.D);
        if (kBias) {
            const int lowest = q.position - first - kColumns + 1;
            float* to = windows + stage * kWindows * 2 * kWindow;
            fetch_window<kWindow>(to, a.bias + q.h * a.distances, a.distances, lowest);
            for (int p = 0; p < kMaxThetas; ++p)
                if (a.dbias[p]) fetch_window<kWindow>(to + (1 + p) * 2 * kWindow, a.dbias[p] + q.h * a.distances, a.distances, lowest);
        }
        async_commit();
    };
    float score_scale[2], bias_scale[2], row_max[2], log2_sum[2], delta[2];
    RowSums sums[2];
    int begin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = q.first + warp_row + g + 8 * r;
        const Query query = Query::at(a, q.b, q.h, row);
        const int64_t i = (int64_t(q.b) * a.H + q.h) * a.T + row;
        const bool live = row < a.T && !query.single;  // else every probability is made 0 here
        sums[r].begin(a, q.h);
        score_scale[r] = query.score_scale, bias_scale[r] = query.bias_scale, begin[r] = query.begin;
        row_max[r] = live ? a.row_max[i] : INFINITY, log2_sum[r] = live ? a.log2_sum[i] : 0.0f, delta[r] = live ? a.delta[i] : 0.0f;
    }
    fetch_rows<kRows, D>(queries, a.q, q.b, q.h, q.first, a.T, a.D);
    fetch_rows<kRows, D>(douts, dout, q.b, q.h, q.first, a.T, a.D);
    if (S::kStages == 2) fetch(0, q.begin);
    float dq[D / 8][4] = {};
    for (int first = q.begin, step = 0; first < q.end; first += kColumns, ++step) {
        const int stage = S::kStages == 2 ? step % 2 : 0;
        if (S::kStages == 1) {
            __syncthreads();
            fetch(0, first);
        }
        async_wait<0>();
        __syncthreads();
        if (S::kStages == 2 && first + kColumns < q.end) fetch(1 - stage, first + kColumns);
        if (first > q.position + warp_row + 15) continue;
        const Bf16 *key_tile = keys + stage * kTile, *value_tile = values + stage * kTile;
        const float* window = for_pairs<kWindow>(windows + stage * kWindows * 2 * kWindow, g % 2);
        const bool masked = q.partly_seen(a, warp_row, 16, first);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 32 keys at a time: half the registers
            float x[4][4] = {}, y[4][4] = {};
            two_products<D>(x, y, queries, douts, warp_row, key_tile, value_tile, 32 * half);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = warp_row + g + 8 * r;
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int column = 32 * half + 8 * n + 2 * t, at = row - column + kColumns - 2;
                    float2 bias{0, 0}, table[kMaxThetas];
                    if (kBias) {
                        bias = pair_at(window, at);
#pragma unroll
                        for (int p = 0; p < kMaxThetas; ++p)
                            if (a.dbias[p]) table[p] = pair_at(window + (1 + p) * 2 * kWindow, at);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& v = x[n][2 * r + e];
                        const float score = v, b = e ? bias.x : bias.y;
                        float p = exp2_fast((fmaf(score, score_scale[r], b * bias_scale[r]) - row_max[r]) - log2_sum[r]);
                        const int key = first + column + e;
                        if (masked && (key < begin[r] || key > q.position + row)) p = 0;
                        v = p * (y[n][2 * r + e] - delta[r]);
                        sums[r].add(v, p, score, key);
                        if constexpr (kBias) {
                            sums[r].add_bias(v, b);
#pragma unroll
                            for (int i = 0; i < kMaxThetas; ++i)
                                if (a.dbias[i]) sums[r].add_derivative(i, v, e ? table[i].x : table[i].y);
                        }
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                uint32_t left[4];
                as_left_operand(left, x[2 * k], x[2 * k + 1]);
                accumulate<D>(dq, left, key_tile, 32 * half + 16 * k);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = warp_row + g + 8 * r;
        const Query query = Query::at(a, q.b, q.h, q.first + row);
        const bool inside = q.first + row < a.T;
        const float factor = query.factor * a.scale;
        Bf16* to = static_cast<Bf16*>(a.dq.data) + q.b * a.dq.batch_stride + (q.first + row) * a.dq.token_stride + int64_t(q.h) * a.D;
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
            if (inside && 8 * d < a.D) *reinterpret_cast<uint32_t*>(to + 8 * d + 2 * t) = pack_bf16(dq[d][2 * r] * factor, dq[d][2 * r + 1] * factor);
        sums[r].finish(a, query, q.b, q.h, q.first + row, inside && t == 0);
    }
}

// ---- backward: dK and dV --------------------------------------------------------------------------------------------------------

// What a tile of queries knows of itself, in shared memory.
struct QueryStats {
    float factor, bias_scale, row_max, log2_sum, delta;  // factor: c / sqrt(D)
    int begin;
};

template <int D>
constexpr size_t backward_kv_shared(bool bias) {
    using S = Shape<D>;
    return sizeof(Bf16) * (2 * S::kBackwardRows + 2 * S::kStages * kColumns) * S::kLd + sizeof(QueryStats) * S::kStages * kColumns +
           (bias ? sizeof(float) * S::kStages * 2 * (S::kBackwardRows + kColumns) : 0);
}

// A block owns keys of one key/value head and walks the head's query heads in order; rows are keys, columns are queries.
template <int D, bool kBias>
__global__ void __launch_bounds__(kThreads) backward_kv_kernel(AttentionArgs a) {
    using S = Shape<D>;
    constexpr int kRows = S::kBackwardRows, kTile = kColumns * S::kLd, kWindow = kRows + kColumns;
    Bf16* keys = dynamic_shared<Bf16>();
    Bf16* values = keys + kRows * S::kLd;
    Bf16* queries = values + kRows * S::kLd;
    Bf16* douts = queries + S::kStages * kTile;
    float* windows = reinterpret_cast<float*>(douts + S::kStages * kTile);
    QueryStats* stats = reinterpret_cast<QueryStats*>(windows + (kBias ? S::kStages * 2 * kWindow : 0));
    const int b = int(blockIdx.z), kv = int(blockIdx.y), group = a.H / a.K, first_key = int(blockIdx.x) * kRows;
    const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4, warp_row = int(threadIdx.x / 32) * 16;
    const int32_t* begins = a.key_begin + int64_t(b) * a.T;
    const Heads dout{const_cast<void*>(a.dout), int64_t(a.T) * a.H * a.D, int64_t(a.H) * a.D};
    // Queries up to the last one that sees a key of this block: key_begin does not decrease.
    int end = first_key, past = a.T;
    while (end < past) {
        const int middle = (end + past) / 2;
        if (begins[middle] < first_key + kRows) end = middle + 1;
        else past = middle;
    }
    const int tiles = (end - first_key + kColumns - 1) / kColumns;  // a head
    const auto fetch = [&](int stage, int step) {
        const int h = kv * group + step / tiles, first = first_key + step % tiles * kColumns;
        fetch_rows<kColumns, D>(queries + stage * kTile, a.q, b, h, first, a.T, a.D);
        fetch_rows<kColumns, D>(douts + stage * kTile, dout, b, h, first, a.T, a.D);
        if (kBias) fetch_window<kWindow>(windows + stage * 2 * kWindow, a.bias + h * a.distances, a.distances, first - first_key - kRows + 1);
        async_commit();
        if (int(threadIdx.x) < kColumns) {
            const int row = first + int(threadIdx.x);
            const Query query = Query::at(a, b, h, row);
            const int64_t i = (int64_t(b) * a.H + h) * a.T + row;
            const bool inside = row < a.T;
            stats[stage * kColumns + threadIdx.x] = {query.factor * a.scale, query.bias_scale, inside ? a.row_max[i] : 0.0f,
                                                     inside ? a.log2_sum[i] : 0.0f, inside ? a.delta[i] : 0.0f, query.begin};
        }
    };
    fetch_rows<kRows, D>(keys, a.k, b, kv, first_key, a.T, a.D);
    fetch_rows<kRows, D>(values, a.v, b, kv, first_key, a.T, a.D);
    if (S::kStages == 2) fetch(0, 0);
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    for (int step = 0; step < tiles * group; ++step) {
        const int stage = S::kStages == 2 ? step % 2 : 0, first = first_key + step % tiles * kColumns;
        if (S::kStages == 1) {
            __syncthreads();
            fetch(0, step);
        }
        async_wait<0>();
        __syncthreads();
        if (S::kStages == 2 && step + 1 < tiles * group) fetch(1 - stage, step + 1);
        if (first + kColumns - 1 < first_key + warp_row) continue;  // these queries come before the warp's keys
        const Bf16 *query_tile = queries + stage * kTile, *dout_tile = douts + stage * kTile;
        const float* window = for_pairs<kWindow>(windows + stage * 2 * kWindow, 1 - g % 2);
        const QueryStats* tile_stats = stats + stage * kColumns;
        const bool masked = first < first_key + warp_row + 15 || first + kColumns > a.T || begins[min(first + kColumns, a.T) - 1] > first_key + warp_row;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[4][4] = {}, y[4][4] = {};
            two_products<D>(x, y, keys, values, warp_row, query_tile, dout_tile, 32 * half);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int column = 32 * half + 8 * n + 2 * t;
                const QueryStats own[2] = {tile_stats[column], tile_stats[column + 1]};
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = warp_row + g + 8 * r, key = first_key + row;
                    float2 bias{0, 0};
                    if (kBias) bias = pair_at(window, column - row + kRows - 1);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const QueryStats& s = own[e];
                        const int position = first + column + e;
                        float &v = x[n][2 * r + e], &w = y[n][2 * r + e];
                        float p = exp2_fast((fmaf(v, s.factor * kLog2e, (e ? bias.y : bias.x) * s.bias_scale) - s.row_max) - s.log2_sum);
                        w = p * (w - s.delta) * s.factor;
                        if (masked) {
                            if (position == s.begin) p = 1, w = 0;  // sees one key
                            if (key < s.begin || key > position || position >= a.T) p = 0, w = 0;
                        }
                        v = p;
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                uint32_t left[4];
                as_left_operand(left, x[2 * k], x[2 * k + 1]);
                accumulate<D>(dv, left, dout_tile, 32 * half + 16 * k);
                as_left_operand(left, y[2 * k], y[2 * k + 1]);
                accumulate<D>(dk, left, query_tile, 32 * half + 16 * k);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = first_key + warp_row + g + 8 * r;
        if (key >= a.T) continue;
        Bf16* to_k = static_cast<Bf16*>(a.dk.data) + b * a.dk.batch_stride + key * a.dk.token_stride + int64_t(kv) * a.D;
        Bf16* to_v = static_cast<Bf16*>(a.dv.data) + b * a.dv.batch_stride + key * a.dv.token_stride + int64_t(kv) * a.D;
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
            if (8 * d < a.D) {
                *reinterpret_cast<uint32_t*>(to_k + 8 * d + 2 * t) = pack_bf16(dk[d][2 * r], dk[d][2 * r + 1]);
                *reinterpret_cast<uint32_t*>(to_v + 8 * d + 2 * t) = pack_bf16(dv[d][2 * r], dv[d][2 * r + 1]);
            }
    }
}

inline dim3 grid_for(int rows, int B, int heads, int T) { return dim3(blocks_for(T, rows), unsigned(heads), unsigned(B)); }

}  // namespace tensor

template <int D>
void TensorAttention<D>::forward(const AttentionArgs& a, int B, cudaStream_t stream) {
    const dim3 grid = tensor::grid_for(tensor::Shape<D>::kForwardRows, B, a.H, a.T);
    const size_t shared = tensor::forward_shared<D>(a.bias);
    if (a.bias) launch(tensor::forward_kernel<D, true>, grid, tensor::kThreads, shared, stream, a);
    else launch(tensor::forward_kernel<D, false>, grid, tensor::kThreads, shared, stream, a);
}

template <int D>
void TensorAttention<D>::backward(const AttentionArgs& a, int B, cudaStream_t stream) {
    const dim3 q_grid = tensor::grid_for(tensor::Shape<D>::kBackwardRows, B, a.H, a.T);
    const dim3 kv_grid = tensor::grid_for(tensor::Shape<D>::kBackwardRows, B, a.K, a.T);
    const size_t q_shared = tensor::backward_q_shared<D>(a.bias), kv_shared = tensor::backward_kv_shared<D>(a.bias);
    if (a.bias) {
        launch(tensor::backward_q_kernel<D, true>, q_grid, tensor::kThreads, q_shared, stream, a);
        launch(tensor::backward_kv_kernel<D, true>, kv_grid, tensor::kThreads, kv_shared, stream, a);
    } else {
        launch(tensor::backward_q_kernel<D, false>, q_grid, tensor::kThreads, q_shared, stream, a);
        launch(tensor::backward_kv_kernel<D, false>, kv_grid, tensor::kThreads, kv_shared, stream, a);
    }
}

}  // namespace bam
