// The one header that kernels include. nvcc sees the CUDA headers; g++ sees emulate.h, which runs the same source on the CPU.
//
// The dialect both accept, and which the emulation enforces where it can:
// - launch(kernel, grid, block, dynamic_shared_bytes, stream, arguments...) instead of <<<>>>; dynamic_shared<T>() instead of
//   extern __shared__; __shared__ only on plain-data variables of function scope; kernel arguments are plain data.
// - __launch_bounds__(threads, blocks) on every kernel, launched with that constant; threads are a multiple of 32.
// - One block owns each output element and waits for no other block. No float atomics: a cross-block reduction is a second launch.
// - Guard work instead of returning before a barrier. Warp operations use the full mask in warp-uniform flow.
// - A reduction ends with a barrier, or says in its name that it does not.
// - bf16 is storage, arithmetic is fp32. Inline assembly only in mma.h, beside its twin. No cooperative groups, cub, thrust, printf.
// - 64-bit row bases, 32-bit offsets inside a tile; int(threadIdx.x) in comparisons and min/max.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/runtime.h"

#ifdef __CUDACC__

namespace bam {

constexpr bool kEmulated = false;
constexpr unsigned kFullWarp = 0xffffffffu;

// Beyond this a kernel must be told that it may use more dynamic shared memory.
constexpr size_t kDefaultSharedBytes = 48 * 1024;

template <typename... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, std::type_identity_t<P>... args) {
    if (shared_bytes > kDefaultSharedBytes)
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), "cudaFuncSetAttribute");
    kernel<<<grid, block, shared_bytes, stream>>>(args...);
    cuda_check(cudaGetLastError(), "kernel launch");
}

template <typename T>
__device__ T* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
}

}  // namespace bam

#else
#include "cuda/emulate.h"
#endif
