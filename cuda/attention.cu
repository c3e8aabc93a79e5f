// Attention in O(T) memory: choosing kernels, and the plain ones, for both types and any head size up to 256, in fp32 arithmetic
// (attention_tensor.h: those for tensor cores). Forward and dQ own query rows, dK and dV own key rows; both walk the other side tile
// by tile and skip tiles of other documents.
//
// A lane of a warp is row lane / 4 of the warp's eight, and of each tile it has columns lane % 4, +4, +8, ...: a row's maximum and sums
// are exchanged among four lanes. Logits are kept in units of log 2: logit * log2 e = qk * score_scale + bias * bias_scale.
#include "cuda/attention.h"
#include "cuda/backend.h"

namespace bam {

namespace {

// Shapes of a block for head sizes up to DP.
template <int DP>
struct Tile {
    static constexpr int kWarps = DP <= 128 ? 4 : 2;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRows = 8 * kWarps;            // that a block owns
    static constexpr int kOther = DP <= 128 ? 32 : 16;  // of the side it walks
    static constexpr int kLd = DP + 1;                  // odd: rows of one column lie in different banks
    static constexpr int kMine = kOther / 4;            // columns of a lane
    static constexpr int kPart = DP / 4;                // head elements of a lane
    static constexpr int kWarpLd = kOther + 1;
};

// Rows [first, first + Rows) of a matrix of heads as fp32; zeros past `end` and past D.
template <typename T, int DP, int Rows>
__device__ void load_rows(float* to, const Heads& m, int b, int head, int first, int end, int D) {
    const T* from = static_cast<const T*>(m.data) + b * m.batch_stride + int64_t(head) * D;
    for (int i = int(threadIdx.x); i < Rows * DP; i += Tile<DP>::kThreads) {
        const int r = i / DP, d = i % DP;
        to[r * Tile<DP>::kLd + d] = first + r < end && d < D ? load(from + (first + r) * m.token_stride + d) : 0.0f;
    }
}

__device__ inline float dot(const float* x, const float* y, int D) {
    float s = 0;
    for (int d = 0; d < D; ++d) s = fmaf(x[d], y[d], s);
    return s;
}

// In units of log 2. `score` is q . k.
__device__ inline float logit(const AttentionArgs& a, const Query& q, int h, int key, float score) {
    // The bias is rounded before the score is added: equal biases of 1e30 stay equal.
    const float bias = a.bias ? a.bias[h * a.distances + (q.position - key)] * q.bias_scale : 0.0f;
    return fmaf(score, q.score_scale, bias);
}

// A block's query rows and the keys they see.
struct Rows {
    int b, h, kv, first, row, lane4, warp_row;
    int begin, end;  // keys seen by any row of the block

    template <int DP>
    __device__ static Rows of(const AttentionArgs& a) {
        Rows r;
        r.b = int(blockIdx.z), r.h = int(blockIdx.y), r.kv = r.h / (a.H / a.K);
        r.first = (int(gridDim.x) - 1 - int(blockIdx.x)) * Tile<DP>::kRows;  // the last rows see most keys: first
        r.warp_row = int(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4);
        r.row = r.first + r.warp_row;
        r.lane4 = int(threadIdx.x % 4);
        const int last = min(r.first + Tile<DP>::kRows, a.T) - 1;
        r.begin = a.key_begin[int64_t(r.b) * a.T + r.first];
        r.end = (a.offset ? a.offset[r.b] : 0) + last + 1;
        return r;
    }
};

// One tile's logits of a lane, -inf where the query does not see the key.
template <int DP>
__device__ void tile_logits(float x[Tile<DP>::kMine], const AttentionArgs& a, const Rows& r, const Query& q, const float* query, const float* keys, int first) {
#pragma unroll
    for (int i = 0; i < Tile<DP>::kMine; ++i) {
        const int j = r.lane4 + 4 * i;
        x[i] = q.sees(first + j) ? logit(a, q, r.h, first + j, dot(query, keys + j * Tile<DP>::kLd, a.D)) : -INFINITY;
    }
}

// One step of the running softmax of a lane: x becomes 2^(x - max). Returns the factor for what was summed before.
template <int N>
__device__ float softmax_step(float x[N], float& top, float& sum) {
    float most = top;
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, x[i]);
    most = quad_max(most);
    const float shrink = exp2_fast(top - most);
    top = most;
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        x[i] = exp2_fast(x[i] - most);
        sum += x[i];
    }
    return shrink;
}

