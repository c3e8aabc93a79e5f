// The emulation of CUDA on the CPU: kernels that must pass, in every order.
#include "cuda_support.h"

namespace bam {
namespace {

// ---- kernels that pass ------------------------------------------------------------------------------------------------------

TEST(CudaEmulation, BlocksThreadsAndBarriers) {
    const int R = 5, C = 300;
    const auto in = numbers(R * C);
    in_all_orders([&] {
        Device d;
        float* out = d.make<float>(R);
        launch(row_sum_kernel<true>, R, 128, 0, d.stream, out, d.make(in), C);
        const auto got = d.read(out, R);
        for (int r = 0; r < R; ++r) {
            double want = 0;
            for (int c = 0; c < C; ++c) want += in[size_t(r * C + c)];
            EXPECT_NEAR(got[size_t(r)], want, 1e-5 * want);
        }
    });
}

__global__ void indices_kernel(int* out) {
    const int block = int(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    const int thread = int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    out[block * 64 + thread] = int(blockIdx.x * 100000 + blockIdx.y * 10000 + blockIdx.z * 1000 + threadIdx.x * 100 + threadIdx.y * 10 + threadIdx.z);
}

TEST(CudaEmulation, IndicesInThreeDimensions) {
    in_all_orders([] {
        Device d;
        int* out = d.make<int>(24 * 64);
        launch(indices_kernel, dim3(2, 3, 4), dim3(8, 4, 2), 0, d.stream, out);
        const auto got = d.read(out, 24 * 64);
        for (int b = 0; b < 24; ++b)
            for (int t = 0; t < 64; ++t)
                ASSERT_EQ(got[size_t(b * 64 + t)], b % 2 * 100000 + b / 2 % 3 * 10000 + b / 6 * 1000 + t % 8 * 100 + t / 8 % 4 * 10 + t / 32);
    });
}

__global__ void warp_kernel(int* out) {
    const int lane = int(threadIdx.x % 32), v = int(threadIdx.x) * 10;
    int* o = out + threadIdx.x * 8;
    o[0] = __shfl_sync(kFullWarp, v, 5);
    o[1] = __shfl_xor_sync(kFullWarp, v, 3);
    o[2] = __shfl_down_sync(kFullWarp, v, 4);
    o[3] = __shfl_up_sync(kFullWarp, v, 4);
    o[4] = int(__ballot_sync(kFullWarp, lane % 3 == 0));
    o[5] = __any_sync(kFullWarp, int(threadIdx.x) == 40);
    o[6] = __all_sync(kFullWarp, int(threadIdx.x) < 32);
    __syncwarp();
    o[7] = 1;
}

TEST(CudaEmulation, WarpOperations) {
    in_all_orders([] {
        Device d;
        int* out = d.make<int>(64 * 8);
        launch(warp_kernel, 1, 64, 0, d.stream, out);
        const auto got = d.read(out, 64 * 8);
        for (int t = 0; t < 64; ++t) {
            const int* o = &got[size_t(t * 8)];
            const int lane = t % 32, first = t - lane;
            EXPECT_EQ(o[0], 10 * (first + 5));
            EXPECT_EQ(o[1], 10 * (t ^ 3));
            EXPECT_EQ(o[2], 10 * (lane + 4 < 32 ? t + 4 : t));
            EXPECT_EQ(o[3], 10 * (lane >= 4 ? t - 4 : t));
            EXPECT_EQ(unsigned(o[4]), 0x49249249u);  // bits 0, 3, 6, ..., 30
            EXPECT_EQ(o[5], first == 32);
            EXPECT_EQ(o[6], first == 0);
        }
    });
}

__global__ void reverse_kernel(float* out, const float* in, int n) {
    float* s = dynamic_shared<float>();
    const int i = int(threadIdx.x);
    if (i < n) s[i] = in[i];
    __syncthreads();
    if (i < n) out[i] = s[n - 1 - i];
}

TEST(CudaEmulation, DynamicSharedMemory) {
    in_all_orders([] {
        Device d;
        const auto in = numbers(40);
        float* out = d.make<float>(40);
        launch(reverse_kernel, 1, 64, 40 * sizeof(float), d.stream, out, d.make(in), 40);
        const auto got = d.read(out, 40);
        for (size_t i = 0; i < 40; ++i) EXPECT_EQ(got[i], in[39 - i]);
    });
}

__global__ void shared_contents_kernel(float* out) { out[threadIdx.x] = dynamic_shared<float>()[threadIdx.x]; }

TEST(CudaEmulation, MemoryStartsAsNaN) {
    Device d;
    float* a = d.make<float>(32);
    for (float x : d.read(a, 32)) EXPECT_TRUE(std::isnan(x));
    launch(shared_contents_kernel, 1, 32, 32 * sizeof(float), d.stream, a);
    for (float x : d.read(a, 32)) EXPECT_TRUE(std::isnan(x));
}

__global__ void histogram_kernel(int* bins, const int* values, int n) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) atomicAdd(&bins[values[i]], 1);
}

TEST(CudaEmulation, IntegerAtomicsAcrossBlocks) {
    in_all_orders([] {
        Device d;
        std::vector<int> values(100);
        for (size_t i = 0; i < values.size(); ++i) values[i] = int(i * i % 7);
        int* bins = d.make(std::vector<int>(7, 0));
        launch(histogram_kernel, 4, 32, 0, d.stream, bins, d.make(values), 100);
        std::vector<int> want(7, 0);
        for (int v : values) ++want[size_t(v)];
        EXPECT_EQ(d.read(bins, 7), want);
    });
}

TEST(CudaEmulation, AsyncCopies) {
    in_all_orders([] {
        for (int n : {64, 180, 256}) EXPECT_EQ(run_pipeline(pipeline_kernel<Pipeline::right>, n), sum_of_numbers(n));
    });
}

[[maybe_unused]] __global__ void big_offset_kernel(uint8_t* out, int64_t stride) { if (threadIdx.x == 0) out[int64_t(blockIdx.x) * stride] = uint8_t(blockIdx.x + 1); }

#if !defined(__SANITIZE_THREAD__)  // TSan's shadow memory is real memory
TEST(CudaEmulation, OffsetsPastTwoGigabytes) {
    WithOptions w;
    emu::options().memory = 16ll << 30;
    Device d;
    const int64_t stride = (1ll << 31) + 4096;
    uint8_t* out = d.make<uint8_t>(size_t(2 * stride + 1));
    launch(big_offset_kernel, 3, 32, 0, d.stream, out, stride);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(d.read(out + i * stride, 1)[0], i + 1);
}
#endif

// ---- tensor cores -------------------------------------------------------------------------------------------------------------

// The PTX ISA's pictures of mma.m16n8k16 (bf16): for each element of a matrix the lane that holds it and its number in the lane.
constexpr int kALane[16][16] = {
    {0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3},
    {4, 4, 5, 5, 6, 6, 7, 7, 4, 4, 5, 5, 6, 6, 7, 7},
    {8, 8, 9, 9, 10, 10, 11, 11, 8, 8, 9, 9, 10, 10, 11, 11},
    {12, 12, 13, 13, 14, 14, 15, 15, 12, 12, 13, 13, 14, 14, 15, 15},
    {16, 16, 17, 17, 18, 18, 19, 19, 16, 16, 17, 17, 18, 18, 19, 19},
    {20, 20, 21, 21, 22, 22, 23, 23, 20, 20, 21, 21, 22, 22, 23, 23},
    {24, 24, 25, 25, 26, 26, 27, 27, 24, 24, 25, 25, 26, 26, 27, 27},
    {28, 28, 29, 29, 30, 30, 31, 31, 28, 28, 29, 29, 30, 30, 31, 31},
    {0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3},
    {4, 4, 5, 5, 6, 6, 7, 7, 4, 4, 5, 5, 6, 6, 7, 7},
    {8, 8, 9, 9, 10, 10, 11, 11, 8, 8, 9, 9, 10, 10, 11, 11},
    {12, 12, 13, 13, 14, 14, 15, 15, 12, 12, 13, 13, 14, 14, 15, 15},
    {16, 16, 17, 17, 18, 18, 19, 19, 16, 16, 17, 17, 18, 18, 19, 19},
    {20, 20, 21, 21, 22, 22, 23, 23, 20, 20, 21, 21, 22, 22, 23, 23},
    {24, 24, 25, 25, 26, 26, 27, 27, 24, 24, 25, 25, 26, 26, 27, 27},
    {28, 28, 29, 29, 30, 30, 31, 31, 28, 28, 29, 29, 30, 30, 31, 31}};
constexpr int kAElement[2][16] = {  // rows 0-7, rows 8-15
    {0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5},
    {2, 3, 2, 3, 2, 3, 2, 3, 6, 7, 6, 7, 6, 7, 6, 7}};
constexpr int kBLane[16][8] = {  // rows k, columns n
    {0, 4, 8, 12, 16, 20, 24, 28},  {0, 4, 8, 12, 16, 20, 24, 28},  {1, 5, 9, 13, 17, 21, 25, 29},  {1, 5, 9, 13, 17, 21, 25, 29},
    {2, 6, 10, 14, 18, 22, 26, 30}, {2, 6, 10, 14, 18, 22, 26, 30}, {3, 7, 11, 15, 19, 23, 27, 31}, {3, 7, 11, 15, 19, 23, 27, 31},
    {0, 4, 8, 12, 16, 20, 24, 28},  {0, 4, 8, 12, 16, 20, 24, 28},  {1, 5, 9, 13, 17, 21, 25, 29},  {1, 5, 9, 13, 17, 21, 25, 29},
    {2, 6, 10, 14, 18, 22, 26, 30}, {2, 6, 10, 14, 18, 22, 26, 30}, {3, 7, 11, 15, 19, 23, 27, 31}, {3, 7, 11, 15, 19, 23, 27, 31}};
constexpr int kBElement[16] = {0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3};
constexpr int kDLane[8][8] = {  // rows 0-7, and again rows 8-15
    {0, 0, 1, 1, 2, 2, 3, 3},         {4, 4, 5, 5, 6, 6, 7, 7},         {8, 8, 9, 9, 10, 10, 11, 11},     {12, 12, 13, 13, 14, 14, 15, 15},
    {16, 16, 17, 17, 18, 18, 19, 19}, {20, 20, 21, 21, 22, 22, 23, 23}, {24, 24, 25, 25, 26, 26, 27, 27}, {28, 28, 29, 29, 30, 30, 31, 31}};
constexpr int kDElement[2][8] = {{0, 1, 0, 1, 0, 1, 0, 1}, {2, 3, 2, 3, 2, 3, 2, 3}};

// One mma on registers given for each lane: a (32, 4), b (32, 2), d (32, 4).
__global__ void mma_kernel(float* d, const uint32_t* a, const uint32_t* b) {
    uint32_t ra[4], rb[2];
    float rd[4];
    for (int i = 0; i < 4; ++i) ra[i] = a[threadIdx.x * 4 + i];
    for (int i = 0; i < 2; ++i) rb[i] = b[threadIdx.x * 2 + i];
    for (int i = 0; i < 4; ++i) rd[i] = d[threadIdx.x * 4 + i];
    mma(rd, ra, rb);
    for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = rd[i];
}

uint16_t bits_of(float x) { return __builtin_bit_cast(uint16_t, __float2bfloat16(x)); }

TEST(CudaEmulation, MmaLaneMap) {
    // Small integers: every product and sum is exact.
    int A[16][16], B[16][8];
    std::vector<uint16_t> a(32 * 8), b(32 * 4);
    for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 16; ++k) {
            A[r][k] = (r * 7 + k * 3) % 11 - 5;
            a[size_t(kALane[r][k] * 8 + kAElement[r / 8][k])] = bits_of(float(A[r][k]));
        }
    for (int k = 0; k < 16; ++k)
        for (int c = 0; c < 8; ++c) {
            B[k][c] = (k * 5 + c * 2) % 13 - 6;
            b[size_t(kBLane[k][c] * 4 + kBElement[k])] = bits_of(float(B[k][c]));
        }
    std::vector<uint32_t> wa(32 * 4), wb(32 * 2);
    memcpy(wa.data(), a.data(), a.size() * 2);
    memcpy(wb.data(), b.data(), b.size() * 2);
    in_all_orders([&] {
        Device d;
        float* D = d.make(numbers(32 * 4));
        launch(mma_kernel, 1, 32, 0, d.stream, D, d.make(wa), d.make(wb));
        const auto got = d.read(D, 32 * 4);
        for (int r = 0; r < 16; ++r)
            for (int c = 0; c < 8; ++c) {
                const size_t at = size_t(kDLane[r % 8][c] * 4 + kDElement[r / 8][c]);
                float want = numbers(32 * 4)[at];
                for (int k = 0; k < 16; ++k) want += float(A[r][k] * B[k][c]);
                ASSERT_EQ(got[at], want) << r << "," << c;
            }
    });
}

