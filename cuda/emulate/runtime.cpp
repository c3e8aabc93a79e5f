// Stand-ins for the functions of cudart that the backend calls, with the real prototypes. Streams are queues: work runs only when
// somebody waits for it (EMU_STREAMS=lazy), at once (eager), or at random between, so an order that no event asks for is not kept.
// Misuse that a real GPU lets pass, or answers with garbage, stops with a message.
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda/emulate/parts.h"

namespace {

using bam::emu::die;
using Clock = std::chrono::steady_clock;

}  // namespace

// CUDA's opaque handles.
struct CUstream_st {
    std::deque<std::function<void()>> queue;
    uint64_t issued = 0, done = 0;
};
struct CUevent_st {
    cudaStream_t stream = nullptr;  // of the last record, nullptr: never recorded
    uint64_t position = 0;          // done when the stream has done so many
    std::shared_ptr<Clock::time_point> time;
};

namespace bam::emu {
namespace {

struct Runtime {
    std::set<cudaStream_t> streams;
    std::set<cudaEvent_t> events;
    std::map<const char*, size_t> pinned;
    std::mt19937 random{options().seed};
};

Runtime& runtime() {
    static Runtime r;
    return r;
}

cudaStream_t check_stream(cudaStream_t s) {
    if (!s) die("the default stream is used: it orders itself against all others, so it hides missing waits");
    if (!runtime().streams.count(s)) die("a stream that does not exist is used");
    return s;
}

cudaEvent_t check_event(cudaEvent_t e) {
    if (!e || !runtime().events.count(e)) die("an event that does not exist is used");
    return e;
}

void run_until(cudaStream_t s, uint64_t position) {
    while (s->done < position) {
        auto work = std::move(s->queue.front());
        s->queue.pop_front();
        work();
        ++s->done;
    }
}

void host_wait(cudaStream_t s) {
    run_until(s, s->issued);
    note_host_wait(s, s->issued);
}

// Runs some pending work of random streams.
void run_some() {
    Runtime& r = runtime();
    for (auto n = r.random() % 4; n > 0; --n) {
        auto it = r.streams.begin();
        std::advance(it, r.random() % r.streams.size());
        if ((*it)->done < (*it)->issued) run_until(*it, (*it)->done + 1);
    }
}

// The start and size of the pinned block that holds p, or nullptr.
const char* pinned_block(const void* p, size_t* bytes) {
    const char* c = static_cast<const char*>(p);
    auto it = runtime().pinned.upper_bound(c);
    if (it == runtime().pinned.begin()) return nullptr;
    --it;
    *bytes = it->second;
    return c < it->first + it->second ? it->first : nullptr;
}

bool is_pinned(const void* p, size_t n, const char* what) {
    size_t bytes;
    const char* start = pinned_block(p, &bytes);
    if (start && static_cast<const char*>(p) + n > start + bytes) die("%s: %zu bytes at %p leave the pinned host memory", what, n, p);
    return start != nullptr;
}

uint64_t checksum(const void* p, size_t n) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < n; ++i) h = (h ^ static_cast<const unsigned char*>(p)[i]) * 0x100000001b3ull;
    return h;
}

void copy_to_device(void* dst, const void* src, size_t n, cudaStream_t s) {
    check_device_range(dst, n, "cudaMemcpyAsync to the device");
    if (is_pinned(src, n, "cudaMemcpyAsync to the device")) {
        enqueue(s, [=, sum = checksum(src, n)] {
            if (checksum(src, n) != sum) die("pinned memory at %p was written before the copy of its %zu bytes to the device had run", src, n);
            DeviceAccess access;
            memcpy(dst, src, n);
        }, "cudaMemcpyAsync to the device", {{dst, n, true}});
    } else {  // pageable memory is staged: the caller may reuse it at once
        const char* bytes = static_cast<const char*>(src);
        enqueue(s, [=, staged = std::vector<char>(bytes, bytes + n)] {
            DeviceAccess access;
            memcpy(dst, staged.data(), n);
        }, "cudaMemcpyAsync to the device", {{dst, n, true}});
    }
}

void copy_to_host(void* dst, const void* src, size_t n, cudaStream_t s) {
    check_device_range(src, n, "cudaMemcpyAsync to the host");
    const bool pinned = is_pinned(dst, n, "cudaMemcpyAsync to the host");
    if (pinned) memset(dst, 0xff, n);  // who reads before waiting gets NaN
    enqueue(s, [=] {
        DeviceAccess access;
        memcpy(dst, src, n);
    }, "cudaMemcpyAsync to the host", {{src, n, false}});
    if (!pinned) host_wait(s);
}

}  // namespace

