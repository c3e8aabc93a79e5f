// Attention as tasks for the threads: pieces of the queries (and keys) of one row and key/value head. Every task owns
// what it writes, so nothing depends on which thread takes it.
#include <algorithm>

#include "check.h"
#include "cpu/backend.h"
#include "cpu/threads.h"

namespace bam {

static constexpr int64_t kTile = kAttentionTile;
static constexpr int kSums = kMaxTables + 1;  // doubles a head and task
static constexpr int kScale = 4;  // of the tables, the bias as theta_alpha's derivative where that is not table 0

void check_head_size(int64_t D) {
    if (D > kMaxHeadSize)
        throw Error(kExitUsage,
                    "head size " + std::to_string(D) + ", expected at most " + std::to_string(kMaxHeadSize));
}

static AttentionCall make_call(HeadsView q, HeadsView k, HeadsView v, const Attention& a) {
    check_head_size(a.D);
    AttentionCall c{};
    c.T = a.T, c.S = a.S, c.H = a.H, c.K = a.K, c.D = a.D;
    c.low = q.dtype == DType::bf16;
    c.scale_scores = a.order == SsmaxOrder::scale_scores;
    c.q = q.data, c.q_batch = q.batch_stride, c.q_token = q.token_stride;
    c.k = k.data, c.k_batch = k.batch_stride, c.k_token = k.token_stride;
    c.v = v.data, c.v_batch = v.batch_stride, c.v_token = v.token_stride;
    c.key_begin = a.key_begin.as<int32_t>();
    c.offset = a.offset.as<int32_t>();
    c.log_n = a.log_n.as<float>();
    c.seq_scale = a.seq_scale.as<float>();
    c.bias = a.bias.as<float>();
    c.distances = a.bias ? a.bias.last() : 0;
    c.skip_below = a.skip_below;
    return c;
}

// Queries a task: about 16 tiles over all its heads, fewer where there would be too few tasks.
static int64_t queries_per_task(const Attention& a, int threads) {
    const int64_t group = a.H / a.K, pairs = int64_t(a.B) * a.K;
    int64_t n = std::max<int64_t>(1, 16 / group) * kTile;
    while (n > kTile && pairs * ((a.T + n - 1) / n) < 4 * threads) n = std::max(kTile, n / 2 / kTile * kTile);
    return n;
}

// Bounds by tiles, and over all tiles before (keys) or beyond (distances). A prior decides what is far: without one
// every key tile is computed.
void CpuBackend::make_bounds(AttentionCall& c, const Attention& a) {
    if (!(c.skip_below > 0) || !c.bias || c.S <= 2 * kTile) return;
    AttentionBounds& b = c.bounds;
    const int64_t pairs = int64_t(a.B) * a.K, P = std::min(c.distances, c.S);
    b.key_tiles = (c.S + kTile - 1) / kTile, b.distance_tiles = (P + kTile - 1) / kTile;
    const int64_t keys = pairs * b.key_tiles, distances = a.H * b.distance_tiles;
    float* memory = bounds_.room<float>(2 * keys + 4 * distances);
    float *norm = memory, *before = norm + keys;
    float *max = before + keys, *min = max + distances, *max_beyond = min + distances,
          *min_beyond = max_beyond + distances;
    constexpr int64_t kPart = 64;  // tiles
    const int64_t parts = (b.key_tiles + kPart - 1) / kPart;
    for_parts(threads_, pairs * parts, [&](int64_t i, int) {
        const int64_t row = i / parts / a.K, kv = i / parts % a.K, first = i % parts * kPart;
        const int64_t end = (c.offset ? c.offset[row] : 0) + a.T, n = std::min(end - first * kTile, kPart * kTile);
        const int64_t at = row * c.k_batch + first * kTile * c.k_token + kv * a.D;
        const void* k = c.low ? static_cast<const void*>(static_cast<const uint16_t*>(c.k) + at)
                              : static_cast<const float*>(c.k) + at;
        if (n > 0) kernels_.tile_norms(norm + i / parts * b.key_tiles + first, k, c.low, n, c.k_token, a.D);
    });
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t end = (c.offset ? c.offset[i / a.K] : 0) + a.T;
        float most = 0;
        for (int64_t t = 0; t * kTile < end; ++t) {
            const float x = norm[i * b.key_tiles + t];
            before[i * b.key_tiles + t] = most = most != most || x <= most ? most : x;
        }
    }
    for_parts(threads_, a.H, [&](int64_t h, int) {
        const int64_t at = h * b.distance_tiles;
        kernels_.tile_ranges(max + at, min + at, c.bias + h * c.distances, P);
        for (int64_t t = b.distance_tiles - 1; t >= 0; --t) {
            const bool last = t + 1 == b.distance_tiles;
            max_beyond[at + t] = last ? max[at + t] : std::max(max[at + t], max_beyond[at + t + 1]);
            min_beyond[at + t] = last ? min[at + t] : std::min(min[at + t], min_beyond[at + t + 1]);
        }
    });
    b.norm = norm, b.norm_before = before;
    b.bias_max = max, b.bias_min = min, b.bias_max_beyond = max_beyond, b.bias_min_beyond = min_beyond;
}

