// CUDA kernels on the CPU, thread by thread, stricter than a GPU: what is wrong there stops here with a message that names the
// kernel, the block, and file:line for each range of threads. Kernels never include this header, but device.h.
// One OS thread runs one block at a time; the threads of a block are fibers (Boost.Context). The real CUDA headers supply types
// and prototypes; cuda/emulate/*.cpp supplies the functions of cudart, cuBLASLt and NCCL that the backend calls.
// Environment: EMU_SCHEDULE=forward|reverse|random:SEED  order of threads and blocks
//              EMU_ASYNC=early|late                      cp.async copies at issue or when waited for
//              EMU_STREAMS=lazy|eager|random:SEED        when queued work runs: as late as allowed, at once, anything between
//              EMU_WRITES=check|off                      two blocks writing one byte, writes outside allocations
//              EMU_NCCL_TIMEOUT=SECONDS                  ranks wait so long for each other (60)
//              EMU_ARCH=80|90  EMU_MEMORY=BYTES          the device that is emulated; EMU_ARCH=75: one too old; none: no device
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <type_traits>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time; plain globals get redzones from ASan, which thread-locals do not

// TSan must not see the emulation's own hand-overs between lanes: only kernels' accesses are checked, and only barriers order them.
#if defined(__SANITIZE_THREAD__)
#define EMU_UNTRACED __attribute__((no_sanitize_thread, noinline))
#else
#define EMU_UNTRACED
#endif

