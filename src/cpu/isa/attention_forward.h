// Attention forward: for each tile of queries a running softmax over tiles of keys.
#pragma once
#include "cpu/isa/attention_tiles.h"

namespace {

// One step of the running softmax: s (M, 64) scores -> p as B (M, 64); lanes' max and sum follow. Returns whether a
// maximum moved; then `shrink` holds the factors for what was summed before.
template <typename Elem, bool kMask, bool kBias>
bool softmax_tile(Elem* p, float* s, float* shrink, Lanes& l, int M, int N, const float* window, int64_t first_key) {
    bool moved = false;
    for (int i = 0; i < N; i += W) {
        const Vec score_scale = load(l.score_scale + i), bias_scale = load(l.bias_scale + i), old = load(l.max + i);
        Vec top[2] = {old, old};
        for (int j = 0; j < M; j += 2)
            for (int u = 0; u < 2; ++u) {
                Vec x = load(s + (j + u) * kTile + i) * score_scale;
                if constexpr (kBias) x += load(window + M - 1 - (j + u) + i) * bias_scale;
                if constexpr (kMask) x = masked(x, splat(int32_t(first_key + j + u)), l, i);
                store(s + (j + u) * kTile + i, x);
                top[u] = vmax(x, top[u]);
            }
        const Vec max = vmax(top[0], top[1]);
        Vec sums[2] = {};
        for (int j = 0; j < M; j += 2) {
            Vec v[2];
            for (int u = 0; u < 2; ++u) {
                v[u] = exp2_nonpositive<kDegree<Elem>>(load(s + (j + u) * kTile + i) - max);
                sums[u] += v[u];
            }
            put_b(p, j, i, v[0], v[1]);
        }
        const Vec factor = exp2_nonpositive<kDegree<Elem>>(old - max);
        store(shrink + i, factor);
        store(l.max + i, max);
        store(l.sum + i, load(l.sum + i) * factor + (sums[0] + sums[1]));
        moved |= any(factor != 1.0f);
    }
    return moved;
}

template <typename Op>
struct Forward {
    using Elem = typename Op::Elem;
    const AttentionCall& c;
    int D, width;  // head size, padded along k (and as a stride), and along rows or columns
    KeyTile<Op> keys;
    float *s, *window, *shrink;
    Elem* p;

    Forward(const AttentionCall& c, Scratch& m)
        : c(c), D(int(round_up(c.D, Op::kPadD))), width(int(round_up(c.D, Op::kPadWidth))) {
        keys.layout(m, D);
        s = m.take<float>(kTile * kTile);
        p = m.take<Elem>(kTile * kTile);
        window = m.take<float>(kWindow);
        shrink = m.take<float>(kTile);
    }

    void layout(QueryTile<Op>& q, Scratch& m) const {
        q.lanes = m.take<Lanes>(1);
        q.q_columns = m.take<Elem>(int64_t(kTile) * D);
        q.acc = m.take<float>(int64_t(kTile) * D);
    }

    // s = scores, then the running softmax.
    bool scores(QueryTile<Op>& q, int64_t first, int M) {
        gemm<Op>(s, kTile, keys.k_rows, D, q.q_columns, kTile, M, q.N, D, false);
        const bool mask = needs_mask(q, first, M);
        if (!c.bias)
            return mask ? softmax_tile<Elem, true, false>(p, s, shrink, *q.lanes, M, q.N, window, first)
                        : softmax_tile<Elem, false, false>(p, s, shrink, *q.lanes, M, q.N, window, first);
        fill_window(window, c.bias + q.head * c.distances, c.distances, q.position - first - (M - 1), M + q.N);
        return mask ? softmax_tile<Elem, true, true>(p, s, shrink, *q.lanes, M, q.N, window, first)
                    : softmax_tile<Elem, false, true>(p, s, shrink, *q.lanes, M, q.N, window, first);
    }

    void rescale(QueryTile<Op>& q) const {
        for (int d = 0; d < width; ++d)
            for (int i = 0; i < q.N; i += W) {
                float* o = q.acc + d * kTile + i;
                store(o, load(o) * load(shrink + i));
            }
    }

    // Lanes past the queries reach nothing. The bounds are rounded up: their own error must not count.
    void fill_reach(QueryTile<Op>& q, const Elem* rows) const {
        for (int i = 0; i < kTile; ++i) {
            Vec squares{};
            each(D, [&](int64_t d, auto tag) { squares += load(rows + i * D + d, tag) * load(rows + i * D + d, tag); });
            q.lanes->reach[i] = i < q.n
                                    ? __builtin_fabsf(q.lanes->score_scale[i]) * __builtin_sqrtf(sum(squares)) * 1.0001f
                                    : -kInfinity;
        }
    }

    // Whether a tile of keys of at most this norm and with biases in this range stays below the share of every query's
    // sum so far.
    bool negligible(const QueryTile<Op>& q, float norm, float bias_max, float bias_min) const {
        const Lanes& l = *q.lanes;
        for (int i = 0; i < q.N; i += W) {
            const Vec scale = load(l.bias_scale + i);
            const Vec bound =
                load(l.reach + i) * norm + (scale > 0.0f ? scale * bias_max : scale * bias_min) - load(l.max + i);
            const Vec weight =
                float(kTile) * exp2_nonpositive(bound < 0.0f ? bound : Vec{});  // a NaN bound is no bound
            if (any(!(weight <= c.skip_below * load(l.sum + i)))) return false;
        }
        return true;
    }

