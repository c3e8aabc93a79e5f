// What attention knows of a tile of queries and a tile of keys, in the forms its products want.
//
// Everything is computed transposed: rows of a tile are keys, lanes are queries. So what belongs to a query (scale,
// running maximum, sum, gradient sums of the prior) is a vector, nothing is reduced across lanes, and a distance table
// is read forwards: the lanes of one key row see consecutive distances.
#pragma once
#include "cpu/isa/declare.h"
#include "cpu/isa/gemm.h"
#include "cpu/isa/operands.h"

namespace {

using bam::AttentionCall;
using bam::AttentionTask;

constexpr int kTile = bam::kAttentionTile;  // queries and keys of a tile
constexpr int kTables = bam::kMaxTables;
constexpr int kWindow = 2 * kTile + W;
constexpr float kLowest = -3.0e38f;
// Hands out aligned pieces of scratch memory; with a null base it only counts.
struct Scratch {
    uintptr_t base;
    int64_t used = 0;

    template <typename T>
    T* take(int64_t n) {
        const uintptr_t p = base + used;
        used += round_up(n * int64_t(sizeof(T)), 64);
        return reinterpret_cast<T*>(p);
    }
};

// What a query tile knows of its queries, one lane each. Lanes past its end see no key.
struct Lanes {
    float score_scale[kTile];  // logit * log2 e = qk * score_scale + bias * bias_scale
    float bias_scale[kTile];
    float max[kTile];      // of logits * log2 e
    float sum[kTile];      // of 2^(logit * log2 e - max)
    int32_t begin[kTile];  // first key seen
    int32_t span[kTile];   // last key seen - begin; -1: none
    float reach[kTile];    // |score_scale q|: a key of norm x scores at most reach x; only with bounds
    // Backward.
    float log2_sum[kTile];            // p = 2^(logit * log2 e - max - log2_sum)
    float delta[kTile];               // dout . out
    float score_grad[kTile];          // d logit / d qk; 0 for a query that sees one key
    float table_sum[kTables][kTile];  // sum over keys of dlogits * table
    // Sums over keys of dlogits * qk, dlogits, p * qk. The dlogits of a query sum to zero but for delta's rounding
    // (bf16 out): what that adds to the first, the other two take away. In a sum over a table it is taken away at the
    // key that has more than half of the weight, -1: none. There p is 1 to rounding when the bias is huge (beta < 0 and
    // s_h < 0 at d = 0), and the bias times that rounding would swamp everything.
    float score_sum[kTile], residual[kTile], mean_score[kTile];
    int32_t top[kTile];
    float prior_factor[kTile], log_n[kTile];
};

template <typename Op>
struct QueryTile {
    using Elem = typename Op::Elem;
    int head;          // query head
    int64_t t;         // first query
    int n, N;          // queries, rounded up to vectors
    int64_t position;  // key index of the first query
    int64_t min_begin, max_begin;
    bool plain;  // no query that sees one key only, no huge lse
    bool done;   // all farther keys are negligible
    Lanes* lanes;
    Elem* q_columns;  // B (D, 64)
    float* acc;       // (D, 64): out, or dq
    // Backward.
    Elem* dout_columns;        // B (D, 64)
    Elem *q_rows, *dout_rows;  // B (64, D)

    int64_t last() const { return position + n - 1; }
};

template <typename Op>
struct KeyTile {
    using Elem = typename Op::Elem;
    Elem *k_rows, *v_rows;        // A (64, D)
    Elem *k_columns, *v_columns;  // A (D, 64)
    Elem* tmp;

