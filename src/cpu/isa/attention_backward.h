// Attention backward: p and its gradient made again tile by tile, five products each.
#pragma once
#include "cpu/isa/attention_forward.h"

namespace {

// Beyond this an fp32 lse no longer holds the sum beside the maximum: backward makes both again.
constexpr float kPreciseLse = 1024.0f;

// Of s = scores and g = dout . v per (key, query): p as A, dlogits * score_grad as A and as B, and in g the dlogits.
template <typename Elem>
struct GradientTile {
    float *s, *g;
    Elem *p, *ds, *ds_b;  // p, ds: A (64, 64)
};

BAM_INLINE void put_a(float* a, int row, int i, Vec v) {
    store(a + row * kTile + i, v);
}
BAM_INLINE void put_a(uint16_t* a, int row, int i, Vec v) {
    store(a + row * kTile + i, v);
}

// kGeneral: masks, queries that see one key, and a maximum apart from the sum.
template <typename Elem, bool kGeneral, bool kBias>
void gradient_tile(const GradientTile<Elem>& t, Lanes& l, int M, int N, const float* window, int64_t first_key,
                   bool keep, bool score_sum) {
    for (int i = 0; i < N; i += W) {
        const Vec score_scale = load(l.score_scale + i), bias_scale = load(l.bias_scale + i), max = load(l.max + i);
        const Vec delta = load(l.delta + i), score_grad = load(l.score_grad + i), log2_sum = load(l.log2_sum + i);
        const Int span = (Int)load((const float*)l.span + i);
        Vec sums{}, residual{}, mean{};
        Int top = (Int)load((const float*)l.top + i);
        for (int j = 0; j < M; j += 2) {
            Vec ds[2];
            for (int u = 0; u < 2; ++u) {
                const int row = j + u;
                const Vec score = load(t.s + row * kTile + i);
                Vec x = score * score_scale;
                if constexpr (kBias) x += load(window + M - 1 - row + i) * bias_scale;
                x -= max;
                if constexpr (kGeneral) x = masked(x - log2_sum, splat(int32_t(first_key + row)), l, i);
                Vec p = exp2_nonpositive<kDegree<Elem>>(x);
                if constexpr (kGeneral) p = (span == 0) & (x != -kInfinity) ? splat(1.0f) : p;
                Vec g = p * (load(t.g + row * kTile + i) - delta);
                if constexpr (kGeneral) g = span == 0 ? Vec{} : g;
                put_a(t.p, row, i, p);
                ds[u] = g * score_grad;
                put_a(t.ds, row, i, ds[u]);
                residual += g;
                if (keep) {
                    store(t.g + row * kTile + i, g);
                    top = p > 0.5f ? splat(int32_t(first_key + row)) : top;
                }
                if (score_sum) sums += g * score, mean += p * score;
            }
            if constexpr (sizeof(Elem) == 2) put_b(t.ds_b, j, i, ds[0], ds[1]);
        }
        store(l.residual + i, load(l.residual + i) + residual);
        store((float*)l.top + i, (Vec)top);
        if (!score_sum) continue;
        store(l.score_sum + i, load(l.score_sum + i) + sums);
        store(l.mean_score + i, load(l.mean_score + i) + mean);
    }
}

// sums += over keys of g * table.
inline void add_table_sums(float* sums, const float* g, const float* window, int M, int N) {
    for (int i = 0; i < N; i += W) {
        Vec a[2] = {};
        for (int j = 0; j < M; j += 2)
            for (int u = 0; u < 2; ++u) a[u] += load(g + (j + u) * kTile + i) * load(window + M - 1 - (j + u) + i);
        store(sums + i, load(sums + i) + (a[0] + a[1]));
    }
}

template <typename Op>
struct Backward {
    using Elem = typename Op::Elem;
    const AttentionCall& c;
    int D, width;
    Forward<Op> again;  // its key tile, s and window are used here too
    GradientTile<Elem> tile;
    float *dk, *dv;  // (64, D)
    Elem* rows;
    float* out_rows;
    bool has_tables = false;

    Backward(const AttentionCall& c, Scratch& m)
        : c(c), D(int(round_up(c.D, Op::kPadD))), width(int(round_up(c.D, Op::kPadWidth))), again(c, m) {
        tile.s = again.s;
        tile.g = m.take<float>(kTile * kTile);
        tile.p = m.take<Elem>(kTile * kTile);
        tile.ds = m.take<Elem>(kTile * kTile);
        tile.ds_b = sizeof(Elem) == 2 ? m.take<Elem>(kTile * kTile) : tile.ds;
        dk = m.take<float>(int64_t(kTile) * D);
        dv = m.take<float>(int64_t(kTile) * D);
        for (const float* t : c.tables) has_tables |= t != nullptr;
        rows = m.take<Elem>(int64_t(kTile) * D + W);
        out_rows = m.take<float>(int64_t(kTile) * (D > kTile ? D : kTile) + W);
    }

    void layout(QueryTile<Op>& q, Scratch& m) const {
        again.layout(q, m);
        const int64_t n = int64_t(kTile) * D;
        q.dout_columns = m.take<Elem>(n), q.q_rows = m.take<Elem>(n), q.dout_rows = m.take<Elem>(n);
    }