// ---- forward ----------------------------------------------------------------------------------------------------------------

template <typename T, int DP>
__global__ void __launch_bounds__(Tile<DP>::kThreads) attention_forward_kernel(AttentionArgs a) {
    using S = Tile<DP>;
    float* queries = dynamic_shared<float>();
    float* tile = queries + S::kRows * S::kLd;  // keys, then values
    float* weights = tile + S::kOther * S::kLd;  // (kRows, kOther): of one warp each
    const Rows r = Rows::of<DP>(a);
    const Query q = Query::at(a, r.b, r.h, r.row);
    load_rows<T, DP, S::kRows>(queries, a.q, r.b, r.h, r.first, a.T, a.D);
    float acc[S::kPart] = {}, top = kLowest, sum = 0;
    float* weight_row = weights + r.warp_row * S::kWarpLd;
    for (int first = r.begin; first < r.end; first += S::kOther) {
        load_rows<T, DP, S::kOther>(tile, a.k, r.b, r.kv, first, r.end, a.D);
        __syncthreads();
        float x[S::kMine];
        tile_logits<DP>(x, a, r, q, queries + r.warp_row * S::kLd, tile, first);
        const float shrink = softmax_step<S::kMine>(x, top, sum);
#pragma unroll
        for (int i = 0; i < S::kMine; ++i) weight_row[r.lane4 + 4 * i] = x[i];
        __syncthreads();
        load_rows<T, DP, S::kOther>(tile, a.v, r.b, r.kv, first, r.end, a.D);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < S::kPart; ++d) acc[d] *= shrink;
        for (int j = 0; j < S::kOther; ++j) {
            const float w = weight_row[j];
#pragma unroll
            for (int d = 0; d < S::kPart; ++d) acc[d] = fmaf(w, tile[j * S::kLd + r.lane4 + 4 * d], acc[d]);
        }
        __syncthreads();
    }
    sum = quad_sum(sum);
    if (r.row >= a.T) return;
    T* out = static_cast<T*>(a.out) + ((int64_t(r.b) * a.T + r.row) * a.H + r.h) * a.D;
    const float inverse = 1.0f / sum;
#pragma unroll
    for (int d = 0; d < S::kPart; ++d)
        if (r.lane4 + 4 * d < a.D) store(out + r.lane4 + 4 * d, acc[d] * inverse);
    if (a.lse && r.lane4 == 0) a.lse[(int64_t(r.b) * a.H + r.h) * a.T + r.row] = top * kLn2 + logf(sum);
}

// ---- backward ---------------------------------------------------------------------------------------------------------------

// delta, row_max and log2_sum of every query, from lse where it is precise enough.
template <typename T, int DP>
__global__ void __launch_bounds__(Tile<DP>::kThreads) attention_rows_kernel(AttentionArgs a) {
    using S = Tile<DP>;
    __shared__ int again[S::kWarps];
    float* queries = dynamic_shared<float>();
    float* tile = queries + S::kRows * S::kLd;
    const Rows r = Rows::of<DP>(a);
    const bool inside = r.row < a.T;
    const int64_t i = (int64_t(r.b) * a.H + r.h) * a.T + r.row;
    float delta = 0;
    if (inside) {
        const int64_t at = ((int64_t(r.b) * a.T + r.row) * a.H + r.h) * a.D;
        for (int d = r.lane4; d < a.D; d += 4) delta += load(static_cast<const T*>(a.dout) + at + d) * load(static_cast<const T*>(a.out) + at + d);
    }
    delta = quad_sum(delta);
    const float lse = inside ? a.lse[i] : 0.0f;
    const int rough = __any_sync(kFullWarp, fabsf(lse) > kPreciseLse);
    if (threadIdx.x % 32 == 0) again[threadIdx.x / 32] = rough;
    __syncthreads();
    bool any = false;
    for (int w = 0; w < S::kWarps; ++w) any = any || again[w];
    float top = lse * kLog2e, log2_sum = 0;
    if (any) {
        const Query q = Query::at(a, r.b, r.h, r.row);
        load_rows<T, DP, S::kRows>(queries, a.q, r.b, r.h, r.first, a.T, a.D);
        top = kLowest;
        float sum = 0;
        for (int first = r.begin; first < r.end; first += S::kOther) {
            load_rows<T, DP, S::kOther>(tile, a.k, r.b, r.kv, first, r.end, a.D);
            __syncthreads();
            float x[S::kMine];
            tile_logits<DP>(x, a, r, q, queries + r.warp_row * S::kLd, tile, first);
            softmax_step<S::kMine>(x, top, sum);
            __syncthreads();
        }
        log2_sum = log2f(quad_sum(sum));
    }
    if (inside && r.lane4 == 0) a.delta[i] = delta, a.row_max[i] = top, a.log2_sum[i] = log2_sum;
}