    // Whether the tile of keys at `first` may be left out for q; sets q.done when that holds for all farther ones, too.
    bool skips(const AttentionTask& task, QueryTile<Op>& q, int64_t first) const {
        const bam::AttentionBounds& b = c.bounds;
        if (!b.norm) return false;
        const int64_t tile = first / kTile, nearest = q.position - first - (kTile - 1), farthest = q.last() - first;
        const int64_t key = (int64_t(task.b) * c.K + task.kv) * b.key_tiles + tile, head = q.head * b.distance_tiles;
        const int64_t near = nearest < 0 ? 0 : nearest / kTile;
        q.done = negligible(q, b.norm_before[key], b.bias_max_beyond[head + near], b.bias_min_beyond[head + near]);
        if (q.done) return true;
        float max = b.bias_max[head + near], min = b.bias_min[head + near];
        for (int64_t t = near + 1; t <= farthest / kTile && t < b.distance_tiles; ++t) {
            max = b.bias_max[head + t] > max ? b.bias_max[head + t] : max;
            min = b.bias_min[head + t] < min ? b.bias_min[head + t] : min;
        }
        return negligible(q, b.norm[key], max, min);
    }

    template <typename T>
    void run(const AttentionTask& task, QueryTile<Op>* tiles, int count, Scratch m) {
        Elem* rows = m.take<Elem>(int64_t(kTile) * D + W);
        float* out_rows = m.take<float>(int64_t(kTile) * (D > kTile ? D : kTile) + W);
        int64_t lo = c.S, hi = 0;
        for (int i = 0; i < count; ++i) {
            QueryTile<Op>& q = tiles[i];
            fill_lanes(c, task.b, q);
            copy_rows(rows, D, heads_row<T>(c.q, c.q_batch, c.q_token, task.b, q.t, q.head, c.D), c.q_token, q.n, kTile,
                      c.D);
            Pack<Op>::b_transposed(q.q_columns, kTile, rows, D, kTile);
            if (c.bounds.norm) fill_reach(q, rows);
            __builtin_memset(q.acc, 0, sizeof(float) * kTile * D);
            lo = q.min_begin < lo ? q.min_begin : lo;
            hi = q.last() + 1 > hi ? q.last() + 1 : hi;
        }
        // From the nearest keys to the farthest: the maximum is mostly found in the first tiles.
        for (int64_t first = (hi - 1) / kTile * kTile; first + kTile > lo; first -= kTile) {
            const int n = int(hi - first < kTile ? hi - first : kTile), M = int(round_up(n, Op::kPadKeys));
            bool loaded = false, any_left = false;
            for (int i = 0; i < count; ++i) {
                QueryTile<Op>& q = tiles[i];
                if (q.done) continue;
                any_left = true;
                if (!sees(q, first, first + kTile) || skips(task, q, first)) continue;
                if (!loaded) {
                    copy_rows(keys.k_rows, D, heads_row<T>(c.k, c.k_batch, c.k_token, task.b, first, task.kv, c.D),
                              c.k_token, n, kTile, c.D);
                    copy_rows(rows, D, heads_row<T>(c.v, c.v_batch, c.v_token, task.b, first, task.kv, c.D), c.v_token,
                              n, kTile, c.D);
                    Pack<Op>::a_transposed(keys.v_columns, kTile, rows, D, kTile, keys.tmp);
                    loaded = true;
                }
                if (scores(q, first, M)) rescale(q);
                gemm<Op>(q.acc, kTile, keys.v_columns, kTile, p, kTile, width, q.N, M, true);
            }
            if (first == 0 || !any_left) break;
        }
        for (int i = 0; i < count; ++i) finish<T>(task, tiles[i], out_rows);
    }

    template <typename T>
    void finish(const AttentionTask& task, QueryTile<Op>& q, float* rows) const {
        const Lanes& l = *q.lanes;
        for (int i = 0; i < q.N; i += W) {
            const Vec inverse = 1.0f / load(l.sum + i);
            for (int d = 0; d < width; ++d) {
                float* o = q.acc + d * kTile + i;
                store(o, load(o) * inverse);
            }
        }
        // acc (D, 64) -> rows (64, D).
        transpose32(rows, D, q.acc, kTile, D, kTile);
        T* out = static_cast<T*>(c.out) + (int64_t(task.b) * c.T + q.t) * c.H * c.D + int64_t(q.head) * c.D;
        for (int r = 0; r < q.n; ++r)
            each(c.D, [&](int64_t d, auto tag) {
                store(out + int64_t(r) * c.H * c.D + d, load(rows + r * D + d, tag), tag);
            });
        if (!c.lse) return;
        float* lse = c.lse + (int64_t(task.b) * c.H + q.head) * c.T + q.t;
        for (int r = 0; r < q.n; ++r) lse[r] = l.max[r] * kLn2 + __builtin_logf(l.sum[r]);
    }
};

}  // namespace
