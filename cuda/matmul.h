// The one matmul: cuBLASLt with cached heuristics, fp32 accumulation, no TF32 and no partial sums in bf16.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/backend.h"
#include "cuda/memory.h"

struct cublasLtContext;

namespace bam {

class CudaMatmul {
public:
    explicit CudaMatmul(cudaStream_t stream);
    ~CudaMatmul();
    CudaMatmul(const CudaMatmul&) = delete;

    static std::string version();
    int bind(Tensor master, DType compute, bool keep_copy);
    void refresh();
    static int64_t weight_bytes(int64_t out, int64_t in, DType compute);
    void forward(Tensor y, Tensor x, int id);
    void backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, int id);
    double measure(DType compute);

private:
    struct Weight {
        Tensor master;
        DType compute;
        bool keep_copy;
        DeviceBuffer copy;  // bf16 (out, in)
    };
    // Column-major C (m, n) {=, +=} op(A) (m, k) op(B) (k, n); leading dimensions are those of dense matrices.
    struct Product {
        int64_t m, n, k;
        bool transpose_a, transpose_b, accumulate;
        DType in, out;
    };
    struct Plan;

    void multiply(const Product& p, void* c, const void* a, const void* b);
    void multiply_plainly(const Product& p, void* c, const void* a, const void* b);
    const Plan& plan(const Product& p, const void* a, const void* b, const void* c);
    const void* used(Weight& w);
    void convert(const Weight& w, DeviceBuffer& copy);

    cudaStream_t stream_;
    cublasLtContext* handle_ = nullptr;
    DeviceBuffer workspace_, made_copy_;
    std::vector<Weight> weights_;
    std::map<std::string, std::unique_ptr<Plan>> plans_;
};

}  // namespace bam