// Probability and dlogit of one pair; dp is dout . v.
struct Pair {
    float p, g;
    __device__ static Pair of(const AttentionArgs& a, const Query& q, int h, int key, float score, float dp, float row_max, float log2_sum, float delta) {
        if (!q.sees(key)) return {0, 0};
        if (q.single) return {1, 0};
        const float p = exp2_fast((logit(a, q, h, key, score) - row_max) - log2_sum);
        return {p, p * (dp - delta)};
    }
};

// Tables at the distance of the greatest bias, for every head.
__global__ void __launch_bounds__(256) table_middle_kernel(AttentionArgs a) {
    const int h = int(blockIdx.x);
    const float* bias = a.bias + h * a.distances;
    float most = -INFINITY;
    for (int64_t d = threadIdx.x; d < a.distances; d += 256) most = fmaxf(most, bias[d]);
    most = block_max<256>(most);
    if (threadIdx.x == 0) {
        int64_t first = 0;
        while (bias[first] < most) ++first;
        a.middle[h] = most;
        a.middle[a.H + h] = without_floor(most);
        for (int p = 0; p < kMaxThetas; ++p)
            if (a.dbias[p]) a.middle[(2 + p) * a.H + h] = a.dbias[p][h * a.distances + first];
    }
}

template <typename T, int DP>
__global__ void __launch_bounds__(Tile<DP>::kThreads) attention_backward_q_kernel(AttentionArgs a) {
    using S = Tile<DP>;
    float* queries = dynamic_shared<float>();
    float* douts = queries + S::kRows * S::kLd;
    float* keys = douts + S::kRows * S::kLd;
    float* values = keys + S::kOther * S::kLd;
    float* weights = values + S::kOther * S::kLd;
    const Rows r = Rows::of<DP>(a);
    const Query q = Query::at(a, r.b, r.h, r.row);
    const bool inside = r.row < a.T;
    const int64_t i = (int64_t(r.b) * a.H + r.h) * a.T + r.row;
    const float row_max = inside ? a.row_max[i] : 0.0f, log2_sum = inside ? a.log2_sum[i] : 0.0f, delta = inside ? a.delta[i] : 0.0f;
    const Heads dout{const_cast<void*>(a.dout), int64_t(a.T) * a.H * a.D, int64_t(a.H) * a.D};
    load_rows<T, DP, S::kRows>(queries, a.q, r.b, r.h, r.first, a.T, a.D);
    load_rows<T, DP, S::kRows>(douts, dout, r.b, r.h, r.first, a.T, a.D);
    float acc[S::kPart] = {};
    RowSums sums;
    sums.begin(a, r.h);
    float* weight_row = weights + r.warp_row * S::kWarpLd;
    for (int first = r.begin; first < r.end; first += S::kOther) {
        load_rows<T, DP, S::kOther>(keys, a.k, r.b, r.kv, first, r.end, a.D);
        load_rows<T, DP, S::kOther>(values, a.v, r.b, r.kv, first, r.end, a.D);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < S::kMine; ++m) {
            const int j = r.lane4 + 4 * m, key = first + j;
            const float score = dot(queries + r.warp_row * S::kLd, keys + j * S::kLd, a.D);
            const float dp = dot(douts + r.warp_row * S::kLd, values + j * S::kLd, a.D);
            const Pair pair = Pair::of(a, q, r.h, key, score, dp, row_max, log2_sum, delta);
            weight_row[j] = pair.g;
            if (!q.sees(key) || q.single) continue;
            sums.add(pair.g, pair.p, score, key);
            if (!a.bias) continue;
            const int64_t at = r.h * a.distances + (q.position - key);
            sums.add_bias(pair.g, a.bias[at]);
#pragma unroll
            for (int p = 0; p < kMaxThetas; ++p)
                if (a.dbias[p]) sums.add_derivative(p, pair.g, a.dbias[p][at]);
        }
        __syncwarp();
        for (int j = 0; j < S::kOther; ++j) {
            const float g = weight_row[j];
#pragma unroll
            for (int d = 0; d < S::kPart; ++d) acc[d] = fmaf(g, keys[j * S::kLd + r.lane4 + 4 * d], acc[d]);
        }
        __syncthreads();
    }
    sums.finish(a, q, r.b, r.h, r.row, inside && r.lane4 == 0);
    if (!inside) return;
    T* dq = static_cast<T*>(a.dq.data) + r.b * a.dq.batch_stride + r.row * a.dq.token_stride + int64_t(r.h) * a.D;
