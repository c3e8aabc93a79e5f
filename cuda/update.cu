// The optimizer over whole arenas, and the global norm in double by one fixed tree.
#include "cuda/backend.h"
#include "cuda/kernel.h"

namespace bam {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxGroups = 16;   // in one launch
constexpr int kNormBlocks = 512;

struct UpdateArgs {
    float *p, *m, *v;
    const float* g;
    UpdateGroup groups[kMaxGroups];
    int n_groups;
    UpdateStep step;
};

// Thread i has the i-th element of all groups in order.
__global__ void __launch_bounds__(kThreads) update_kernel(UpdateArgs a) {
    int64_t i = global_thread();
    int group = 0;
    while (group < a.n_groups && i >= a.groups[group].end - a.groups[group].begin) {
        i -= a.groups[group].end - a.groups[group].begin;
        ++group;
    }
    if (group == a.n_groups) return;
    const UpdateGroup& u = a.groups[group];
    const UpdateStep& s = a.step;
    i += u.begin;
    const float g = a.g[i] * s.grad_scale;
    const float m = s.beta1 * a.m[i] + s.rest1 * g, v = s.beta2 * a.v[i] + s.rest2 * g * g;
    const float step = s.adaptive ? s.c1 * m / (s.c2 * sqrtf(v) + s.eps) : s.c1 * m;
    a.m[i] = m;
    a.v[i] = v;
    a.p[i] = a.p[i] * (1 - u.lr * u.weight_decay) - u.lr * step;
}

__global__ void __launch_bounds__(kThreads) sum_squares_kernel(double* partial, const float* g, int64_t n) {
    double sum = 0;
    for (int64_t i = global_thread(); i < n; i += int64_t(gridDim.x) * kThreads) sum += double(g[i]) * g[i];
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) add_partials_kernel(double* total, const double* partial, int n) {
    double sum = 0;
    for (int i = int(threadIdx.x); i < n; i += kThreads) sum += partial[i];
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) *total = sum;
}

}  // namespace

double CudaBackend::global_norm(Tensor g) {
    const int64_t n = g.numel();
    if (n == 0) return 0;
    double squares = 0;
    {
        Timed t(*this, "global_norm");
        const unsigned blocks = std::min(unsigned(kNormBlocks), blocks_for(n, kThreads));
        double* partial = scratch_.room<double>(kNormBlocks + 1);
        double* total = partial + kNormBlocks;
        launch(sum_squares_kernel, blocks, kThreads, 0, stream_, partial, g.as<float>(), n);
        launch(add_partials_kernel, 1, kThreads, 0, stream_, total, partial, int(blocks));
        cuda_check(cudaMemcpyAsync(&squares, total, sizeof squares, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    }
    synchronize();
    return std::sqrt(squares);
}

void CudaBackend::update(Tensor p, Tensor m, Tensor v, Tensor g, const std::vector<UpdateGroup>& groups, const UpdateStep& s) {
    Timed t(*this, "update");
    for (size_t first = 0; first < groups.size(); first += kMaxGroups) {
        UpdateArgs a{};
        a.p = p.as<float>(), a.m = m.as<float>(), a.v = v.as<float>(), a.g = g.as<float>(), a.step = s;
        int64_t n = 0;
        for (; a.n_groups < kMaxGroups && first + size_t(a.n_groups) < groups.size(); ++a.n_groups) {
            a.groups[a.n_groups] = groups[first + size_t(a.n_groups)];
            n += a.groups[a.n_groups].end - a.groups[a.n_groups].begin;
        }
        if (n > 0) launch(update_kernel, blocks_for(n, kThreads), kThreads, 0, stream_, a);
    }
}

}  // namespace bam
