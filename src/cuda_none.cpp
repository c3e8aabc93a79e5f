// Stands in for the CUDA backend in builds without CUDA.
#include "backend.h"
#include "check.h"

namespace bam {

bool has_gpu() { return false; }

std::unique_ptr<Backend> make_cuda_backend(int) {
    throw Error(kExitUsage, "device cuda: this build of bam has no CUDA (make CUDA=on), expected cpu");
}

}  // namespace bam
