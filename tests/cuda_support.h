// What tests of the emulation share: a stream with memory, running under every order, and two kernels that come right and wrong.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/ptx.h"

namespace bam {

using emu::Async;
using emu::Options;
using emu::Order;
using emu::Streams;

// A stream and device memory that a test fills and reads.
struct Device {
    cudaStream_t stream = new_stream();
    std::vector<void*> owned;
    ~Device() {
        for (void* p : owned) cudaFree(p);
        cudaStreamDestroy(stream);
    }
    static cudaStream_t new_stream() {
        cudaStream_t s;
        cuda_check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        return s;
    }
    template <typename T>
    T* make(size_t n) {
        void* p = nullptr;
        cuda_check(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
        owned.push_back(p);
        return static_cast<T*>(p);
    }
    template <typename T>
    T* make(const std::vector<T>& v) {
        T* p = make<T>(v.size());
        cudaMemcpyAsync(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice, stream);
        return p;
    }
    template <typename T>
    std::vector<T> read(const T* p, size_t n) {
        std::vector<T> v(n);
        cudaMemcpyAsync(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost, stream);
        return v;
    }
};

// Runs f with every order of threads and blocks, cp.async and streams.
template <typename F>
void in_all_orders(F f) {
    const Options before = emu::options();
    for (Order order : {Order::forward, Order::reverse, Order::random})
        for (Async async : {Async::early, Async::late})
            for (Streams streams : {Streams::lazy, Streams::eager, Streams::random}) {
                emu::options().schedule = order;
                emu::options().async = async;
                emu::options().streams = streams;
                SCOPED_TRACE(testing::Message() << "schedule " << int(order) << " async " << int(async) << " streams " << int(streams));
                f();
            }
    emu::options() = before;
}

struct WithOptions {
    Options before = emu::options();
    ~WithOptions() { emu::options() = before; }
};

inline std::vector<float> numbers(size_t n, float first = 1, float step = 0.5f) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; ++i) v[i] = first + step * float(i);
    return v;
}

__device__ inline float warp_sum(float v) {
    for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(kFullWarp, v, m);
    return v;
}

template <bool WithBarrier>
__global__ void row_sum_kernel(float* out, const float* in, int C) {
    __shared__ float part[32];
    float s = 0;
    for (int c = int(threadIdx.x); c < C; c += int(blockDim.x)) s += in[int64_t(blockIdx.x) * C + c];
    s = warp_sum(s);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    if (WithBarrier) __syncthreads();
    if (threadIdx.x == 0) {
        float t = 0;
        for (int w = 0; w < int(blockDim.x) / 32; ++w) t += part[w];
        out[blockIdx.x] = t;
    }
    if (WithBarrier) __syncthreads();
}

// Sums blocks of 64 numbers that arrive by double-buffered cp.async; the last one is cut and zero-filled.
enum class Pipeline { right, no_wait, prefetch_before_barrier };
template <Pipeline Kind>
__global__ void pipeline_kernel(float* out, const float* in, int n) {
    __shared__ __align__(16) float tile[2][64];
    const int t = int(threadIdx.x), steps = (n + 63) / 64;
    const auto fetch = [&](int step) {
        if (t < 16) async_copy16(&tile[step % 2][t * 4], in + (step * 64 + t * 4 < n ? step * 64 + t * 4 : 0), step * 64 + t * 4 < n);
        async_commit();
    };
    fetch(0);
    float sum = 0;
    for (int step = 0; step < steps; ++step) {
        if (Kind == Pipeline::prefetch_before_barrier && step + 1 < steps) fetch(step + 1);
        if (Kind != Pipeline::no_wait) {
            if (Kind == Pipeline::prefetch_before_barrier && step + 1 < steps) async_wait<1>();
            else async_wait<0>();
        }
        __syncthreads();
        if (Kind != Pipeline::prefetch_before_barrier && step + 1 < steps) fetch(step + 1);
        sum += tile[step % 2][t] + tile[step % 2][t + 32];
    }
    async_wait<0>();
    sum = warp_sum(sum);
    if (t == 0) *out = sum;
}

inline float run_pipeline(void (*kernel)(float*, const float*, int), int n) {
    Device d;
    float* out = d.make<float>(1);
    launch(kernel, 1, 32, 0, d.stream, out, d.make(numbers(size_t(n))), n);
    return d.read(out, 1)[0];
}

inline float sum_of_numbers(int n) {
    float s = 0;
    for (float x : numbers(size_t(n))) s += x;
    return s;
}

}  // namespace bam
