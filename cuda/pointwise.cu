// Ops on single elements: embedding, RoPE, SwiGLU, the KV cache, tables of a prior.
#include "cuda/backend.h"
#include "cuda/kernel.h"

namespace bam {

namespace {

constexpr int kThreads = 256;

// ---- embedding ------------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) embedding_forward_kernel(float* x, const float* table, const int32_t* ids, const float* added,
                                                                  const int32_t* positions, int64_t N, int C) {
    const int64_t i = global_thread();
    if (i >= N * C) return;
    const int64_t n = i / C, c = i % C;
    float v = table[int64_t(ids[n]) * C + c];
    if (added) v += added[int64_t(positions[n]) * C + c];
    x[i] = v;
}

constexpr int kBucket = 32;  // token ids that one block owns

// A block owns the rows of kBucket ids and kThreads channels. It walks all tokens in order, a segment at a time, gathers the tokens of
// its ids in order, and adds their gradients: no atomics, and the order of the sum is that of the tokens.
__global__ void __launch_bounds__(kThreads) embedding_backward_kernel(float* dtable, const float* dx, const int32_t* ids, int64_t N, int C) {
    __shared__ int32_t matches[kThreads];  // tokens of this segment, from its start
    __shared__ int warp_matches[kThreads / 32];
    const int first = int(blockIdx.x) * kBucket, c = int(blockIdx.y * kThreads + threadIdx.x);
    const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    for (int64_t segment = 0; segment < N; segment += kThreads) {
        const int64_t n = segment + threadIdx.x;
        const int id = n < N ? ids[n] : -1;
        const bool mine = id >= first && id < first + kBucket;
        const unsigned votes = __ballot_sync(kFullWarp, mine);
        if (lane == 0) warp_matches[warp] = __popc(votes);
        __syncthreads();
        int before = 0, total = 0;
        for (int w = 0; w < kThreads / 32; ++w) {
            if (w < warp) before += warp_matches[w];
            total += warp_matches[w];
        }
        if (mine) matches[before + __popc(votes & ((1u << lane) - 1))] = int32_t(threadIdx.x);
        __syncthreads();
        if (c < C)
            for (int i = 0; i < total; ++i) {
                const int64_t token = segment + matches[i];
                dtable[int64_t(ids[token]) * C + c] += dx[token * C + c];
            }
        __syncthreads();
    }
}

// ---- RoPE -----------------------------------------------------------------------------------------------------------------

// One thread a pair; direction -1 turns back.
template <typename T>
__global__ void __launch_bounds__(kThreads) rope_kernel(T* x, const float* table, const int32_t* positions, int64_t N, int64_t width, int heads, int D,
                                                     bool half, float direction) {
    const int64_t i = global_thread();
    const int pairs = heads * (D / 2);
    if (i >= N * pairs) return;
    const int64_t n = i / pairs;
    const int pair = int(i % pairs), head = pair / (D / 2), p = pair % (D / 2);
    const float* angle = table + int64_t(positions[n]) * D + 2 * p;
    T* row = x + n * width + int64_t(head) * D;
    T *a = row + (half ? p : 2 * p), *b = half ? a + D / 2 : a + 1;
    const float u = load(a), v = load(b), cosine = angle[0], sine = angle[1] * direction;
    store(a, u * cosine - v * sine);
    store(b, u * sine + v * cosine);
}

// ---- SwiGLU ---------------------------------------------------------------------------------------------------------------

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_forward_kernel(T* y, const T* gate_up, int64_t N, int64_t F) {
    const int64_t i = global_thread();
    if (i >= N * F) return;
    const T* row = gate_up + i / F * 2 * F + i % F;
    const float g = load(row);
    store(y + i, g * sigmoid(g) * load(row + F));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_backward_kernel(T* dgate_up, const T* dy, const T* gate_up, int64_t N, int64_t F) {
    const int64_t i = global_thread();
    if (i >= N * F) return;
    const int64_t at = i / F * 2 * F + i % F;
    const float g = load(gate_up + at), s = sigmoid(g), d = load(dy + i);
    store(dgate_up + at, d * load(gate_up + at + F) * (s + g * s * (1 - s)));
    store(dgate_up + at + F, d * g * s);
}

// ---- KV cache and tables ------------------------------------------------------------------------------------------------

struct CacheArgs {
    const int32_t* offset;
    int64_t batch_stride, token_stride;
    int T, first_head, heads, D;
    int64_t width;  // of a row of qkv
};

template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) cache_append_kernel(To* cache, const From* qkv, CacheArgs a, int64_t n) {
    const int64_t i = global_thread();
    if (i >= n) return;
    const int64_t row = i / (a.heads * a.D), b = row / a.T, t = row % a.T;
    const int e = int(i % (a.heads * a.D));
    store(cache + b * a.batch_stride + (a.offset[b] + t) * a.token_stride + e, load(qkv + row * a.width + int64_t(a.first_head) * a.D + e));
}

struct PriorArgs {
    float *bias, *dbias[kMaxThetas];
    const float* theta[kMaxThetas];
    Encoding encoding;
    int H;
    int64_t P;
};

__global__ void __launch_bounds__(kThreads) prior_kernel(PriorArgs a) {
    const int64_t i = global_thread();
    if (i >= a.H * a.P) return;
    const int h = int(i / a.P);
    double theta[kMaxThetas];
    for (int p = 0; p < kMaxThetas; ++p) theta[p] = a.theta[p] ? double(a.theta[p][h]) : 0.0;
    const PriorPoint point = prior_at(a.encoding, theta, h, a.H, double(i % a.P));
    a.bias[i] = float(point.bias);
    for (int p = 0; p < kMaxThetas; ++p)
        if (a.dbias[p]) a.dbias[p][i] = float(point.dtheta[p]);
}

}  // namespace

