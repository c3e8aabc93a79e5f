// Matrix products by oneDNN. Primitives are made once for each shape; operands are dense; where the library refuses
// bf16 (AVX2), operands rounded to bf16 are multiplied in fp32.
#pragma once
#include <memory>
#include <string>

#include "cpu/kernels.h"
#include "tensor.h"

namespace bam {

class Matmul {
public:
    Matmul(const Kernels& kernels, int threads);
    ~Matmul();

    int bind(Tensor master, DType compute, bool keep_copies);
    void refresh();
    int64_t weight_bytes(int64_t out, int64_t in, DType compute) const;  // of the copies
    void forward(Tensor y, Tensor x, int w);                          // y = x W^T
    void backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, int w);  // dx = dy W, dw += dy^T x

    bool fast_bf16() const;                           // the machine multiplies bf16 itself
    double measure(DType compute);                    // FLOP/s, see Backend::measure_gemm
    std::string implementation(DType compute) const;  // oneDNN's name of what it does y = x W^T with
    static std::string version();

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace bam
