// What the parts of the emulation share: block.cpp runs blocks, memory.cpp is the device's memory, order.cpp and runtime.cpp streams and cudart,
// cublas.cpp cuBLASLt, nccl.cpp NCCL. These files are never compiled with TSan (Makefile), so that it sees kernels' accesses only.
#pragma once
#include "cuda/emulate.h"

namespace bam::emu {

// Runs all blocks of a launch, one after another, in options().schedule order.
void run_grid(const LaunchShape& shape, const std::function<void()>& thread_body);

// True, with the fiber's index, when address lies in the guard page under a fiber's stack.
bool is_stack_overflow(const void* address, int* thread);
// True when it lies in the guard page behind dynamic shared memory.
bool is_behind_shared(const void* address);

// ---- device memory: one arena, PROT_NONE except while work that may touch it runs ----------------------------------------

char* device_allocate(size_t bytes);        // NaN-filled; nullptr when options().memory is exhausted
bool device_release(void* p);               // false: not the start of a live allocation
size_t device_bytes_in_use();
bool is_device_pointer(const void* p);      // anywhere in the arena
// Dies unless [p, p + bytes) lies in one live allocation.
void check_device_range(const void* p, size_t bytes, const char* what);

// While one lives, device memory may be read and written (copies, library calls).
struct DeviceAccess {
    DeviceAccess();
    ~DeviceAccess();
};

// The write-set check around the blocks of a launch: begin; for each block, block_begin and block_end; end.
void writes_begin();
void block_begin();
void block_end(uint64_t block, dim3 index);
void writes_end();

// ---- streams ------------------------------------------------------------------------------------------------------------

// What work touches, where that is known.
struct Touched {
    const void* p;
    size_t bytes;
    bool writes;
};
// Queues work on a stream; it runs when options().streams says so.
void enqueue(cudaStream_t stream, std::function<void()> work, const char* what = "", std::initializer_list<Touched> touched = {});
void drain_all();

// Order between streams (order.cpp). Dies when two streams touch the same bytes in no order, and one of them writes.
void check_access(cudaStream_t stream, uint64_t position, const void* p, size_t bytes, bool writes, const char* what);
void note_record(cudaEvent_t event, cudaStream_t stream, uint64_t position);
void note_wait(cudaStream_t stream, cudaEvent_t event);
void note_host_wait(cudaStream_t stream, uint64_t position);  // the host has waited for so much of a stream
void note_host_wait(cudaEvent_t event);
void forget(cudaStream_t stream);
void forget(cudaEvent_t event);

}  // namespace bam::emu