#pragma unroll
    for (int d = 0; d < S::kPart; ++d)
        if (r.lane4 + 4 * d < a.D) store(dq + r.lane4 + 4 * d, acc[d] * (q.factor * a.scale));
}

// What a tile of queries knows of itself, in shared memory.
struct QueryStats {
    Query query;
    float row_max, log2_sum, delta;
};

// A block owns keys of one key/value head and walks the head's query heads in order.
template <typename T, int DP>
__global__ void __launch_bounds__(Tile<DP>::kThreads) attention_backward_kv_kernel(AttentionArgs a) {
    using S = Tile<DP>;
    __shared__ QueryStats stats[S::kOther];
    float* keys = dynamic_shared<float>();
    float* values = keys + S::kRows * S::kLd;
    float* queries = values + S::kRows * S::kLd;
    float* douts = queries + S::kOther * S::kLd;
    float* weights = douts + S::kOther * S::kLd;
    const int b = int(blockIdx.z), kv = int(blockIdx.y), group = a.H / a.K, first_key = int(blockIdx.x) * S::kRows;
    const int warp_row = int(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4), lane4 = int(threadIdx.x % 4), key = first_key + warp_row;
    const int32_t* begins = a.key_begin + int64_t(b) * a.T;
    const Heads dout{const_cast<void*>(a.dout), int64_t(a.T) * a.H * a.D, int64_t(a.H) * a.D};
    // Queries up to the last one that sees a key of this block: key_begin does not decrease.
    int end = first_key, past = a.T;
    while (end < past) {
        const int middle = (end + past) / 2;
        if (begins[middle] < first_key + S::kRows) end = middle + 1;
        else past = middle;
    }
    load_rows<T, DP, S::kRows>(keys, a.k, b, kv, first_key, a.T, a.D);
    load_rows<T, DP, S::kRows>(values, a.v, b, kv, first_key, a.T, a.D);
    float dk[S::kPart] = {}, dv[S::kPart] = {};
    float* weight_row = weights + warp_row * S::kWarpLd;
    for (int h = kv * group; h < (kv + 1) * group; ++h)
        for (int first = first_key; first < end; first += S::kOther) {
            load_rows<T, DP, S::kOther>(queries, a.q, b, h, first, a.T, a.D);
            load_rows<T, DP, S::kOther>(douts, dout, b, h, first, a.T, a.D);
            if (int(threadIdx.x) < S::kOther) {
                const int t = first + int(threadIdx.x);
                const int64_t i = (int64_t(b) * a.H + h) * a.T + t;
                const bool inside = t < a.T;
                stats[threadIdx.x] = {Query::at(a, b, h, t), inside ? a.row_max[i] : 0.0f, inside ? a.log2_sum[i] : 0.0f, inside ? a.delta[i] : 0.0f};
            }
            __syncthreads();
            float g[S::kMine];
#pragma unroll
            for (int m = 0; m < S::kMine; ++m) {
                const int j = lane4 + 4 * m;
                const QueryStats& s = stats[j];
                const float score = dot(queries + j * S::kLd, keys + warp_row * S::kLd, a.D);
                const float dp = dot(douts + j * S::kLd, values + warp_row * S::kLd, a.D);
                const Pair pair = Pair::of(a, s.query, h, key, score, dp, s.row_max, s.log2_sum, s.delta);
                weight_row[j] = pair.p;
                g[m] = pair.g * (s.query.factor * a.scale);
            }
            __syncwarp();
            for (int j = 0; j < S::kOther; ++j) {
                const float p = weight_row[j];
#pragma unroll
                for (int d = 0; d < S::kPart; ++d) dv[d] = fmaf(p, douts[j * S::kLd + lane4 + 4 * d], dv[d]);
            }
            __syncwarp();
#pragma unroll
            for (int m = 0; m < S::kMine; ++m) weight_row[lane4 + 4 * m] = g[m];
            __syncwarp();
            for (int j = 0; j < S::kOther; ++j) {
                const float w = weight_row[j];
#pragma unroll
                for (int d = 0; d < S::kPart; ++d) dk[d] = fmaf(w, queries[j * S::kLd + lane4 + 4 * d], dk[d]);
            }
            __syncthreads();
        }
    if (key >= a.T) return;
    T* to_k = static_cast<T*>(a.dk.data) + b * a.dk.batch_stride + key * a.dk.token_stride + int64_t(kv) * a.D;
    T* to_v = static_cast<T*>(a.dv.data) + b * a.dv.batch_stride + key * a.dv.token_stride + int64_t(kv) * a.D;
#pragma unroll
    for (int d = 0; d < S::kPart; ++d)
        if (lane4 + 4 * d < a.D) {
            store(to_k + lane4 + 4 * d, dk[d]);
            store(to_v + lane4 + 4 * d, dv[d]);
        }
}