    void layout(Scratch& s, int D) {
        const int64_t n = int64_t(kTile) * D + W;
        k_rows = s.take<Elem>(n), v_rows = s.take<Elem>(n);
        k_columns = s.take<Elem>(n), v_columns = s.take<Elem>(n), tmp = s.take<Elem>(n);
    }
};

template <typename T>
const T* heads_row(const void* base, int64_t batch_stride, int64_t token_stride, int b, int64_t t, int head, int D) {
    return static_cast<const T*>(base) + b * batch_stride + t * token_stride + int64_t(head) * D;
}

// window[x] = table[d] for d = first + x, 0 outside the table.
inline void fill_window(float* window, const float* table, int64_t distances, int64_t first, int n) {
    if (first >= 0 && first + n <= distances) return copy(window, table + first, n);
    int x = 0;
    for (; x < n && first + x < 0; ++x) window[x] = 0;
    const int64_t end = distances - first < n ? distances - first : n;
    if (x < end) __builtin_memcpy(window + x, table + first + x, (end - x) * sizeof(float)), x = int(end);
    for (; x < n; ++x) window[x] = 0;
}

template <typename Op>
void fill_lanes(const AttentionCall& c, int b, QueryTile<Op>& q) {
    Lanes& l = *q.lanes;
    const float scale = 1.0f / __builtin_sqrtf(float(c.D));
    const int64_t row = int64_t(b) * c.T + q.t;
    q.position = (c.offset ? c.offset[b] : 0) + q.t;
    q.min_begin = q.max_begin = c.key_begin[row];
    for (int i = 0; i < kTile; ++i) {
        l.max[i] = kLowest;
        l.sum[i] = 0;
        l.begin[i] = 0, l.span[i] = -1;
        l.score_scale[i] = l.bias_scale[i] = 0;
        if (i >= q.n) continue;
        const float n = c.seq_scale ? c.seq_scale[q.head] * c.log_n[row + i] : 1.0f;
        l.score_scale[i] = n * scale * kLog2e;
        l.bias_scale[i] = c.scale_scores ? kLog2e : n * kLog2e;
        l.begin[i] = c.key_begin[row + i];
        l.span[i] = int32_t(q.position + i - l.begin[i]);
        q.min_begin = l.begin[i] < q.min_begin ? l.begin[i] : q.min_begin;
        q.max_begin = l.begin[i] > q.max_begin ? l.begin[i] : q.max_begin;
    }
}

// Whether some query of q sees not all keys of [first, first + M).
template <typename Op>
bool needs_mask(const QueryTile<Op>& q, int64_t first, int M) {
    return first + M - 1 > q.position || first < q.max_begin;
}

template <typename Op>
bool sees(const QueryTile<Op>& q, int64_t first, int64_t end) {
    return first <= q.last() && end > q.min_begin;
}

// The task's query tiles: those of one head after those of another.
template <typename Op, typename Pass>
QueryTile<Op>* make_tiles(const AttentionCall& c, const AttentionTask& t, const Pass& pass, Scratch& m, int& count) {
    const int group = c.H / c.K;
    const int64_t per_head = (t.end - t.begin + kTile - 1) / kTile;
    count = int(group * per_head);
    QueryTile<Op>* tiles = m.take<QueryTile<Op>>(count);
    for (int i = 0; i < count; ++i) {
        QueryTile<Op> q{};
        q.head = t.kv * group + int(i / per_head);
        q.t = t.begin + i % per_head * kTile;
        q.n = int(t.end - q.t < kTile ? t.end - q.t : kTile);
        q.N = int(round_up(q.n, Op::kPadQueries));
        pass.layout(q, m);
        if (m.base) tiles[i] = q;
    }
    return tiles;
}

BAM_INLINE Vec masked(Vec x, Int key, const Lanes& l, int i) {
    const Int begin = (Int)load((const float*)l.begin + i), span = (Int)load((const float*)l.span + i);
    // begin <= key <= begin + span; both sides of a wrapped difference are compared, so a span of -1 admits nothing.
    const Int d = key - begin;
    return (d >= 0) & (d <= span) ? x : splat(-kInfinity);
}

template <typename Elem>
constexpr int kDegree = sizeof(Elem) == 2 ? 4 : 5;  // of exp2's polynomial

// Stores p where the next products want it: as B (keys, queries) and, backward, also as A (keys, queries).
BAM_INLINE void put_b(float* b, int row, int i, Vec v0, Vec v1) {
    store(b + row * kTile + i, v0);
    store(b + (row + 1) * kTile + i, v1);
}
BAM_INLINE void put_b(uint16_t* b, int row, int i, Vec v0, Vec v1) {
    store(reinterpret_cast<float*>(b) + row / 2 * kTile + i, (Vec)narrow_pair(v0, v1));
}

}  // namespace
