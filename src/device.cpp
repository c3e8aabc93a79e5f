#include "device.h"

#include <sched.h>

#include <cstdio>

#include "check.h"

namespace bam {

std::unique_ptr<Backend> open_device(const std::string& device, int threads) {
    if (device == "cpu") return make_cpu_backend(threads);
    if (device == "cuda") return make_cuda_backend(0);
    if (device != "auto") throw Error(kExitUsage, "device '" + device + "', expected auto, cpu or cuda");
    return has_gpu() ? make_cuda_backend(0) : make_cpu_backend(threads);
}

DType choose_dtype(const std::string& dtype, const Backend& device) {
    if (dtype == "fp32") return DType::f32;
    if (dtype == "bf16") return DType::bf16;
    if (dtype != "auto") throw Error(kExitUsage, "dtype '" + dtype + "', expected auto, fp32 or bf16");
    return device.fast_bf16() ? DType::bf16 : DType::f32;
}

int usable_threads() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

HostRoom::HostRoom(Backend& device, Tensor t) : device_(device), tensor_(t) {
    if (device.host_memory()) {
        data_ = t.as<float>();
    } else {
        copy_.resize(t.numel());
        data_ = copy_.data();
    }
}

void HostRoom::download() {
    data_ == tensor_.data ? device_.synchronize() : device_.download(data_, tensor_);
}

void HostRoom::upload() {
    if (data_ != tensor_.data) device_.upload(tensor_, data_);
}

static std::string scaled(double x, double base, const char* const units[], int n) {
    int u = 0;
    while (x >= base && u + 1 < n) x /= base, ++u;
    char text[32];
    std::snprintf(text, sizeof text, x < 10 && u > 0 ? "%.2f %s" : x < 100 && u > 0 ? "%.1f %s" : "%.0f %s", x, units[u]);
    return text;
}

std::string human_bytes(double bytes) {
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    return scaled(bytes, 1024, units, 5);
}

std::string human_count(double n) {
    constexpr const char* units[] = {"", "k", "M", "B", "T"};
    return scaled(n, 1000, units, 5);
}

std::string human_flops(double rate) {
    constexpr const char* units[] = {"FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"};
    return scaled(rate, 1000, units, 6);
}

}  // namespace bam
