// Choosing where and in which number format a command runs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "backend.h"

namespace bam {

// "cpu", "cuda" or "auto": cuda where the build has it and the machine has a GPU; one that cannot be used is an error, not a reason to
// train slowly. threads 0: all the process may use.
std::unique_ptr<Backend> open_device(const std::string& device, int threads);

// "fp32", "bf16" or "auto" (bf16 where the hardware multiplies it).
DType choose_dtype(const std::string& dtype, const Backend& device);

// Processors this process may run on.
int usable_threads();

// Room for a tensor's values on the host: the tensor's own memory if the host reaches it, else a copy that download()
// fills from there and upload() brings back.
class HostRoom {
public:
    HostRoom(Backend& device, Tensor t);
    float* data() { return data_; }
    void download();
    void upload();

private:
    Backend& device_;
    Tensor tensor_;
    std::vector<float> copy_;
    float* data_;
};

// A tensor's values where the host can read them.
class HostCopy : public HostRoom {
public:
    HostCopy(Backend& device, Tensor t) : HostRoom(device, t) { download(); }
};

std::string human_bytes(double bytes);  // "5.1 GiB"
std::string human_count(double n);      // "121 M"
std::string human_flops(double rate);   // "162 GFLOP/s"

}  // namespace bam
