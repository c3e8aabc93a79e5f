// RMSNorm with the residual: one warp a row. Weight gradients are summed over chunks of rows, then over chunks in order.
#include "cuda/backend.h"
#include "cuda/kernel.h"

namespace bam {

namespace {

constexpr int kRowsPerBlock = 4;    // of warps
constexpr int64_t kChunkRows = 256;  // of a partial sum of dw
constexpr int kColumns = 32, kSlices = 8;

template <typename T>
__global__ void __launch_bounds__(32 * kRowsPerBlock) norm_forward_kernel(T* y, float* rstd, float* x_out, const float* x_in, const T* delta,
                                                                       const float* w, int64_t N, int C, float eps) {
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
    const int lane = int(threadIdx.x % 32);
    if (row >= N) return;  // a whole warp, and no barrier follows
    const float* x = x_in + row * C;
    float squares = 0;
    for (int c = lane; c < C; c += 32) {
        float v = x[c];
        if (delta) {
            v += load(delta + row * C + c);
            x_out[row * C + c] = v;
        }
        squares += v * v;
    }
    const float r = rsqrt(warp_sum(squares) / float(C) + eps);
    if (lane == 0) rstd[row] = r;
    if (delta) x = x_out + row * C;  // each lane reads what it wrote
    for (int c = lane; c < C; c += 32) store(y + row * C + c, x[c] * r * w[c]);
}

// y_j = x_j r w_j and dr/dx_i = -r^3 x_i / C.
template <typename T>
__global__ void __launch_bounds__(32 * kRowsPerBlock) norm_backward_kernel(float* dx, Bf16* dx_low, const T* dy, const float* x, const float* rstd,
                                                                        const float* w, int64_t N, int C) {
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
    const int lane = int(threadIdx.x % 32);
    if (row >= N) return;
    const float r = rstd[row];
    float dot = 0;
    for (int c = lane; c < C; c += 32) dot += load(dy + row * C + c) * w[c] * x[row * C + c];
    const float common = warp_sum(dot) * r * r / float(C);
    for (int c = lane; c < C; c += 32) {
        const int64_t i = row * C + c;
        const float v = dx[i] + r * (load(dy + i) * w[c] - x[i] * common);
        dx[i] = v;
        if (dx_low) store(dx_low + i, v);
    }
}

// partial (chunks, C): sums over a chunk of rows of dy x r.
template <typename T>
__global__ void __launch_bounds__(kColumns * kSlices) norm_weight_kernel(float* partial, const T* dy, const float* x, const float* rstd, int64_t N, int C) {
    __shared__ float slices[kSlices][kColumns];
    const int lane = int(threadIdx.x % kColumns), slice = int(threadIdx.x / kColumns), c = int(blockIdx.x) * kColumns + lane;
    const int64_t begin = int64_t(blockIdx.y) * kChunkRows, end = begin + kChunkRows < N ? begin + kChunkRows : N;
    float sum = 0;
    if (c < C)
        for (int64_t row = begin + slice; row < end; row += kSlices) sum += load(dy + row * C + c) * x[row * C + c] * rstd[row];
    slices[slice][lane] = sum;
    __syncthreads();
    if (slice == 0 && c < C) {
        for (int s = 1; s < kSlices; ++s) sum += slices[s][lane];
        partial[int64_t(blockIdx.y) * C + c] = sum;
    }
}

__global__ void __launch_bounds__(256) add_chunks_kernel(float* dw, const float* partial, int chunks, int C) {
    const int c = int(global_thread());
    if (c >= C) return;
    double sum = 0;
    for (int i = 0; i < chunks; ++i) sum += partial[int64_t(i) * C + c];
    dw[c] += float(sum);
}

}  // namespace

void CudaBackend::norm_forward(Tensor y, Tensor rstd, Tensor x_out, Tensor x_in, Tensor delta, Tensor w, float eps) {
    Timed t(*this, "norm_forward");
    const int64_t N = x_in.rows();
    if (N == 0) return;
    dispatch(y.dtype, [&](auto tag) {
        using T = decltype(tag);
        launch(norm_forward_kernel<T>, blocks_for(N, kRowsPerBlock), 32 * kRowsPerBlock, 0, stream_, elements<T>(y), rstd.as<float>(),
               x_out.as<float>(), x_in.as<float>(), elements<T>(delta), w.as<float>(), N, int(x_in.last()), eps);
    });
}

void CudaBackend::norm_backward(Tensor dx, Tensor dx_low, Tensor dw, Tensor dy, Tensor x, Tensor rstd, Tensor w) {
    Timed t(*this, "norm_backward");
    const int64_t N = x.rows();
    if (N == 0) return;
    const int C = int(x.last());
    const unsigned chunks = blocks_for(N, kChunkRows);
    if (chunks > 65535) throw std::logic_error("norm_backward: " + std::to_string(N) + " rows");
    float* partial = scratch_.room<float>(int64_t(chunks) * C);
    dispatch(dy.dtype, [&](auto tag) {
        using T = decltype(tag);
        launch(norm_weight_kernel<T>, dim3(blocks_for(C, kColumns), chunks), kColumns * kSlices, 0, stream_, partial, elements<T>(dy), x.as<float>(),
               rstd.as<float>(), N, C);
        launch(norm_backward_kernel<T>, blocks_for(N, kRowsPerBlock), 32 * kRowsPerBlock, 0, stream_, dx.as<float>(), elements<Bf16>(dx_low),
               elements<T>(dy), x.as<float>(), rstd.as<float>(), w.as<float>(), N, C);
    });
    launch(add_chunks_kernel, blocks_for(C, 256), 256, 0, stream_, dw.as<float>(), partial, int(chunks), C);
}

}  // namespace bam