void CpuBackend::attention_forward(Tensor out, Tensor lse, HeadsView q, HeadsView k, HeadsView v, const Attention& a) {
    Timed timed(*this, "attention_forward");
    AttentionCall c = make_call(q, k, v, a);
    if (k.dtype != q.dtype || v.dtype != q.dtype) throw std::logic_error("attention: q, k and v differ in type");
    c.out = out.data;
    c.lse = lse.as<float>();
    make_bounds(c, a);
    const int64_t size = queries_per_task(a, threads_), chunks = (a.T + size - 1) / size, pairs = int64_t(a.B) * a.K;
    const int64_t bytes = kernels_.attention_forward_scratch(c, std::min<int64_t>(size, a.T));
    char* scratch = scratch_.room<char>(bytes * threads_);
    // The last queries see most keys: first.
    for_parts(threads_, pairs * chunks, [&](int64_t i, int thread) {
        const int64_t chunk = chunks - 1 - i / pairs, pair = i % pairs;
        AttentionTask t{};
        t.b = int(pair / a.K), t.kv = int(pair % a.K);
        t.begin = chunk * size, t.end = std::min<int64_t>(t.begin + size, a.T);
        t.scratch = scratch + thread * bytes;
        kernels_.attention_forward(c, t);
    });
}

// The tables whose sums with dlogits are wanted. As a query's dlogits sum to zero, a table may be moved by a constant:
// each is moved to be 0 where the bias is greatest, so that the rounding of dlogits is multiplied by differences of the
// table only. Where the bias stands at its floor its derivative is 0.
void CpuBackend::make_tables(AttentionCall& c, const AttentionGrads& grads, const Attention& a) {
    if (!a.bias) return;
    const int64_t P = c.distances, size = a.H * P;
    const bool inside = c.score_sum && !c.scale_scores,
               floor = *std::min_element(c.bias, c.bias + size) <= float(kPriorFloor);
    float* memory = tables_.room<float>(kMaxTables * size);
    auto make = [&](int which, Tensor from, bool no_floor) {
        float* to = memory + which * size;
        c.tables[which] = to;
        for (int64_t h = 0; h < a.H; ++h) {
            const float *bias = c.bias + h * P, *x = from.as<float>() + h * P;
            auto value = [&](int64_t d) { return no_floor && bias[d] <= float(kPriorFloor) ? 0.0f : x[d]; };
            const float middle = value(std::max_element(bias, bias + P) - bias);
            for (int64_t d = 0; d < P; ++d) to[h * P + d] = value(d) - middle;
        }
    };
    if (inside || (grads.dscale && !floor)) make(0, a.bias, false);
    if (grads.dscale && floor) make(kScale, a.bias, true);
    for (int p = 0; p < kMaxThetas; ++p)
        if (grads.dtheta[p] && a.dbias[p]) make(1 + p, a.dbias[p], false);
}

