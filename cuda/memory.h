// Owners of CUDA memory, streams and events.
#pragma once
#include <algorithm>

#include "cuda/runtime.h"

namespace bam {

// Device memory that grows and forgets; growing waits for the device.
class DeviceBuffer {
public:
    DeviceBuffer() = default;
    ~DeviceBuffer() { cudaFree(data_); }
    DeviceBuffer(DeviceBuffer&& o) noexcept { *this = std::move(o); }
    DeviceBuffer& operator=(DeviceBuffer&& o) noexcept {
        std::swap(data_, o.data_);
        std::swap(bytes_, o.bytes_);
        return *this;
    }

    // Room for n elements; contents undefined.
    template <typename T>
    T* room(int64_t n) {
        const size_t bytes = size_t(n) * sizeof(T);
        if (bytes > bytes_) {
            cuda_check(cudaFree(data_), "cudaFree");
            data_ = nullptr, bytes_ = 0;
            cuda_check(cudaMalloc(&data_, bytes), "cudaMalloc");
            bytes_ = bytes;
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

struct Stream {
    cudaStream_t handle = nullptr;
    Stream() { cuda_check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
    ~Stream() { cudaStreamDestroy(handle); }
    Stream(const Stream&) = delete;
    operator cudaStream_t() const { return handle; }
};

struct Event {
    cudaEvent_t handle = nullptr;
    explicit Event(unsigned flags = cudaEventDefault) { cuda_check(cudaEventCreateWithFlags(&handle, flags), "cudaEventCreateWithFlags"); }
    ~Event() {
        if (handle) cudaEventDestroy(handle);
    }
    Event(Event&& o) noexcept { std::swap(handle, o.handle); }
    operator cudaEvent_t() const { return handle; }
};

// Uploads that overlap with the device's work: from pinned memory to a slot on the device by a stream of its own, from there into place
// in the order of the ops. The host goes on at once, and prepares the next batch while the step runs.
class UploadRing {
public:
    UploadRing();
    ~UploadRing();
    UploadRing(const UploadRing&) = delete;
    static int64_t slot_bytes();
    // Copies n <= slot_bytes() bytes, in order with `stream`; src may be reused at once.
    void upload(void* dst, const void* src, int64_t n, cudaStream_t stream);

private:
    struct Slot {
        Event arrived{cudaEventDisableTiming};  // on the device
        Event used{cudaEventDisableTiming};     // copied into place
        bool in_use = false;
    };
    static constexpr int kSlots = 8;
    Stream copies_;
    void* pinned_ = nullptr;
    DeviceBuffer device_;
    Slot slots_[kSlots];
    int next_ = 0;
};

}  // namespace bam