// Adds one head's rows of one kind to its gradient, in double.
__global__ void __launch_bounds__(256) head_sum_kernel(float* grad, const float* rows, int B, int H, int T) {
    const int h = int(blockIdx.x);
    double sum = 0;
    for (int b = 0; b < B; ++b)
        for (int t = int(threadIdx.x); t < T; t += 256) sum += rows[(int64_t(b) * H + h) * T + t];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) grad[h] += float(sum);
}

// ---- launches -------------------------------------------------------------------------------------------------------------

Heads heads(const HeadsView& v) { return {v.data, v.batch_stride, v.token_stride}; }

AttentionArgs make_args(HeadsView q, HeadsView k, HeadsView v, const Attention& a) {
    if (a.D > 256) throw Error(kExitUsage, "head size " + std::to_string(a.D) + ", expected at most 256");
    if (k.dtype != q.dtype || v.dtype != q.dtype) throw std::logic_error("attention: q, k and v differ in type");
    AttentionArgs r{};
    r.q = heads(q), r.k = heads(k), r.v = heads(v);
    r.key_begin = a.key_begin.as<int32_t>();
    r.offset = a.offset.as<int32_t>();
    r.log_n = a.log_n.as<float>();
    r.seq_scale = a.seq_scale.as<float>();
    r.bias = a.bias.as<float>();
    r.distances = a.bias ? a.bias.last() : 0;
    r.T = a.T, r.H = a.H, r.K = a.K, r.D = a.D;
    r.scale = 1.0f / std::sqrt(float(a.D));
    r.scale_scores = a.order == SsmaxOrder::scale_scores;
    return r;
}

// Calls f(element type, std::integral_constant of the padded head size).
template <typename F>
void dispatch_heads(DType t, int D, F f) {
    dispatch(t, [&](auto tag) {
        if (D <= 32) f(tag, std::integral_constant<int, 32>());
        else if (D <= 64) f(tag, std::integral_constant<int, 64>());
        else if (D <= 128) f(tag, std::integral_constant<int, 128>());
        else f(tag, std::integral_constant<int, 256>());
    });
}

template <int DP>
dim3 grid_for(int B, int heads, int T) { return dim3(blocks_for(T, Tile<DP>::kRows), unsigned(heads), unsigned(B)); }