void CudaBackend::embedding_forward(Tensor x, Tensor table, Tensor ids, Tensor added, Tensor positions) {
    Timed t(*this, "embedding_forward");
    const int64_t N = x.rows();
    if (N == 0) return;
    launch(embedding_forward_kernel, blocks_for(x.numel(), kThreads), kThreads, 0, stream_, x.as<float>(), table.as<float>(), ids.as<int32_t>(),
           added.as<float>(), positions.as<int32_t>(), N, int(x.last()));
}

void CudaBackend::embedding_backward(Tensor dtable, Tensor dx, Tensor ids) {
    Timed t(*this, "embedding_backward");
    const int C = int(dx.last());
    launch(embedding_backward_kernel, dim3(blocks_for(dtable.rows(), kBucket), blocks_for(C, kThreads)), kThreads, 0, stream_, dtable.as<float>(),
           dx.as<float>(), ids.as<int32_t>(), dx.rows(), C);
}

void CudaBackend::rotate(Tensor qkv, Tensor table, Tensor positions, int heads, RopeLayout layout, float direction) {
    const int64_t N = qkv.rows(), pairs = N * heads * (table.last() / 2);
    if (pairs == 0) return;
    dispatch(qkv.dtype, [&](auto tag) {
        using T = decltype(tag);
        launch(rope_kernel<T>, blocks_for(pairs, kThreads), kThreads, 0, stream_, elements<T>(qkv), table.as<float>(), positions.as<int32_t>(), N,
               qkv.last(), heads, int(table.last()), layout == RopeLayout::half, direction);
    });
}

void CudaBackend::rope_forward(Tensor qkv, Tensor table, Tensor positions, int heads, RopeLayout layout) {
    Timed t(*this, "rope_forward");
    rotate(qkv, table, positions, heads, layout, 1);
}

void CudaBackend::rope_backward(Tensor dqkv, Tensor table, Tensor positions, int heads, RopeLayout layout) {
    Timed t(*this, "rope_backward");
    rotate(dqkv, table, positions, heads, layout, -1);
}

void CudaBackend::swiglu_forward(Tensor y, Tensor gate_up) {
    Timed t(*this, "swiglu_forward");
    if (y.numel() == 0) return;
    dispatch(y.dtype, [&](auto tag) {
        using T = decltype(tag);
        launch(swiglu_forward_kernel<T>, blocks_for(y.numel(), kThreads), kThreads, 0, stream_, elements<T>(y), elements<T>(gate_up), y.rows(), y.last());
    });
}

void CudaBackend::swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) {
    Timed t(*this, "swiglu_backward");
    if (dy.numel() == 0) return;
    dispatch(dy.dtype, [&](auto tag) {
        using T = decltype(tag);
        launch(swiglu_backward_kernel<T>, blocks_for(dy.numel(), kThreads), kThreads, 0, stream_, elements<T>(dgate_up), elements<T>(dy),
               elements<T>(gate_up), dy.rows(), dy.last());
    });
}

void CudaBackend::cache_append(HeadsView k_cache, HeadsView v_cache, Tensor qkv, Tensor offset, int H, int K, int D) {
    Timed t(*this, "cache_append");
    const int64_t n = qkv.rows() * K * D;
    for (int side = 0; side < 2 && n > 0; ++side) {
        const HeadsView& cache = side ? v_cache : k_cache;
        const CacheArgs args{offset.as<int32_t>(), cache.batch_stride, cache.token_stride, int(qkv.rows() / offset.numel()), H + side * K, K, D, qkv.last()};
        dispatch(cache.dtype, [&](auto to) {
            dispatch(qkv.dtype, [&](auto from) {
                using To = decltype(to);
                using From = decltype(from);
                launch(cache_append_kernel<To, From>, blocks_for(n, kThreads), kThreads, 0, stream_, static_cast<To*>(cache.data), elements<From>(qkv), args, n);
            });
        });
    }
}

void CudaBackend::prior_tables(Tensor bias, const Tensor dbias[kMaxThetas], Encoding e, const Tensor theta[kMaxThetas]) {
    Timed t(*this, "prior_tables");
    PriorArgs a{};
    a.bias = bias.as<float>(), a.encoding = e, a.H = int(bias.shape[0]), a.P = bias.last();
    for (int p = 0; p < kMaxThetas; ++p) a.dbias[p] = dbias[p].as<float>(), a.theta[p] = theta[p].as<float>();
    launch(prior_kernel, blocks_for(a.H * a.P, kThreads), kThreads, 0, stream_, a);
}

}  // namespace bam
