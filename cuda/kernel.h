// The vocabulary of kernels: element types, reductions with fixed trees, launch sizes, run-time types to template arguments.
#pragma once
#include <stdexcept>
#include <string>

#include "cuda/device.h"
#include "cuda/ptx.h"
#include "tensor.h"

namespace bam {

using Bf16 = __nv_bfloat16;  // storage; arithmetic is fp32

__device__ inline float load(const float* p) { return *p; }
__device__ inline float load(const Bf16* p) { return __bfloat162float(*p); }
__device__ inline void store(float* p, float v) { *p = v; }
__device__ inline void store(Bf16* p, float v) { *p = __float2bfloat16_rn(v); }

// Over the 32 lanes; every lane gets the result.
template <typename T>
__device__ inline T warp_sum(T v) {
    for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(kFullWarp, v, m);
    return v;
}
__device__ inline float warp_max(float v) {
    for (int m = 16; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, m));
    return v;
}
// Over four neighbouring lanes.
__device__ inline float quad_sum(float v) {
    v += __shfl_xor_sync(kFullWarp, v, 1);
    return v + __shfl_xor_sync(kFullWarp, v, 2);
}
__device__ inline float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, 1));
    return fmaxf(v, __shfl_xor_sync(kFullWarp, v, 2));
}

// Over the block, of Threads threads; every thread gets the result. Ends with a barrier.
template <int Threads, typename T>
__device__ inline T block_sum(T v) {
    __shared__ T parts[Threads / 32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    T sum = parts[0];
    for (int w = 1; w < Threads / 32; ++w) sum += parts[w];
    __syncthreads();
    return sum;
}
template <int Threads>
__device__ inline float block_max(float v) {
    __shared__ float parts[Threads / 32];
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    float most = parts[0];
    for (int w = 1; w < Threads / 32; ++w) most = fmaxf(most, parts[w]);
    __syncthreads();
    return most;
}

__device__ inline int64_t global_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// Blocks for n items, `each` a block.
inline unsigned blocks_for(int64_t n, int64_t each) {
    const int64_t blocks = (n + each - 1) / each;
    if (blocks > 0x7fffffff) throw std::logic_error("a launch of " + std::to_string(blocks) + " blocks");
    return unsigned(blocks);
}

// Calls f with a value of the element type: float or Bf16.
template <typename F>
void dispatch(DType t, F f) {
    if (t == DType::f32) f(float{});
    else if (t == DType::bf16) f(Bf16{});
    else throw std::logic_error("a float type is wanted");
}

// The elements of a tensor of type T.
template <typename T>
T* elements(Tensor t) {
    if (t.data && size_of(t.dtype) != int64_t(sizeof(T))) throw std::logic_error(std::string("tensor holds ") + name_of(t.dtype));
    return static_cast<T*>(t.data);
}

}  // namespace bam
