// Attention, flash style: memory linear in T, logits only ever in 64 x 64 tiles (definitions: DESIGN §2.2).
//
// Everything is computed transposed: rows of a tile are keys, lanes are queries. So what belongs to a query (scale, running
// maximum, sum, gradient sums of the prior) is a vector, nothing is reduced across lanes, and a distance table is read
// forwards: the lanes of one key row see consecutive distances.
#include "cpu/isa/declare.h"
#include "cpu/isa/gemm.h"

namespace {

using bam::AttentionCall;
using bam::AttentionTask;

constexpr int kTile = bam::kAttentionTile;  // queries and keys of a tile
constexpr int kTables = bam::kMaxTables;
constexpr int kWindow = 2 * kTile + W;
constexpr float kLowest = -3.0e38f;
// Beyond this an fp32 lse no longer holds the sum beside the maximum: backward makes both again.
constexpr float kPreciseLse = 1024.0f;

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
    float max[kTile];          // of logits * log2 e
    float sum[kTile];          // of 2^(logit * log2 e - max)
    int32_t begin[kTile];      // first key seen
    int32_t span[kTile];       // last key seen - begin; -1: none
    float reach[kTile];        // |score_scale q|: a key of norm x scores at most reach x; only with bounds
    // Backward.
    float log2_sum[kTile];     // p = 2^(logit * log2 e - max - log2_sum)
    float delta[kTile];        // dout . out
    float score_grad[kTile];   // d logit / d qk; 0 for a query that sees one key
    float table_sum[kTables][kTile];  // sum over keys of dlogits * table
    // Sums over keys of dlogits * qk, dlogits, p * qk. The dlogits of a query sum to zero but for delta's rounding (bf16
    // out): what that adds to the first, the other two take away. In a sum over a table it is taken away at the key that
    // has more than half of the weight, -1: none. There p is 1 to rounding when the bias is huge (beta < 0 and s_h < 0 at
    // d = 0), and the bias times that rounding would swamp everything.
    float score_sum[kTile], residual[kTile], mean_score[kTile];
    int32_t top[kTile];
    float prior_factor[kTile], log_n[kTile];
};

template <typename Op>
struct QueryTile {
    using Elem = typename Op::Elem;
    int head;                // query head
    int64_t t;               // first query
    int n, N;                // queries, rounded up to vectors
    int64_t position;        // key index of the first query
    int64_t min_begin, max_begin;
    bool plain;              // no query that sees one key only, no huge lse
    bool done;               // all farther keys are negligible
    Lanes* lanes;
    Elem* q_columns;         // B (D, 64)
    float* acc;              // (D, 64): out, or dq
    // Backward.
    Elem *dout_columns;          // B (D, 64)
    Elem *q_rows, *dout_rows;    // B (64, D)

    int64_t last() const { return position + n - 1; }
};

// ---- one tile's softmax -------------------------------------------------------------------------------------------------

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

// One step of the running softmax: s (M, 64) scores -> p as B (M, 64); lanes' max and sum follow. Returns whether a maximum
// moved; then `shrink` holds the factors for what was summed before.
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

// ---- keys, values and tables of a tile ------------------------------------------------------------------------------------

template <typename Op>
struct KeyTile {
    using Elem = typename Op::Elem;
    Elem *k_rows, *v_rows;        // A (64, D)
    Elem *k_columns, *v_columns;  // A (D, 64)
    Elem *tmp;

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

// ---- forward --------------------------------------------------------------------------------------------------------------

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
            q.lanes->reach[i] = i < q.n ? __builtin_fabsf(q.lanes->score_scale[i]) * __builtin_sqrtf(sum(squares)) * 1.0001f : -kInfinity;
        }
    }

    // Whether a tile of keys of at most this norm and with biases in this range stays below the share of every query's sum so far.
    bool negligible(const QueryTile<Op>& q, float norm, float bias_max, float bias_min) const {
        const Lanes& l = *q.lanes;
        for (int i = 0; i < q.N; i += W) {
            const Vec scale = load(l.bias_scale + i);
            const Vec bound = load(l.reach + i) * norm + (scale > 0.0f ? scale * bias_max : scale * bias_min) - load(l.max + i);
            const Vec weight = float(kTile) * exp2_nonpositive(bound < 0.0f ? bound : Vec{});  // a NaN bound is no bound
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
            copy_rows(rows, D, heads_row<T>(c.q, c.q_batch, c.q_token, task.b, q.t, q.head, c.D), c.q_token, q.n, kTile, c.D);
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
                    copy_rows(keys.k_rows, D, heads_row<T>(c.k, c.k_batch, c.k_token, task.b, first, task.kv, c.D), c.k_token,
                              n, kTile, c.D);
                    copy_rows(rows, D, heads_row<T>(c.v, c.v_batch, c.v_token, task.b, first, task.kv, c.D), c.v_token, n,
                              kTile, c.D);
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
            each(c.D, [&](int64_t d, auto tag) { store(out + int64_t(r) * c.H * c.D + d, load(rows + r * D + d, tag), tag); });
        if (!c.lse) return;
        float* lse = c.lse + (int64_t(task.b) * c.H + q.head) * c.T + q.t;
        for (int r = 0; r < q.n; ++r) lse[r] = l.max[r] * kLn2 + __builtin_logf(l.sum[r]);
    }
};

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

