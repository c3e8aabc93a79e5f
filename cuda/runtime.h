// CUDA's error codes as exceptions with one line of text.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "check.h"

namespace bam {

inline void cuda_check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    throw Error(kExitFailure, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

}  // namespace bam