    template <typename T>
    void load_queries(const AttentionTask& task, QueryTile<Op>& q) {
        fill_lanes(c, task.b, q);
        copy_rows(rows, D, heads_row<T>(c.q, c.q_batch, c.q_token, task.b, q.t, q.head, c.D), c.q_token, q.n, kTile,
                  c.D);
        Pack<Op>::b_transposed(q.q_columns, kTile, rows, D, kTile);
        Pack<Op>::b_rows(q.q_rows, rows, D, kTile);
        const int64_t width = int64_t(c.H) * c.D, at = (int64_t(task.b) * c.T + q.t) * width + int64_t(q.head) * c.D;
        const T *dout = static_cast<const T*>(c.dout) + at, *out = static_cast<const T*>(c.out) + at;
        copy_rows(rows, D, dout, width, q.n, kTile, c.D);
        Pack<Op>::b_transposed(q.dout_columns, kTile, rows, D, kTile);
        Pack<Op>::b_rows(q.dout_rows, rows, D, kTile);
        __builtin_memset(q.acc, 0, sizeof(float) * kTile * D);

        Lanes& l = *q.lanes;
        const float scale = 1.0f / __builtin_sqrtf(float(c.D));
        const float* lse = c.lse + (int64_t(task.b) * c.H + q.head) * c.T + q.t;
        __builtin_memset(l.table_sum, 0, sizeof l.table_sum);
        __builtin_memset(l.score_sum, 0, sizeof l.score_sum);
        __builtin_memset(l.residual, 0, sizeof l.residual);
        __builtin_memset(l.top, -1, sizeof l.top);
        __builtin_memset(l.mean_score, 0, sizeof l.mean_score);
        bool precise = true, several = true;
        for (int i = 0; i < kTile; ++i) {
            l.delta[i] = l.score_grad[i] = l.log2_sum[i] = l.max[i] = l.prior_factor[i] = l.log_n[i] = 0;
            if (i >= q.n) continue;
            Vec dots{};
            each(c.D, [&](int64_t d, auto tag) {
                dots += load(dout + i * width + d, tag) * load(out + i * width + d, tag);
            });
            l.delta[i] = sum(dots);
            l.log_n[i] = c.seq_scale ? c.log_n[int64_t(task.b) * c.T + q.t + i] : 0.0f;
            const float n = c.seq_scale ? c.seq_scale[q.head] * l.log_n[i] : 1.0f;
            const bool one = l.span[i] == 0;
            l.score_grad[i] = one ? 0.0f : n * scale;
            l.prior_factor[i] = c.scale_scores ? 1.0f : n;
            l.max[i] = lse[i] * kLog2e;
            several &= !one;
            precise &= one || __builtin_fabsf(lse[i]) < kPreciseLse;  // a NaN is not precise
        }
        q.plain = several && precise;
        if (!precise) remake_sums<T>(task, q);
    }

    // Maximum and sum of every query again, where lse cannot tell them apart.
    template <typename T>
    void remake_sums(const AttentionTask& task, QueryTile<Op>& q) {
        Lanes& l = *q.lanes;
        for (int i = 0; i < kTile; ++i) l.max[i] = kLowest;
        for (int64_t first = q.last() / kTile * kTile; first >= 0 && first + kTile > q.min_begin; first -= kTile) {
            const int n = int(q.last() + 1 - first < kTile ? q.last() + 1 - first : kTile);
            copy_rows(again.keys.k_rows, D, heads_row<T>(c.k, c.k_batch, c.k_token, task.b, first, task.kv, c.D),
                      c.k_token, n, kTile, c.D);
            again.scores(q, first, int(round_up(n, Op::kPadKeys)));
        }
        for (int i = 0; i < kTile; ++i) l.log2_sum[i] = l.sum[i] > 0 ? __builtin_logf(l.sum[i]) * kLog2e : l.sum[i];
    }

    void gradients(QueryTile<Op>& q, int64_t first, int M) {
        Lanes& l = *q.lanes;
        const bool general = !q.plain || needs_mask(q, first, M), keep = has_tables;
        const int64_t distance = q.position - first - (M - 1);
        float* window = again.window;
        if (c.bias) {
            fill_window(window, c.bias + q.head * c.distances, c.distances, distance, M + q.N);
            general ? gradient_tile<Elem, true, true>(tile, l, M, q.N, window, first, keep, c.score_sum)
                    : gradient_tile<Elem, false, true>(tile, l, M, q.N, window, first, keep, c.score_sum);
        } else {
            general ? gradient_tile<Elem, true, false>(tile, l, M, q.N, window, first, keep, c.score_sum)
                    : gradient_tile<Elem, false, false>(tile, l, M, q.N, window, first, keep, c.score_sum);
        }
        for (int p = 0; p < kTables; ++p) {
            if (!c.tables[p]) continue;
            fill_window(window, c.tables[p] + q.head * c.distances, c.distances, distance, M + q.N);
            add_table_sums(l.table_sum[p], tile.g, window, M, q.N);
        }
    }