// out (2, 32, 4): what each lane receives, plain and transposed, from the 32 x 8 matrix `in`.
__global__ void load_matrices_kernel(uint32_t* out, const uint16_t* in) {
    __shared__ __align__(16) uint16_t tile[32][8];
    for (int i = 0; i < 8; ++i) tile[threadIdx.x][i] = in[threadIdx.x * 8 + i];
    __syncthreads();
    uint32_t r[4];
    load_matrices(r, tile[threadIdx.x]);
    for (int m = 0; m < 4; ++m) out[threadIdx.x * 4 + m] = r[m];
    load_matrices_transposed(r, tile[threadIdx.x]);
    for (int m = 0; m < 4; ++m) out[128 + threadIdx.x * 4 + m] = r[m];
}

TEST(CudaEmulation, LoadMatricesLaneMap) {
    // Of each 8 x 8 matrix, lane l receives the elements where kDLane says l, in order: the same picture as the upper half of D.
    std::vector<uint16_t> in(32 * 8);
    for (size_t i = 0; i < in.size(); ++i) in[i] = uint16_t(i + 1);
    in_all_orders([&] {
        Device d;
        uint32_t* out = d.make<uint32_t>(256);
        launch(load_matrices_kernel, 1, 32, 0, d.stream, out, d.make(in));
        const auto got = d.read(out, 256);
        for (int m = 0; m < 4; ++m)
            for (int r = 0; r < 8; ++r)
                for (int c = 0; c < 8; ++c) {
                    const int shift = 16 * kDElement[0][c];
                    const size_t plain = size_t(kDLane[r][c] * 4 + m);
                    EXPECT_EQ(got[plain] >> shift & 0xffff, in[size_t((m * 8 + r) * 8 + c)]);
                    EXPECT_EQ(got[128 + plain] >> shift & 0xffff, in[size_t((m * 8 + c) * 8 + r)]);
                }
    });
}