// Calls f with TensorAttention<D> for bf16 heads that tensor cores can take as they lie: 16-byte rows. False: they can not.
template <typename F>
bool on_tensor_cores(const AttentionArgs& a, DType t, F f) {
    if (t != DType::bf16 || a.D > 128 || a.D % 8) return false;
    for (const Heads& m : {a.q, a.k, a.v, a.dq, a.dk, a.dv})
        if (reinterpret_cast<uintptr_t>(m.data) % 16 || m.batch_stride % 8 || m.token_stride % 8) return false;
    if (reinterpret_cast<uintptr_t>(a.out) % 16 || reinterpret_cast<uintptr_t>(a.dout) % 16) return false;
    if (a.D <= 16) f(TensorAttention<16>());
    else if (a.D <= 32) f(TensorAttention<32>());
    else if (a.D <= 48) f(TensorAttention<48>());
    else if (a.D <= 64) f(TensorAttention<64>());
    else f(TensorAttention<128>());
    return true;
}

// Bytes for so many matrices of own rows and of the other side's, and the weights.
template <int DP>
size_t shared_for(int own, int other, bool weights) {
    using S = Tile<DP>;
    return sizeof(float) * (size_t(own * S::kRows + other * S::kOther) * S::kLd + (weights ? S::kRows * S::kWarpLd : 0));
}

}  // namespace

void CudaBackend::attention_forward(Tensor out, Tensor lse, HeadsView q, HeadsView k, HeadsView v, const Attention& a) {
    Timed t(*this, "attention_forward");
    AttentionArgs args = make_args(q, k, v, a);
    args.out = out.data;
    args.lse = lse.as<float>();
    if (on_tensor_cores(args, q.dtype, [&](auto kernels) { kernels.forward(args, a.B, stream_); })) return;
    dispatch_heads(q.dtype, a.D, [&](auto tag, auto padded) {
        using T = decltype(tag);
        constexpr int DP = decltype(padded)::value;
        launch(attention_forward_kernel<T, DP>, grid_for<DP>(a.B, a.H, a.T), Tile<DP>::kThreads, shared_for<DP>(1, 1, true), stream_, args);
    });
}

void CudaBackend::attention_backward(const AttentionBackward& g, const Attention& a) {
    Timed t(*this, "attention_backward");
    AttentionArgs args = make_args(g.q, g.k, g.v, a);
    args.dq = heads(g.dq), args.dk = heads(g.dk), args.dv = heads(g.dv);
    args.out = g.out.data, args.lse = g.lse.as<float>(), args.dout = g.dout.data;
    for (int p = 0; p < kMaxThetas; ++p)
        if (g.grads.dtheta[p] && a.dbias[p]) {
            if (a.dbias[p].last() != a.bias.last()) throw std::logic_error("attention: tables of different lengths");
            args.dbias[p] = a.dbias[p].as<float>();
        }
    const int64_t rows = int64_t(a.B) * a.H * a.T;
    args.delta = scratch_.room<float>((3 + kRowSums) * rows + kTables * a.H);
    args.row_max = args.delta + rows, args.log2_sum = args.row_max + rows, args.row_sums = args.log2_sum + rows;
    args.middle = args.row_sums + kRowSums * rows;
    if (a.bias) launch(table_middle_kernel, unsigned(a.H), 256, 0, stream_, args);
    dispatch_heads(g.q.dtype, a.D, [&](auto tag, auto padded) {
        using T = decltype(tag);
        constexpr int DP = decltype(padded)::value;
        constexpr int threads = Tile<DP>::kThreads;
        launch(attention_rows_kernel<T, DP>, grid_for<DP>(a.B, a.H, a.T), threads, shared_for<DP>(1, 1, false), stream_, args);
        if (on_tensor_cores(args, g.q.dtype, [&](auto kernels) { kernels.backward(args, a.B, stream_); })) return;
        launch(attention_backward_q_kernel<T, DP>, grid_for<DP>(a.B, a.H, a.T), threads, shared_for<DP>(2, 2, true), stream_, args);
        launch(attention_backward_kv_kernel<T, DP>, grid_for<DP>(a.B, a.K, a.T), threads, shared_for<DP>(2, 2, true), stream_, args);
    });
    const auto add = [&](Tensor grad, int which) {
        if (grad) launch(head_sum_kernel, unsigned(a.H), 256, 0, stream_, grad.as<float>(), args.row_sums + which * rows, a.B, a.H, a.T);
    };
    add(g.grads.dseq_scale, 0);
    if (a.bias) add(g.grads.dscale, 1);
    for (int p = 0; p < kMaxThetas; ++p)
        if (args.dbias[p]) add(g.grads.dtheta[p], 2 + p);
}

}  // namespace bam