template <typename Op, typename T>
void forward(const AttentionCall& c, const AttentionTask& t) {
    Scratch m{reinterpret_cast<uintptr_t>(t.scratch)};
    Forward<Op> pass(c, m);
    int count;
    QueryTile<Op>* tiles = make_tiles<Op>(c, t, pass, m, count);
    const ProductScope<Op> scope;
    pass.template run<T>(t, tiles, count, m);
}

// ---- backward -------------------------------------------------------------------------------------------------------------

// Of s = scores and g = dout . v per (key, query): p as A, dlogits * score_grad as A and as B, and in g the dlogits.
template <typename Elem>
struct GradientTile {
    float *s, *g;
    Elem *p, *ds, *ds_b;  // p, ds: A (64, 64)
};

BAM_INLINE void put_a(float* a, int row, int i, Vec v) { store(a + row * kTile + i, v); }
BAM_INLINE void put_a(uint16_t* a, int row, int i, Vec v) { store(a + row * kTile + i, v); }

// kGeneral: masks, queries that see one key, and a maximum apart from the sum.
template <typename Elem, bool kGeneral, bool kBias>
void gradient_tile(const GradientTile<Elem>& t, Lanes& l, int M, int N, const float* window, int64_t first_key, bool keep,
                   bool score_sum) {
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
        copy_rows(rows, D, heads_row<T>(c.q, c.q_batch, c.q_token, task.b, q.t, q.head, c.D), c.q_token, q.n, kTile, c.D);
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
            each(c.D, [&](int64_t d, auto tag) { dots += load(dout + i * width + d, tag) * load(out + i * width + d, tag); });
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
            copy_rows(again.keys.k_rows, D, heads_row<T>(c.k, c.k_batch, c.k_token, task.b, first, task.kv, c.D), c.k_token, n,
                      kTile, c.D);
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
        copy_rows(k.k_rows, D, heads_row<T>(c.k, c.k_batch, c.k_token, task.b, first, task.kv, c.D), c.k_token, n, kTile, c.D);
        copy_rows(k.v_rows, D, heads_row<T>(c.v, c.v_batch, c.v_token, task.b, first, task.kv, c.D), c.v_token, n, kTile, c.D);
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
                if (task.want_dq) gemm<Op>(q.acc, kTile, again.keys.k_columns, kTile, tile.ds_b, kTile, width, q.N, M, true);
            }
            if (want_dkv) {
                put_rows(static_cast<T*>(c.dk) + task.b * c.dk_batch + first * c.dk_token + int64_t(task.kv) * c.D, c.dk_token,
                         dk, n);
                put_rows(static_cast<T*>(c.dv) + task.b * c.dv_batch + first * c.dv_token + int64_t(task.kv) * c.D, c.dv_token,
                         dv, n);
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

template <typename Op, typename T>
void backward(const AttentionCall& c, const AttentionTask& t) {
    Scratch m{reinterpret_cast<uintptr_t>(t.scratch)};
    Backward<Op> pass(c, m);
    int count;
    QueryTile<Op>* tiles = make_tiles<Op>(c, t, pass, m, count);
    const ProductScope<Op> scope;
    pass.template run<T>(t, tiles, count);
}

template <typename Op, template <typename> typename Pass>
int64_t scratch_bytes(const AttentionCall& c, int64_t queries) {
    Scratch m{0};
    Pass<Op> pass(c, m);
    AttentionTask t{};
    t.end = queries;
    int count;
    make_tiles<Op>(c, t, pass, m, count);
    const int64_t D = round_up(c.D, Op::kPadD);
    return m.used + 2 * kTile * (D > kTile ? D : kTile) * int64_t(sizeof(float)) + 4096;
}

}  // namespace

namespace bam::BAM_ISA {

int64_t attention_forward_scratch(const AttentionCall& c, int64_t queries) {
    return c.low ? scratch_bytes<LowOp, Forward>(c, queries) : scratch_bytes<Fp32, Forward>(c, queries);
}

void attention_forward(const AttentionCall& c, const AttentionTask& t) {
    c.low ? forward<LowOp, uint16_t>(c, t) : forward<Fp32, float>(c, t);
}

int64_t attention_backward_scratch(const AttentionCall& c, int64_t queries) {
    return c.low ? scratch_bytes<LowOp, Backward>(c, queries) : scratch_bytes<Fp32, Backward>(c, queries);
}

void attention_backward(const AttentionCall& c, const AttentionTask& t) {
    c.low ? backward<LowOp, uint16_t>(c, t) : backward<Fp32, float>(c, t);
}

}  // namespace bam::BAM_ISA