    template <typename T>
    void load_keys(const AttentionTask& task, int64_t first, int n) {
        KeyTile<Op>& k = again.keys;
        copy_rows(k.k_rows, D, heads_row<T>(c.k, c.k_batch, c.k_token, task.b, first, task.kv, c.D), c.k_token, n,
                  kTile, c.D);
        copy_rows(k.v_rows, D, heads_row<T>(c.v, c.v_batch, c.v_token, task.b, first, task.kv, c.D), c.v_token, n,
                  kTile, c.D);
        if (task.want_dq) Pack<Op>::a_transposed(k.k_columns, kTile, k.k_rows, D, kTile, k.tmp);
        __builtin_memset(dk, 0, sizeof(float) * kTile * D);
        __builtin_memset(dv, 0, sizeof(float) * kTile * D);
    }

    template <typename T>
    void run(const AttentionTask& task, QueryTile<Op>* tiles, int count) {
        int64_t lo = c.S, hi = 0;
        for (int i = 0; i < count; ++i) {
            load_queries<T>(task, tiles[i]);
            lo = tiles[i].min_begin < lo ? tiles[i].min_begin : lo;
            hi = tiles[i].last() + 1 > hi ? tiles[i].last() + 1 : hi;
        }
        const bool want_dkv = task.keys_end > task.keys_begin;
        if (want_dkv) lo = task.keys_begin, hi = task.keys_end;
        for (int64_t first = lo / kTile * kTile; first < hi; first += kTile) {
            const int n = int(c.S - first < kTile ? c.S - first : kTile), M = int(round_up(n, Op::kPadKeys));
            load_keys<T>(task, first, n);
            for (int i = 0; i < count; ++i) {
                QueryTile<Op>& q = tiles[i];
                if (!sees(q, first, first + kTile)) continue;
                gemm<Op>(tile.s, kTile, again.keys.k_rows, D, q.q_columns, kTile, M, q.N, D, false);
                gemm<Op>(tile.g, kTile, again.keys.v_rows, D, q.dout_columns, kTile, M, q.N, D, false);
                gradients(q, first, M);
                if (want_dkv) {
                    gemm<Op>(dv, D, tile.p, kTile, q.dout_rows, D, M, width, q.N, true);
                    gemm<Op>(dk, D, tile.ds, kTile, q.q_rows, D, M, width, q.N, true);
                }
                if (task.want_dq)
                    gemm<Op>(q.acc, kTile, again.keys.k_columns, kTile, tile.ds_b, kTile, width, q.N, M, true);
            }
            if (want_dkv) {
                put_rows(static_cast<T*>(c.dk) + task.b * c.dk_batch + first * c.dk_token + int64_t(task.kv) * c.D,
                         c.dk_token, dk, n);
                put_rows(static_cast<T*>(c.dv) + task.b * c.dv_batch + first * c.dv_token + int64_t(task.kv) * c.D,
                         c.dv_token, dv, n);
            }
        }
        if (!task.want_dq) return;
        for (int i = 0; i < count; ++i) {
            const QueryTile<Op>& q = tiles[i];
            transpose32(out_rows, D, q.acc, kTile, D, kTile);
            put_rows(static_cast<T*>(c.dq) + task.b * c.dq_batch + q.t * c.dq_token + int64_t(q.head) * c.D, c.dq_token,
                     out_rows, q.n);
        }
        add_head_sums(task, tiles, count);
    }

    template <typename T>
    void put_rows(T* y, int64_t stride, const float* x, int n) const {
        for (int r = 0; r < n; ++r)
            each(c.D, [&](int64_t d, auto tag) { store(y + r * stride + d, load(x + r * D + d, tag), tag); });
    }

    // Queries in order, each one's fp32 term added in double.
    void add_head_sums(const AttentionTask& task, const QueryTile<Op>* tiles, int count) const {
        const int group = c.H / c.K;
        const float scale = 1.0f / __builtin_sqrtf(float(c.D));
        for (int i = 0; i < group * (kTables + 1); ++i) task.sums[i] = 0;
        for (int i = 0; i < count; ++i) {
            const QueryTile<Op>& q = tiles[i];
            const Lanes& l = *q.lanes;
            double* sums = task.sums + (tiles[i].head - task.kv * group) * (kTables + 1);
            for (int r = 0; r < tiles[i].n; ++r) {
                double of_table[kTables];
                for (int p = 0; p < kTables; ++p) {
                    of_table[p] = l.table_sum[p][r];
                    if (!c.tables[p] || l.top[r] < 0) continue;
                    const float at_top = l.residual[r] * c.tables[p][q.head * c.distances + q.position + r - l.top[r]];
                    of_table[p] -= at_top;  // as a float: it cancels to zero where only the top key has weight
                }
                for (int p = 0; p < kTables; ++p) sums[p] += of_table[p] * l.prior_factor[r];
                const double bias = c.scale_scores ? 0.0 : of_table[0];
                sums[kTables] += l.log_n[r] * (scale * (l.score_sum[r] - l.residual[r] * l.mean_score[r]) + bias);
            }
        }
    }
};

}  // namespace
