// The functions of cuBLASLt that matmul.cu calls, taken from the library when the first is called: a program that uses no GPU neither
// needs the library nor spends 0.1 s and 200 MB on it.
#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "check.h"

namespace bam {
namespace {

void* library() {
    static void* const opened = [] {
        const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
        void* p = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!p) throw Error(kExitFailure, std::string("cuBLASLt: ") + dlerror() + "; add its directory to LD_LIBRARY_PATH, or use --device cpu");
        return p;
    }();
    return opened;
}

template <typename Function>
Function* find(const char* name) {
    void* p = dlsym(library(), name);
    if (!p) throw Error(kExitFailure, std::string("cuBLASLt: ") + dlerror());
    return reinterpret_cast<Function*>(p);
}

}  // namespace
}  // namespace bam

#define FORWARD(result, name, parameters, arguments)                        \
    result name parameters {                                                \
        static auto* const function = bam::find<decltype(name)>(#name);     \
        return function arguments;                                          \
    }

extern "C" {

FORWARD(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * h), (h))
FORWARD(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t h), (h))
FORWARD(size_t, cublasLtGetVersion, (), ())
FORWARD(const char*, cublasLtGetStatusString, (cublasStatus_t s), (s))
FORWARD(cublasStatus_t, cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t * d, cublasComputeType_t c, cudaDataType_t t), (d, c, t))
FORWARD(cublasStatus_t, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t d), (d))
FORWARD(cublasStatus_t, cublasLtMatmulDescSetAttribute, (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void* v, size_t n), (d, a, v, n))
FORWARD(cublasStatus_t, cublasLtMatrixLayoutCreate, (cublasLtMatrixLayout_t * l, cudaDataType t, uint64_t r, uint64_t c, int64_t ld), (l, t, r, c, ld))
FORWARD(cublasStatus_t, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t l), (l))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * p), (p))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t p), (p))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,
        (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void* v, size_t n), (p, a, v, n))
FORWARD(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,
        (cublasLtHandle_t h, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
         cublasLtMatmulPreference_t p, int wanted, cublasLtMatmulHeuristicResult_t* results, int* found),
        (h, o, a, b, c, d, p, wanted, results, found))
FORWARD(cublasStatus_t, cublasLtMatmul,
        (cublasLtHandle_t h, cublasLtMatmulDesc_t o, const void* alpha, const void* A, cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b,
         const void* beta, const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algorithm,
         void* workspace, size_t bytes, cudaStream_t stream),
        (h, o, alpha, A, a, B, b, beta, C, c, D, d, algorithm, workspace, bytes, stream))

}  // extern "C"