namespace bam::emu {

constexpr int kWarp = 32;

// ---- options --------------------------------------------------------------------------------------------------------------

enum class Order : uint8_t { forward, reverse, random };
enum class Async : uint8_t { early, late };
enum class Streams : uint8_t { lazy, eager, random };

struct Options {
    Order schedule = Order::forward;
    Async async = Async::early;
    Streams streams = Streams::lazy;
    bool check_writes = true;
    bool ends_only = false;     // of each grid only the first and the last block run: for shapes too large to run whole
    unsigned seed = 1;          // of the random orders
    int arch = 90;              // 0: there is no device
    int64_t memory = 4ll << 30;  // bytes of device memory
};
Options& options();  // read from the environment at first use; tests change them between launches

// ---- launches ---------------------------------------------------------------------------------------------------------------

struct Site {
    const char* file;
    int line;
};

// A grid that remembers where the launch stands in the source: the constructor's defaults are those of the call.
struct Grid {
    int64_t x = 1, y = 1, z = 1;
    Site site;
    Grid(dim3 g, const char* file = __builtin_FILE(), int line = __builtin_LINE()) : x(g.x), y(g.y), z(g.z), site{file, line} {}
    template <std::integral I>
    Grid(I x, const char* file = __builtin_FILE(), int line = __builtin_LINE()) : x(x), site{file, line} {}
};

struct LaunchShape {
    Grid grid;
    dim3 block;
    size_t shared_bytes;
    size_t argument_bytes;
};

void check_launch(const LaunchShape& shape);                                     // limits of the emulated device
// No host or dead pointers in an argument; `cleared` is the same without padding.
void check_argument(const LaunchShape& shape, const void* argument, const void* cleared, size_t bytes);
template <typename T>
void check_argument(const LaunchShape& shape, const T& argument) {
    T cleared = argument;
    __builtin_clear_padding(&cleared);  // on a copy: gcc 12 clears too much in arrays of structs
    check_argument(shape, &argument, &cleared, sizeof argument);
}
void enqueue_launch(cudaStream_t stream, const LaunchShape& shape, std::function<void()> thread_body);

// ---- inside a kernel --------------------------------------------------------------------------------------------------------

struct Index {
    unsigned value;
    EMU_UNTRACED operator unsigned() const { return value; }
};
struct Index3 {
    Index x, y, z;
};

// Block-wide barrier; orders memory.
void barrier(Site site);

// One primitive serves shuffles, votes, ldmatrix and mma: when all 32 lanes of the warp have arrived with the same combine from
// the same place, combine(operands) runs once and all go on. Orders memory between lanes only when it says so.
using Combine = void (*)(void* const operands[kWarp]);
void warp_collective(void* operand, Combine combine, const char* what, Site site, bool orders_memory = false);

void check_full_mask(unsigned mask, const char* what, Site site);
int lane();
char* dynamic_shared_memory();

// cp.async copies of the calling thread that have not been made yet (EMU_ASYNC=late), in order of issue.
struct AsyncCopy {
    void* to;
    const void* from;
    int bytes;  // written at `to`
    int valid;  // read at `from`; the rest is zero
};
constexpr int kMaxAsyncCopies = 256;
struct AsyncCopies {
    AsyncCopy copies[kMaxAsyncCopies];
    int group_end[kMaxAsyncCopies];  // committed groups: index of the first copy behind each
    int n_copies, n_groups;
};
AsyncCopies& async_copies();

// An integer atomic on global memory: exempt from the rule that one block owns a byte.
void note_atomic(void* address, size_t bytes);

// Prints why, where every thread of the running block is, and aborts.
[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <typename T>
struct Exchange {
    T value, result;
    int source;
};

template <typename T>
EMU_UNTRACED void exchange(void* const operands[kWarp]) {
    for (int i = 0; i < kWarp; ++i) {
        auto* to = static_cast<Exchange<T>*>(operands[i]);
        to->result = static_cast<Exchange<T>*>(operands[to->source])->value;
    }
}

template <typename T>
EMU_UNTRACED T shuffle(unsigned mask, T value, int source, const char* what, Site site) {
    check_full_mask(mask, what, site);
    Exchange<T> x{value, value, source};
    warp_collective(&x, exchange<T>, what, site);
    return x.result;
}

unsigned ballot(unsigned mask, bool predicate, const char* what, Site site);

}  // namespace bam::emu

// ---- CUDA's built-in names --------------------------------------------------------------------------------------------------

inline bam::emu::Index3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = bam::emu::kWarp;
using std::max;
using std::min;

#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(EMU_SITE) { bam::emu::barrier({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) {
    bam::emu::check_full_mask(mask, "__syncwarp", {file, line});
    bam::emu::warp_collective(nullptr, [](void* const*) {}, "__syncwarp", {file, line}, true);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, EMU_SITE) {
    return bam::emu::shuffle(mask, value, source & 31, "__shfl_sync", {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, EMU_SITE) {
    return bam::emu::shuffle(mask, value, (bam::emu::lane() ^ lane_mask) & 31, "__shfl_xor_sync", {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, EMU_SITE) {
    const int lane = bam::emu::lane(), source = lane + int(delta);
    return bam::emu::shuffle(mask, value, source < 32 ? source : lane, "__shfl_down_sync", {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, EMU_SITE) {
    const int lane = bam::emu::lane(), source = lane - int(delta);
    return bam::emu::shuffle(mask, value, source >= 0 ? source : lane, "__shfl_up_sync", {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    return bam::emu::ballot(mask, predicate, "__ballot_sync", {file, line});
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    return bam::emu::ballot(mask, predicate, "__any_sync", {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMU_SITE) {
    return bam::emu::ballot(mask, predicate, "__all_sync", {file, line}) == 0xffffffffu;
}
#undef EMU_SITE

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int atomicAdd(int* p, int v) { return bam::emu::note_atomic(p, sizeof *p), __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

namespace bam {

constexpr bool kEmulated = true;
constexpr unsigned kFullWarp = 0xffffffffu;

template <typename... P>
void launch(void (*kernel)(P...), emu::Grid grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            std::type_identity_t<P>... args) {
    static_assert((std::is_trivially_copyable_v<P> && ...), "kernel arguments are plain data");
    const emu::LaunchShape shape{grid, block, shared_bytes, (sizeof(P) + ... + 0)};
    emu::check_launch(shape);
    (emu::check_argument(shape, args), ...);
    emu::enqueue_launch(stream, shape, [=] { kernel(args...); });
}

// Without FMA in the compiler's target, rounded twice: std::fmaf is then a call that costs more than all else in an inner loop.
inline float fmaf(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

template <typename T>
T* dynamic_shared() { return reinterpret_cast<T*>(emu::dynamic_shared_memory()); }

}  // namespace bam