__global__ void pack_kernel(uint32_t* out, const float* in) { out[threadIdx.x] = pack_bf16(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]); }

TEST(CudaEmulation, PackRoundsToEven) {
    std::vector<float> in(64, 1.0f);
    in[0] = 1.0f + 0x1p-8f;   // half way, down to even: 1
    in[1] = 1.0f + 0x3p-8f;   // half way, up to even: 1 + 2^-6
    Device d;
    uint32_t* out = d.make<uint32_t>(32);
    launch(pack_kernel, 1, 32, 0, d.stream, out, d.make(in));
    const auto got = d.read(out, 32);
    EXPECT_EQ(got[0], 0x3f823f80u);
    EXPECT_EQ(got[1], 0x3f803f80u);
}

// ---- streams ------------------------------------------------------------------------------------------------------------------

__global__ void add_one_kernel(float* x, int n) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] += 1;
}

__global__ void copy_kernel(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x]; }

// A copy and a kernel on two streams, with or without the event that orders them.
float copy_then_kernel(bool wait) {
    Device d;
    cudaStream_t second = Device::new_stream();
    cudaEvent_t copied;
    cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
    float *x = d.make<float>(32), *y = d.make<float>(32);
    const auto values = numbers(32, 7);
    cudaMemcpyAsync(x, values.data(), 32 * sizeof(float), cudaMemcpyHostToDevice, second);
    cudaEventRecord(copied, second);
    if (wait) cudaStreamWaitEvent(d.stream, copied, 0);
    launch(copy_kernel, 1, 32, 0, d.stream, y, x);
    const float got = d.read(y, 32)[0];
    cudaEventDestroy(copied);
    cudaStreamDestroy(second);
    return got;
}

