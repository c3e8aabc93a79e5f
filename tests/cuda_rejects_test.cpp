// Kernels and calls that the emulation must reject, each in a child process, with the message that names the place.
#include "cuda_support.h"

namespace bam {
namespace {

__global__ void divergent_barrier_kernel(float* out) {
    if (threadIdx.x < 16) {
        __syncthreads();
        out[0] = 1;
    } else {
        __syncthreads();
        out[1] = 1;
    }
}
__global__ void return_before_barrier_kernel(float* out) {
    if (threadIdx.x < 16) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}
__global__ void deadlocked_shuffle_kernel(float* out) {
    float v = 1;
    if (threadIdx.x < 31) v = __shfl_xor_sync(kFullWarp, v, 1);
    __syncthreads();
    out[threadIdx.x] = v;
}
__global__ void divergent_shuffle_kernel(float* out) {
    float v = 1;
    if (threadIdx.x < 16) v = __shfl_xor_sync(kFullWarp, v, 1);
    else v = __shfl_xor_sync(kFullWarp, v, 2);
    out[threadIdx.x] = v;
}
__global__ void partial_mask_kernel(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1); }
[[maybe_unused]] __global__ void static_overflow_kernel(float* out) {
    __shared__ float s[32];
    s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
__global__ void dynamic_overflow_kernel(float* out) {
    float* s = dynamic_shared<float>();
    s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
[[maybe_unused]] __global__ void same_element_kernel(float* out, const float* in) {
    if (threadIdx.x == 0) out[3] = in[blockIdx.x];
}
[[maybe_unused]] __global__ void behind_allocation_kernel(float* out, int n) { out[n + int(threadIdx.x)] = 1; }
__global__ void plain_kernel(float* out) { out[threadIdx.x] = 1; }
__global__ void unwaited_copy_kernel(float* out, const float* in) {
    __shared__ __align__(16) float tile[4 * 32];
    async_copy16(&tile[threadIdx.x * 4], in + threadIdx.x * 4, true);
    async_commit();
    out[threadIdx.x] = 0;
}
__global__ void misaligned_rows_kernel(uint32_t* out) {
    __shared__ __align__(16) uint16_t tile[32 * 9];
    for (int i = 0; i < 9; ++i) tile[threadIdx.x * 9 + i] = 1;
    __syncthreads();
    uint32_t r[4];
    load_matrices(r, tile + threadIdx.x * 9);
    out[threadIdx.x] = r[0];
}
struct Arguments {
    int T;
    const float* in;
    float* out;
};
__global__ void struct_kernel(Arguments a) { a.out[threadIdx.x] = a.in[threadIdx.x]; }
__global__ void deep_recursion_kernel(float* out) {
    struct Local {
        static float down(volatile float* x, int n) {
            volatile float big[1024];
            big[n % 1024] = x[0] + 1;
            return n == 0 ? big[0] : down(big, n - 1) + big[n % 1024];
        }
    };
    volatile float x[1] = {0};
    out[threadIdx.x] = Local::down(x, 1000);
}

template <typename... P, typename... A>
void run(void (*kernel)(P...), emu::Grid grid, dim3 block, size_t shared, A... arguments) {
    Device d;
    launch(kernel, grid, block, shared, d.stream, arguments...);
    cudaStreamSynchronize(d.stream);
}
template <typename... P>
void run_on_floats(void (*kernel)(float*, P...), emu::Grid grid, dim3 block, size_t shared, P... arguments) {
    Device d;
    float* out = d.make<float>(1024);
    launch(kernel, grid, block, shared, d.stream, out, arguments...);
    cudaStreamSynchronize(d.stream);
}

class CudaRejects : public testing::Test {
protected:
    void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(CudaRejects, DivergentBarrier) {
    EXPECT_DEATH(run_on_floats(divergent_barrier_kernel, 1, 32, 0),
                 "divergent __syncthreads in block \\(0,0,0\\) of the kernel launched at .*cuda_[a-z]*_test.cpp:[0-9]+\n"
                 "emu:   threads 0-15: wait at __syncthreads, .*cuda_[a-z]*_test.cpp:[0-9]+\n"
                 "emu:   threads 16-31: wait at __syncthreads, .*cuda_[a-z]*_test.cpp:[0-9]+");
}
TEST_F(CudaRejects, ReturnBeforeBarrier) {
    EXPECT_DEATH(run_on_floats(return_before_barrier_kernel, 1, 32, 0), "threads returned before a __syncthreads(.|\n)*threads 0-15: returned");
}
TEST_F(CudaRejects, DeadlockedWarpOperation) {
    EXPECT_DEATH(run_on_floats(deadlocked_shuffle_kernel, 1, 32, 0),
                 "deadlock(.|\n)*threads 0-30: wait in __shfl_xor_sync, .*\nemu:   thread 31: wait at __syncthreads");
}
TEST_F(CudaRejects, DivergentWarpOperation) {
    EXPECT_DEATH(run_on_floats(divergent_shuffle_kernel, 1, 32, 0), "divergent warp operation(.|\n)*threads 0-15(.|\n)*threads 16-31");
}
TEST_F(CudaRejects, PartialMask) { EXPECT_DEATH(run_on_floats(partial_mask_kernel, 1, 32, 0), "mask 0x0000ffff: kernels use the full mask"); }
TEST_F(CudaRejects, StackOverflow) { EXPECT_DEATH(run_on_floats(deep_recursion_kernel, 1, 32, 0), "stack.overflow"); }
TEST_F(CudaRejects, UnwaitedAsyncCopy) {
    EXPECT_DEATH(
        {
            Device d;
            launch(unwaited_copy_kernel, 1, 32, 0, d.stream, d.make<float>(32), d.make<float>(128));
            cudaStreamSynchronize(d.stream);
        },
        "cp.async copies that it never waited for");
}
TEST_F(CudaRejects, MisalignedMatrixRow) {
    EXPECT_DEATH(
        {
            Device d;
            launch(misaligned_rows_kernel, 1, 32, 0, d.stream, d.make<uint32_t>(32));
            cudaStreamSynchronize(d.stream);
        },
        "ldmatrix at .*the row address is not a multiple of 16");
}

TEST_F(CudaRejects, LaunchLimits) {
    EXPECT_DEATH(run_on_floats(plain_kernel, 1, 1056, 0), "launch at .*cuda_[a-z]*_test.cpp:.*1056 threads a block, expected at most 1024");
    EXPECT_DEATH(run_on_floats(plain_kernel, 1, 48, 0), "48 threads a block, expected a multiple of 32");
    EXPECT_DEATH(run_on_floats(plain_kernel, 1, 32, 240000), "240000 bytes of dynamic shared memory, sm_90 has 232448");
    EXPECT_DEATH(
        {
            emu::options().arch = 80;
            run_on_floats(plain_kernel, 1, 32, 200000);
        },
        "200000 bytes of dynamic shared memory, sm_80 has 166912");
    EXPECT_DEATH(run_on_floats(plain_kernel, dim3(1, 65536), 32, 0), "grid.y is 65536, expected 1 to 65535");
    EXPECT_DEATH(run_on_floats(plain_kernel, int64_t(1) << 31, 32, 0), "grid.x is 2147483648, expected 1 to 2147483647");
    EXPECT_DEATH(run_on_floats(plain_kernel, 0, 32, 0), "grid.x is 0, expected 1");
}

TEST_F(CudaRejects, HostPointer) {
    std::vector<float> host(32);
    EXPECT_DEATH(run(plain_kernel, 1, 32, 0, host.data()), "launch at .*argument holds a host pointer");
    EXPECT_DEATH(
        {
            Device d;
            launch(struct_kernel, 1, 32, 0, d.stream, Arguments{1, host.data(), d.make<float>(32)});
        },
        "argument holds a host pointer \\(0x[0-9a-f]+, byte 8 of 24\\)");
}
TEST_F(CudaRejects, ReleasedPointer) {
    EXPECT_DEATH(
        {
            void* p;
            cudaMalloc(&p, 128);
            cudaFree(p);
            run(plain_kernel, 1, 32, 0, static_cast<float*>(p));
        },
        "argument holds a pointer to released device memory");
}
TEST_F(CudaRejects, HostTouchesDeviceMemory) {
    EXPECT_DEATH(
        {
            Device d;
            d.make<float>(4)[1] = 1;
        },
        "host code touches device memory");
}
TEST_F(CudaRejects, CopyBeyondAllocation) {
    EXPECT_DEATH(
        {
            Device d;
            d.read(d.make<float>(4), 5);
        },
        "cudaMemcpyAsync to the host: 20 bytes at .*byte 0 of an allocation of 16 bytes.* leave the allocation");
}
TEST_F(CudaRejects, DefaultStream) { EXPECT_DEATH(launch(plain_kernel, 1, 32, 0, nullptr, nullptr), "the default stream is used"); }

TEST_F(CudaRejects, PinnedBufferReusedBeforeItsCopyRan) {
    EXPECT_DEATH(
        {
            Device d;
            void* pinned;
            cudaMallocHost(&pinned, 128);
            memset(pinned, 0, 128);
            cudaMemcpyAsync(d.make<float>(32), pinned, 128, cudaMemcpyHostToDevice, d.stream);
            static_cast<float*>(pinned)[7] = 1;
            cudaStreamSynchronize(d.stream);
        },
        "pinned memory at .* was written before the copy of its 128 bytes to the device had run");
}
// Two copies on two streams: the second must wait for an event, or the host for the first.
void copy_on_two_streams(bool wait, bool host_waits) {
    Device d;
    cudaStream_t second = Device::new_stream();
    cudaEvent_t copied;
    cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
    float *x = d.make<float>(32), *y = d.make<float>(32);
    cudaMemcpyAsync(x, numbers(32).data(), 128, cudaMemcpyHostToDevice, second);
    cudaEventRecord(copied, second);
    if (host_waits) cudaEventSynchronize(copied);
    if (wait) cudaStreamWaitEvent(d.stream, copied, 0);
    cudaMemcpyAsync(y, x + 16, 64, cudaMemcpyDeviceToDevice, d.stream);
    EXPECT_EQ(d.read(y, 1)[0], 9);
    cudaEventDestroy(copied);
    cudaStreamDestroy(second);
}
TEST_F(CudaRejects, MissingEventWait) {
    copy_on_two_streams(true, false);
    copy_on_two_streams(false, true);
    EXPECT_DEATH(copy_on_two_streams(false, false),
                 "cudaMemcpyAsync on the device reads bytes that cudaMemcpyAsync to the device writes on another stream, and no event orders "
                 "them \\(64 bytes");
}
TEST_F(CudaRejects, WaitForAnEventNeverRecorded) {
    EXPECT_DEATH(
        {
            Device d;
            cudaEvent_t e;
            cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
            cudaStreamWaitEvent(d.stream, e, 0);
        },
        "the event was never recorded");
}

#if !defined(__SANITIZE_THREAD__)  // there TSan watches the memory instead
TEST_F(CudaRejects, TwoBlocksWriteOneElement) {
    EXPECT_DEATH(
        {
            Device d;
            launch(same_element_kernel, 3, 32, 0, d.stream, d.make<float>(32), d.make(numbers(3)));
            cudaStreamSynchronize(d.stream);
        },
        "two blocks write byte 1[2-5] of an allocation of 128 bytes: block \\(0,0,0\\) before, in block \\(1,0,0\\)");
}
#endif

#if defined(__SANITIZE_ADDRESS__)
TEST_F(CudaRejects, StaticSharedOverflow) {
    EXPECT_DEATH(run_on_floats(static_overflow_kernel, 1, 64, 0), "index 32 out of bounds for type 'float|global-buffer-overflow");
}
TEST_F(CudaRejects, DynamicSharedOverflow) { EXPECT_DEATH(run_on_floats(dynamic_overflow_kernel, 1, 64, 4 * 32), "use-after-poison|buffer-overflow"); }
TEST_F(CudaRejects, WriteBehindAllocation) { EXPECT_DEATH(run_on_floats(behind_allocation_kernel, 1, 32, 0, 1024), "use-after-poison"); }
#else
TEST_F(CudaRejects, DynamicSharedOverflow) {
    EXPECT_DEATH(run_on_floats(dynamic_overflow_kernel, 1, 64, 4 * 40), "write behind dynamic shared memory: byte 160 of 160");
}
#if !defined(__SANITIZE_THREAD__)
TEST_F(CudaRejects, WriteBehindAllocation) {
    EXPECT_DEATH(run_on_floats(behind_allocation_kernel, 1, 32, 0, 1024), "write outside the allocation: byte 409[6-9] of an allocation of 4096 bytes");
}
#endif
#endif

// ---- races: TSan names the place; without it only an unlucky order shows a wrong value --------------------------------------------

// Without a barrier at its end the next call may overwrite `part` while others still read it.
__device__ float block_sum_without_last_barrier(float v) {
    __shared__ float part[32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(int(threadIdx.x % 32) < int(blockDim.x) / 32 ? part[threadIdx.x % 32] : 0.0f);
}
[[maybe_unused]] __global__ void reused_array_kernel(float* out, const float* in) {
    const float mean = block_sum_without_last_barrier(in[threadIdx.x]) / float(blockDim.x);
    const float d = in[threadIdx.x] - mean;
    const float variance = block_sum_without_last_barrier(d * d) / float(blockDim.x);
    if (threadIdx.x == 0) *out = variance;
}
[[maybe_unused]] __global__ void shuffle_as_fence_kernel(float* out) {
    __shared__ float s[32];
    s[threadIdx.x] = float(threadIdx.x);
    const float one = __shfl_xor_sync(kFullWarp, 1.0f, 1);
    out[threadIdx.x] = s[threadIdx.x ^ 1] * one;
}
[[maybe_unused]] __global__ void no_barrier_before_load_matrices_kernel(uint32_t* out) {
    __shared__ __align__(16) uint16_t tile[32][8];
    for (int i = 0; i < 8; ++i) tile[(threadIdx.x + 1) % 32][i] = uint16_t(i);
    uint32_t r[4];
    load_matrices(r, tile[threadIdx.x]);
    out[threadIdx.x] = r[0];
}

#if defined(__SANITIZE_THREAD__)
TEST_F(CudaRejects, MissingBarrier) {
    EXPECT_DEATH(
        {
            Device d;
            launch(row_sum_kernel<false>, 1, 128, 0, d.stream, d.make<float>(1), d.make(numbers(300)), 300);
            cudaStreamSynchronize(d.stream);
        },
        "data race(.|\n)*row_sum_kernel.*cuda_support.h:[0-9]+");
}
TEST_F(CudaRejects, MissingBarrierBeforeLoadMatrices) {
    EXPECT_DEATH(
        {
            Device d;
            launch(no_barrier_before_load_matrices_kernel, 1, 32, 0, d.stream, d.make<uint32_t>(32));
            cudaStreamSynchronize(d.stream);
        },
        "data race(.|\n)*no_barrier_before_load_matrices_kernel.*cuda_[a-z]*_test.cpp:[0-9]+");
}
TEST_F(CudaRejects, SharedArrayReusedTooEarly) {
    EXPECT_DEATH(
        {
            Device d;
            launch(reused_array_kernel, 1, 128, 0, d.stream, d.make<float>(1), d.make(numbers(128)));
            cudaStreamSynchronize(d.stream);
        },
        "data race(.|\n)*block_sum_without_last_barrier.*cuda_[a-z]*_test.cpp:[0-9]+");
}
TEST_F(CudaRejects, ShuffleAsFence) { EXPECT_DEATH(run_on_floats(shuffle_as_fence_kernel, 1, 32, 0), "data race(.|\n)*shuffle_as_fence_kernel"); }
TEST_F(CudaRejects, PrefetchBeforeBarrier) {
    EXPECT_DEATH(run_pipeline(pipeline_kernel<Pipeline::prefetch_before_barrier>, 256), "data race(.|\n)*make_async_copy");
}
#else
float worst_error(void (*kernel)(float*, const float*, int), int n) {
    float worst = 0;
    in_all_orders([&] {
        const float e = std::fabs(run_pipeline(kernel, n) - sum_of_numbers(n));
        worst = e <= worst ? worst : e;  // a NaN is worse than all
    });
    return worst;
}

TEST(CudaOrders, RevealMissingBarriersAndWaits) {
    bool wrong = false;
    in_all_orders([&] {
        Device d;
        float* out = d.make<float>(2);
        const auto in = numbers(600);
        launch(row_sum_kernel<false>, 2, 128, 0, d.stream, out, d.make(in), 300);
        double want = 0;
        for (size_t c = 0; c < 300; ++c) want += in[300 + c];
        wrong |= !(std::fabs(d.read(out, 2)[1] - want) < 1);
    });
    EXPECT_TRUE(wrong);
    EXPECT_FALSE(worst_error(pipeline_kernel<Pipeline::no_wait>, 256) <= 1);
}
#endif

}  // namespace
}  // namespace bam
