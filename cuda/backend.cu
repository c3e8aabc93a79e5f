// The device: choosing it, memory, copies, timing. Ops are in the files named after them.
#include "cuda/backend.h"

#include <cstring>

#include "cuda/kernel.h"

#ifndef BAM_CUDA_ARCH
#define BAM_CUDA_ARCH "emulated"
#endif

namespace bam {

namespace {

__global__ void __launch_bounds__(32) probe_kernel() {}

std::string compute_capability(const cudaDeviceProp& p) { return std::to_string(p.major) + "." + std::to_string(p.minor); }

// 13000 -> "13.0".
std::string version(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

// cudart says "insufficient" of a missing driver, too.
std::string reason(cudaError_t e) {
    int driver = 0;
    if (e != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess) return cudaGetErrorString(e);
    if (driver == 0) return "no NVIDIA driver is installed";
    return "the NVIDIA driver is for CUDA " + version(driver) + ", this build needs one for " + version(CUDART_VERSION);
}

// A device this build can run on, or an error that says why not and what else there is.
cudaDeviceProp open(int device) {
    const std::string instead = "; use --device cpu";
    int count = 0;
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found != cudaSuccess) throw Error(kExitFailure, "no usable GPU: " + reason(found) + instead);
    if (device >= count)
        throw Error(kExitFailure, "no GPU " + std::to_string(device) + ": there are " + std::to_string(count) + instead);
    cuda_check(cudaSetDevice(device), "cudaSetDevice");
    cudaDeviceProp p;
    cuda_check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties");
    cudaFuncAttributes attributes;
    const cudaError_t loaded = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel));
    if (loaded != cudaSuccess)
        throw Error(kExitFailure, std::string(p.name) + " has compute capability " + compute_capability(p) + ", this build is for " +
                                      BAM_CUDA_ARCH + ": build with make CUDA=on ARCH=" + std::to_string(p.major * 10 + p.minor) + instead);
    return p;
}

}  // namespace

int64_t UploadRing::slot_bytes() { return kEmulated ? 16 << 10 : 1 << 20; }

UploadRing::UploadRing() {
    cuda_check(cudaMallocHost(&pinned_, size_t(kSlots * slot_bytes())), "cudaMallocHost");
    device_.room<char>(kSlots * slot_bytes());
}

UploadRing::~UploadRing() {
    cudaStreamSynchronize(copies_);
    cudaFreeHost(pinned_);
}