void enqueue(cudaStream_t s, std::function<void()> work, const char* what, std::initializer_list<Touched> touched) {
    check_stream(s);
    for (const Touched& t : touched) check_access(s, s->issued + 1, t.p, t.bytes, t.writes, what);
    s->queue.push_back(std::move(work));
    ++s->issued;
    if (options().streams == Streams::eager) run_until(s, s->issued);
    if (options().streams == Streams::random) run_some();
}

void drain_all() {
    for (cudaStream_t s : runtime().streams) host_wait(s);
}

void enqueue_launch(cudaStream_t s, const LaunchShape& shape, std::function<void()> thread_body) {
    enqueue(s, [shape, body = std::move(thread_body)] { run_grid(shape, body); });
}

}  // namespace bam::emu

using namespace bam::emu;

// ---- devices ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* n) {
    *n = options().arch ? 1 : 0;
    return options().arch ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    *p = {};
    strcpy(p->name, "emulated on the CPU");
    p->major = options().arch / 10;
    p->minor = options().arch % 10;
    p->multiProcessorCount = 2;
    p->warpSize = 32;
    p->totalGlobalMem = size_t(options().memory);
    p->sharedMemPerBlockOptin = options().arch == 80 ? 166912 : 232448;
    p->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    *total = size_t(options().memory);
    *free_bytes = *total - device_bytes_in_use();
    return cudaSuccess;
}

// Kernels are made for sm_80 and newer.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return options().arch < 80 ? cudaErrorNoKernelImageForDevice : cudaSuccess; }

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
        default: return "emulated error";
    }
}
cudaError_t cudaDeviceSynchronize() { return drain_all(), cudaSuccess; }

// ---- memory -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
    *p = device_allocate(bytes);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void* p) {
    drain_all();  // as CUDA does: it waits for the device
    if (p && !device_release(p)) die("cudaFree: %p is not a live allocation", p);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
    *p = aligned_alloc(4096, (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096);
    if (!*p) return cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);
    runtime().pinned[static_cast<char*>(*p)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }

cudaError_t cudaFreeHost(void* p) {
    drain_all();
    if (p && !runtime().pinned.erase(static_cast<char*>(p))) die("cudaFreeHost: %p is not pinned memory", p);
    free(p);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind kind, cudaStream_t s) {
    check_stream(s);
    switch (kind) {
        case cudaMemcpyHostToDevice: copy_to_device(dst, src, n, s); break;
        case cudaMemcpyDeviceToHost: copy_to_host(dst, src, n, s); break;
        case cudaMemcpyDeviceToDevice:
            check_device_range(dst, n, "cudaMemcpyAsync on the device");
            check_device_range(src, n, "cudaMemcpyAsync on the device");
            if (dst < static_cast<const char*>(src) + n && src < static_cast<char*>(dst) + n && n) die("cudaMemcpyAsync: source and destination overlap");
            enqueue(s, [=] {
                DeviceAccess access;
                memcpy(dst, src, n);
            }, "cudaMemcpyAsync on the device", {{dst, n, true}, {src, n, false}});
            break;
        default: die("cudaMemcpyAsync: say in which direction");
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
    check_device_range(p, n, "cudaMemsetAsync");
    enqueue(s, [=] {
        DeviceAccess access;
        memset(p, value, n);
    }, "cudaMemsetAsync", {{p, n, true}});
    return cudaSuccess;
}

// ---- streams and events -------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    if (flags != cudaStreamNonBlocking) die("cudaStreamCreateWithFlags: streams are created with cudaStreamNonBlocking");
    runtime().streams.insert(*s = new CUstream_st);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
    host_wait(check_stream(s));
    forget(s);
    runtime().streams.erase(s);
    delete s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) { return host_wait(check_stream(s)), cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    runtime().events.insert(*e = new CUevent_st);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
    runtime().events.erase(check_event(e));
    forget(e);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    check_event(e)->stream = check_stream(s);
    e->time = std::make_shared<Clock::time_point>();
    e->position = s->issued + 1;
    note_record(e, s, e->position);
    enqueue(s, [time = e->time] { *time = Clock::now(); });
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    check_event(e);
    if (!e->stream) die("cudaStreamWaitEvent: the event was never recorded, so nothing is waited for");
    note_wait(s, e);
    enqueue(s, [other = e->stream, position = e->position] {
        if (runtime().streams.count(other)) run_until(other, position);
    });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    if (check_event(e)->stream && runtime().streams.count(e->stream)) run_until(e->stream, e->position);
    note_host_wait(e);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    for (cudaEvent_t e : {from, to})
        if (!check_event(e)->stream || (runtime().streams.count(e->stream) && e->stream->done < e->position)) return cudaErrorNotReady;
    *ms = std::chrono::duration<float, std::milli>(*to->time - *from->time).count();
    return cudaSuccess;
}