TEST(CudaEmulation, EventsOrderStreams) {
    in_all_orders([] { EXPECT_EQ(copy_then_kernel(true), 7); });
}

TEST(CudaEmulation, MissingEventWaitGivesWrongValues) {
    WithOptions w;
    emu::options().streams = Streams::lazy;
    EXPECT_TRUE(std::isnan(copy_then_kernel(false)));
}

TEST(CudaEmulation, AnEventWaitsForItsRecordOnly) {
    // Work issued after the record must not be forced to have run.
    WithOptions w;
    emu::options().streams = Streams::lazy;
    Device d;
    cudaStream_t second = Device::new_stream();
    cudaEvent_t first;
    cudaEventCreateWithFlags(&first, cudaEventDisableTiming);
    float* x = d.make(numbers(32, 0, 0));
    cudaStreamSynchronize(d.stream);
    launch(add_one_kernel, 1, 32, 0, second, x, 32);
    cudaEventRecord(first, second);
    launch(add_one_kernel, 1, 32, 0, second, x, 32);
    cudaStreamWaitEvent(d.stream, first, 0);
    EXPECT_EQ(d.read(x, 1)[0], 1);
    cudaStreamSynchronize(second);
    EXPECT_EQ(d.read(x, 1)[0], 2);
    cudaEventDestroy(first);
    cudaStreamDestroy(second);
}