// With enough rows and heads a task is one of them, whole: five products a tile. Otherwise dq goes by queries and dk,
// dv by keys: seven products, any number of tasks.
void CpuBackend::attention_backward(const AttentionBackward& g, const Attention& a) {
    Timed timed(*this, "attention_backward");
    AttentionCall c = make_call(g.q, g.k, g.v, a);
    c.out = g.out.data, c.lse = g.lse.as<float>(), c.dout = g.dout.data;
    c.dq = g.dq.data, c.dq_batch = g.dq.batch_stride, c.dq_token = g.dq.token_stride;
    c.dk = g.dk.data, c.dk_batch = g.dk.batch_stride, c.dk_token = g.dk.token_stride;
    c.dv = g.dv.data, c.dv_batch = g.dv.batch_stride, c.dv_token = g.dv.token_stride;
    c.score_sum = bool(g.grads.dseq_scale);
    make_tables(c, g.grads, a);

    const int64_t pairs = int64_t(a.B) * a.K, group = a.H / a.K;
    const bool whole = threads_ == 1 || pairs >= 4 * threads_ || a.T <= 2 * kTile;
    const int64_t size = whole ? a.T : queries_per_task(a, threads_), chunks = (a.T + size - 1) / size;
    const int64_t bytes = kernels_.attention_backward_scratch(c, a.T);
    char* scratch = scratch_.room<char>(bytes * threads_);
    sums_.assign(pairs * chunks * group * kSums, 0.0);
    for_parts(threads_, whole ? pairs : 2 * pairs * chunks, [&](int64_t i, int thread) {
        const bool for_keys = !whole && i >= pairs * chunks;
        const int64_t pair = i % pairs, step = i / pairs % chunks, chunk = for_keys ? step : chunks - 1 - step;
        AttentionTask t{};
        t.b = int(pair / a.K), t.kv = int(pair % a.K);
        t.begin = chunk * size, t.end = std::min<int64_t>(t.begin + size, a.T);
        t.scratch = scratch + thread * bytes;
        t.want_dq = !for_keys;
        t.sums = sums_.data() + (pair * chunks + chunk) * group * kSums;
        if (whole || for_keys) t.keys_begin = t.begin, t.keys_end = t.end;
        if (for_keys) {  // the queries that see any of the keys
            const int32_t* begins = c.key_begin + int64_t(t.b) * a.T;
            t.end = std::lower_bound(begins + t.begin, begins + a.T, t.keys_end) - begins;
        }
        kernels_.attention_backward(c, t);
    });
    head_sums(c, g.grads, chunks);
}

// Tasks' sums in order of row and queries, in double.
void CpuBackend::head_sums(const AttentionCall& c, const AttentionGrads& grads, int64_t parts) {
    const int64_t group = c.H / c.K, rows = int64_t(sums_.size()) / (parts * c.H * kSums);
    auto total = [&](int64_t h, int which) {
        double s = 0;
        for (int64_t b = 0; b < rows; ++b)
            for (int64_t i = 0; i < parts; ++i)
                s += sums_[(((b * c.K + h / group) * parts + i) * group + h % group) * kSums + which];
        return float(s);
    };
    for (int64_t h = 0; h < c.H; ++h) {
        if (grads.dseq_scale) grads.dseq_scale.as<float>()[h] += total(h, kMaxTables);
        if (grads.dscale && c.bias) grads.dscale.as<float>()[h] += total(h, c.tables[kScale] ? kScale : 0);
        for (int p = 0; p < kMaxThetas; ++p)
            if (grads.dtheta[p] && c.tables[1 + p]) grads.dtheta[p].as<float>()[h] += total(h, 1 + p);
    }
}

void CpuBackend::prior_tables(Tensor bias, const Tensor dbias[kMaxThetas], Encoding e, const Tensor theta[kMaxThetas]) {
    Timed timed(*this, "prior_tables");
    const int H = int(bias.shape[0]);
    const int64_t P = bias.last();
    for_ranges(threads_, H * P, 256, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int h = int(i / P);
            double values[kMaxThetas] = {};
            for (int p = 0; p < kMaxThetas; ++p)
                if (theta[p]) values[p] = theta[p].as<float>()[h];
            const PriorPoint point = prior_at(e, values, h, H, double(i % P));
            bias.as<float>()[i] = float(point.bias);
            for (int p = 0; p < kMaxThetas; ++p)
                if (dbias[p]) dbias[p].as<float>()[i] = float(point.dtheta[p]);
        }
    });
}

}  // namespace bam
