// Cross entropy, one block a row: softmax, loss and dlogits, which may be the logits themselves.
#include "cuda/backend.h"
#include "cuda/kernel.h"

namespace bam {

namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(float* losses, T* dlogits, const float* logits, const int32_t* targets, int V, float scale) {
    const int64_t row = blockIdx.x;
    const float* x = logits + row * V;
    const int target = targets[row];
    // Running maximum and sum of exp(x - maximum); a NaN reaches the sum.
    float top = -INFINITY, sum = 0;
    for (int i = int(threadIdx.x); i < V; i += kThreads) {
        const float v = x[i];
        if (v > top) {
            sum *= expf(top - v);
            top = v;
        }
        sum += expf(v - top);
    }
    const float most = block_max<kThreads>(top);
    const float total = block_sum<kThreads>(sum == 0 ? 0 : sum * expf(top - most));
    const float log_total = logf(total);
    if (threadIdx.x == 0) losses[row] = target < 0 ? 0.0f : log_total + (most - x[target]);
    if (!dlogits) return;
    __syncthreads();  // the target's logit is read before dlogits may overwrite it
    const float factor = target < 0 ? 0.0f : scale / total;
    for (int i = int(threadIdx.x); i < V; i += kThreads) {
        const float p = factor * expf(x[i] - most);
        store(dlogits + row * V + i, target < 0 ? 0.0f : i == target ? p - scale : p);
    }
}

}  // namespace

void CudaBackend::cross_entropy(Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    Timed t(*this, "cross_entropy");
    if (logits.rows() == 0) return;
    dispatch(dlogits ? dlogits.dtype : DType::f32, [&](auto tag) {
        using T = decltype(tag);
        launch(cross_entropy_kernel<T>, blocks_for(logits.rows(), 1), kThreads, 0, stream_, losses.as<float>(), elements<T>(dlogits),
               logits.as<float>(), targets.as<int32_t>(), int(logits.last()), scale);
    });
}

}  // namespace bam