TEST(CudaEmulation, PinnedMemory) {
    in_all_orders([] {
        Device d;
        void *in, *out;
        cudaMallocHost(&in, 128);
        cudaMallocHost(&out, 128);
        const auto values = numbers(32, 3);
        memcpy(in, values.data(), 128);
        float* x = d.make<float>(32);
        cudaMemcpyAsync(x, in, 128, cudaMemcpyHostToDevice, d.stream);
        launch(add_one_kernel, 1, 32, 0, d.stream, x, 32);
        cudaMemcpyAsync(out, x, 128, cudaMemcpyDeviceToHost, d.stream);
        cudaStreamSynchronize(d.stream);
        for (size_t i = 0; i < 32; ++i) EXPECT_EQ(static_cast<float*>(out)[i], values[i] + 1);
        cudaFreeHost(in);
        cudaFreeHost(out);
    });
}

TEST(CudaEmulation, ReadingPinnedMemoryTooEarlyGivesNaN) {
    WithOptions w;
    emu::options().streams = Streams::lazy;
    Device d;
    void* out;
    cudaMallocHost(&out, 4);
    memset(out, 0, 4);
    cudaMemcpyAsync(out, d.make(numbers(1)), 4, cudaMemcpyDeviceToHost, d.stream);
    EXPECT_TRUE(std::isnan(*static_cast<float*>(out)));
    cudaStreamSynchronize(d.stream);
    EXPECT_EQ(*static_cast<float*>(out), 1);
    cudaFreeHost(out);
}

TEST(CudaEmulation, EventsMeasureTime) {
    Device d;
    cudaEvent_t a, b;
    cudaEventCreateWithFlags(&a, cudaEventDefault);
    cudaEventCreateWithFlags(&b, cudaEventDefault);
    float* x = d.make(numbers(32));
    cudaEventRecord(a, d.stream);
    launch(add_one_kernel, 1, 32, 0, d.stream, x, 32);
    cudaEventRecord(b, d.stream);
    float ms = -1;
    EXPECT_EQ(cudaEventElapsedTime(&ms, a, b), emu::options().streams == Streams::eager ? cudaSuccess : cudaErrorNotReady);
    cudaEventSynchronize(b);
    EXPECT_EQ(cudaEventElapsedTime(&ms, a, b), cudaSuccess);
    EXPECT_GT(ms, 0);
    cudaEventDestroy(a);
    cudaEventDestroy(b);
}

TEST(CudaEmulation, MemoryIsLimitedAndReturned) {
    WithOptions w;
    emu::options().memory = 1 << 20;
    size_t before, after, total;
    cudaMemGetInfo(&before, &total);
    EXPECT_EQ(total, size_t(1) << 20);
    void *p, *q;
    ASSERT_EQ(cudaMalloc(&p, 600 << 10), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&q, 600 << 10), cudaErrorMemoryAllocation);
    cudaFree(p);
    cudaMemGetInfo(&after, &total);
    EXPECT_EQ(before, after);
    ASSERT_EQ(cudaMalloc(&q, 600 << 10), cudaSuccess);
    cudaFree(q);
}

}  // namespace
}  // namespace bam