void UploadRing::upload(void* dst, const void* src, int64_t n, cudaStream_t stream) {
    Slot& slot = slots_[next_];
    char* pinned = static_cast<char*>(pinned_) + next_ * slot_bytes();
    char* device = device_.room<char>(kSlots * slot_bytes()) + next_ * slot_bytes();
    const bool reused = slot.in_use;
    slot.in_use = true;
    next_ = (next_ + 1) % kSlots;
    if (reused) {
        cuda_check(cudaEventSynchronize(slot.arrived), "cudaEventSynchronize");
        cuda_check(cudaStreamWaitEvent(copies_, slot.used, 0), "cudaStreamWaitEvent");
    }
    std::memcpy(pinned, src, size_t(n));
    cuda_check(cudaMemcpyAsync(device, pinned, size_t(n), cudaMemcpyHostToDevice, copies_), "cudaMemcpyAsync");
    cuda_check(cudaEventRecord(slot.arrived, copies_), "cudaEventRecord");
    cuda_check(cudaStreamWaitEvent(stream, slot.arrived, 0), "cudaStreamWaitEvent");
    cuda_check(cudaMemcpyAsync(dst, device, size_t(n), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
    cuda_check(cudaEventRecord(slot.used, stream), "cudaEventRecord");
}

CudaBackend::CudaBackend(int device) : device_(device), properties_(open(device)), matmul_(stream_) {}
CudaBackend::~CudaBackend() { cudaStreamSynchronize(stream_); }

std::map<std::string, std::string> CudaBackend::describe() const {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    return {{"gpu", properties_.name},
            {"compute capability", compute_capability(properties_)},
            {"multiprocessors", std::to_string(properties_.multiProcessorCount)},
            {"built for", BAM_CUDA_ARCH},
            {"driver", version(driver)},
            {"runtime", version(runtime)},
            {"cuBLASLt", CudaMatmul::version()}};
}

int64_t CudaBackend::used_memory() const {
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    return int64_t(total - free_bytes);
}

void* CudaBackend::allocate(int64_t bytes) {
    void* p = nullptr;
    const cudaError_t s = cudaMalloc(&p, size_t(std::max<int64_t>(bytes, 1)));
    if (s == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // forget it: the caller may go on with less
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        throw Error(kExitFailure, std::string("out of memory on ") + properties_.name + ": " + std::to_string(bytes) + " bytes wanted, " +
                                      std::to_string(free_bytes) + " of " + std::to_string(total) + " free");
    }
    cuda_check(s, "cudaMalloc");
    return p;
}

void CudaBackend::release(void* p) { cudaFree(p); }

void CudaBackend::upload(Tensor dst, const void* src) {
    const int64_t n = dst.bytes();
    if (n == 0) return;
    if (n <= UploadRing::slot_bytes()) return uploads_.upload(dst.data, src, n, stream_);
    cuda_check(cudaMemcpyAsync(dst.data, src, size_t(n), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    synchronize();
}

void CudaBackend::download(void* dst, Tensor src) {
    cuda_check(cudaMemcpyAsync(dst, src.data, size_t(src.bytes()), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    synchronize();
}

void CudaBackend::copy(Tensor dst, Tensor src) {
    Timed t(*this, "copy");
    cuda_check(cudaMemcpyAsync(dst.data, src.data, size_t(dst.bytes()), cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
}

void CudaBackend::zero(Tensor x) {
    Timed t(*this, "zero");
    cuda_check(cudaMemsetAsync(x.data, 0, size_t(x.bytes()), stream_), "cudaMemsetAsync");
}

void CudaBackend::synchronize() { cuda_check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

// ---- matmul -------------------------------------------------------------------------------------------------------------

WeightId CudaBackend::bind_weight(Tensor master, DType compute, bool keep_copies) { return matmul_.bind(master, compute, keep_copies); }

void CudaBackend::refresh_weights() {
    Timed t(*this, "refresh_weights");
    matmul_.refresh();
}

int64_t CudaBackend::weight_bytes(int64_t out, int64_t in, DType compute) const { return CudaMatmul::weight_bytes(out, in, compute); }

void CudaBackend::matmul_forward(Tensor y, Tensor x, WeightId w) {
    Timed t(*this, "matmul_forward");
    matmul_.forward(y, x, w);
}

void CudaBackend::matmul_backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, WeightId w) {
    Timed t(*this, "matmul_backward");
    matmul_.backward(dx, dw, dy, x, w);
}

double CudaBackend::measure_gemm(DType compute) { return matmul_.measure(compute); }

// ---- timing -------------------------------------------------------------------------------------------------------------

CudaBackend::Timed::Timed(CudaBackend& b, const char* op) : b_(b), on_(b.profiling_) {
    if (!on_) return;
    if (b.spans_.size() >= 4096) b.collect_spans();
    b.spans_.push_back({op, Event(), Event()});
    cudaEventRecord(b.spans_.back().begin, b.stream_);
}

CudaBackend::Timed::~Timed() {
    if (on_) cudaEventRecord(b_.spans_.back().end, b_.stream_);
}

void CudaBackend::collect_spans() {
    synchronize();
    for (const Span& s : spans_) {
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, s.begin, s.end), "cudaEventElapsedTime");
        seconds_[s.op] += ms * 1e-3;
    }
    spans_.clear();
}

void CudaBackend::profile(bool on) {
    collect_spans();
    if (on) seconds_.clear();
    profiling_ = on;
}

std::map<std::string, double> CudaBackend::profile_seconds() {
    collect_spans();
    return seconds_;
}

bool has_gpu() {
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return false;
    return cudaGetDeviceCount(&count) != cudaErrorNoDevice;
}

std::unique_ptr<Backend> make_cuda_backend(int device) { return std::make_unique<CudaBackend>(device); }

}  // namespace bam
