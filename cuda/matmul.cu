#include "cuda/matmul.h"

#include <cublasLt.h>

#include <tuple>

#include "cuda/kernel.h"

namespace bam {

namespace {

constexpr int64_t kWorkspaceBytes = kEmulated ? 64 << 10 : 32 << 20;

void check(cublasStatus_t s, const char* what) {
    if (s != CUBLAS_STATUS_SUCCESS) throw Error(kExitFailure, std::string("cuBLASLt: ") + what + ": " + cublasLtGetStatusString(s));
}

cudaDataType type_of(DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// The largest power of two, up to 256, that divides an address.
uint32_t alignment_of(const void* p) {
    uint32_t a = 256;
    while (reinterpret_cast<uintptr_t>(p) % a) a /= 2;
    return a;
}

__global__ void __launch_bounds__(256) to_bf16_kernel(Bf16* y, const float* x, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) store(y + i, x[i]);
}

// Noise in [-1, 1): a GPU multiplies zeros faster than data.
template <typename T>
__global__ void __launch_bounds__(256) noise_kernel(T* x, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) {
        uint32_t h = uint32_t(i) * 2654435761u;
        h = (h ^ (h >> 15)) * 2246822519u;
        store(x + i, float(int32_t(h ^ (h >> 13))) * 0x1p-31f);
    }
}

// The product itself, for the shapes that cuBLASLt refuses (rows of 2 bytes' alignment): column-major, operands (rows, columns) as stored.
struct PlainProduct {
    const void *a, *b;
    void* c;
    int64_t m, n, k, a_row, a_column, b_row, b_column;  // strides of op(A) and op(B) in elements
    bool accumulate;
};
constexpr int kSide = 16;
template <typename In, typename Out>
__global__ void __launch_bounds__(kSide * kSide) plain_product_kernel(PlainProduct p) {
    __shared__ float a[kSide][kSide + 1], b[kSide][kSide + 1];
    const int x = int(threadIdx.x % kSide), y = int(threadIdx.x / kSide);
    const int64_t row = int64_t(blockIdx.x) * kSide + x, column = int64_t(blockIdx.y) * kSide + y;
    float sum = 0;
    for (int64_t first = 0; first < p.k; first += kSide) {
        const bool in_a = row < p.m && first + y < p.k, in_b = column < p.n && first + x < p.k;
        a[y][x] = in_a ? load(static_cast<const In*>(p.a) + row * p.a_row + (first + y) * p.a_column) : 0.0f;
        b[y][x] = in_b ? load(static_cast<const In*>(p.b) + (first + x) * p.b_row + column * p.b_column) : 0.0f;
        __syncthreads();
        for (int i = 0; i < kSide; ++i) sum = fmaf(a[i][x], b[y][i], sum);
        __syncthreads();
    }
    if (row >= p.m || column >= p.n) return;
    Out* c = static_cast<Out*>(p.c) + column * p.m + row;
    store(c, p.accumulate ? load(c) + sum : sum);
}

}  // namespace

struct CudaMatmul::Plan {
    bool plain = false;  // cuBLASLt has no algorithm
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    float beta = 0;
    Plan() = default;
    Plan(const Plan&) = delete;
    ~Plan() {
        if (operation) cublasLtMatmulDescDestroy(operation);
        for (cublasLtMatrixLayout_t l : {a, b, c})
            if (l) cublasLtMatrixLayoutDestroy(l);
    }
};

CudaMatmul::CudaMatmul(cudaStream_t stream) : stream_(stream) {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    workspace_.room<char>(kWorkspaceBytes);
}

CudaMatmul::~CudaMatmul() { cublasLtDestroy(handle_); }

std::string CudaMatmul::version() {
    const size_t v = cublasLtGetVersion();
    return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

const CudaMatmul::Plan& CudaMatmul::plan(const Product& p, const void* a, const void* b, const void* c) {
    const uint32_t align_a = alignment_of(a), align_b = alignment_of(b), align_c = alignment_of(c);
    std::string key;
    for (int64_t x : {p.m, p.n, p.k, int64_t(p.transpose_a), int64_t(p.transpose_b), int64_t(p.accumulate), int64_t(p.in), int64_t(p.out),
                      int64_t(align_a), int64_t(align_b), int64_t(align_c)})
        key += std::to_string(x) + " ";
    std::unique_ptr<Plan>& slot = plans_[key];
    if (slot) return *slot;
    auto plan = std::make_unique<Plan>();
    plan->beta = p.accumulate ? 1.0f : 0.0f;
    check(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    const cublasOperation_t op_a = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a), "transa");
    check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b), "transb");
    const auto layout = [](cublasLtMatrixLayout_t* l, DType t, int64_t rows, int64_t columns) {
        check(cublasLtMatrixLayoutCreate(l, type_of(t), uint64_t(rows), uint64_t(columns), rows), "cublasLtMatrixLayoutCreate");
    };
    layout(&plan->a, p.in, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k);
    layout(&plan->b, p.in, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n);
    layout(&plan->c, p.out, p.m, p.n);

    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "preference");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(kWorkspaceBytes));
    // Sums of parts of k only in fp32, in the workspace: never in a bf16 result.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_c);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_c);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(handle_, plan->operation, plan->a, plan->b, plan->c, plan->c, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    plan->plain = s != CUBLAS_STATUS_SUCCESS || found == 0;
    plan->algorithm = result.algo;
    return *(slot = std::move(plan));
}

void CudaMatmul::multiply(const Product& p, void* c, const void* a, const void* b) {
    if (p.m == 0 || p.n == 0) return;
    const Plan& plan = this->plan(p, a, b, c);
    if (plan.plain) return multiply_plainly(p, c, a, b);
    const float one = 1;
    check(cublasLtMatmul(handle_, plan.operation, &one, a, plan.a, b, plan.b, &plan.beta, c, plan.c, c, plan.c, &plan.algorithm,
                         workspace_.room<char>(kWorkspaceBytes), size_t(kWorkspaceBytes), stream_),
          "cublasLtMatmul");
}

void CudaMatmul::multiply_plainly(const Product& p, void* c, const void* a, const void* b) {
    const PlainProduct q{a, b, c, p.m, p.n, p.k, p.transpose_a ? p.k : 1, p.transpose_a ? 1 : p.m, p.transpose_b ? p.n : 1, p.transpose_b ? 1 : p.k,
                         p.accumulate};
    dispatch(p.in, [&](auto in) {
        dispatch(p.out, [&](auto out) {
            launch(plain_product_kernel<decltype(in), decltype(out)>, dim3(blocks_for(p.m, kSide), blocks_for(p.n, kSide)), kSide * kSide, 0, stream_, q);
        });
    });
}

// ---- weights ------------------------------------------------------------------------------------------------------------

int CudaMatmul::bind(Tensor master, DType compute, bool keep_copy) {
    weights_.push_back({master, compute, keep_copy && compute == DType::bf16, {}});
    Weight& w = weights_.back();
    if (w.keep_copy) convert(w, w.copy);
    return int(weights_.size()) - 1;
}

void CudaMatmul::refresh() {
    for (Weight& w : weights_)
        if (w.keep_copy) convert(w, w.copy);
}

void CudaMatmul::convert(const Weight& w, DeviceBuffer& copy) {
    const int64_t n = w.master.numel();
    launch(to_bf16_kernel, blocks_for(n, 256), 256, 0, stream_, copy.room<Bf16>(n), w.master.as<float>(), n);
}

const void* CudaMatmul::used(Weight& w) {
    if (w.compute == DType::f32) return w.master.data;
    DeviceBuffer& copy = w.keep_copy ? w.copy : made_copy_;
    if (!w.keep_copy) convert(w, copy);
    return copy.room<Bf16>(w.master.numel());
}

int64_t CudaMatmul::weight_bytes(int64_t out, int64_t in, DType compute) { return compute == DType::f32 ? 0 : out * in * 2; }

// Row-major matrices are their transposes in cuBLASLt's column-major view.
void CudaMatmul::forward(Tensor y, Tensor x, int id) {
    Weight& w = weights_[size_t(id)];
    const int64_t out = w.master.shape[0], in = w.master.shape[1], N = x.numel() / in;
    multiply({out, N, in, true, false, false, w.compute, y.dtype}, y.data, used(w), x.data);
}

void CudaMatmul::backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, int id) {
    Weight& w = weights_[size_t(id)];
    const int64_t out = w.master.shape[0], in = w.master.shape[1], N = dy.numel() / out;
    if (dx) multiply({in, N, out, false, false, false, w.compute, dx.dtype}, dx.data, used(w), dy.data);
    if (dw) multiply({in, out, N, false, true, true, w.compute, DType::f32}, dw.data, x.data, dy.data);
}

double CudaMatmul::measure(DType compute) {
    const int64_t n = kEmulated ? 96 : 8192;
    DeviceBuffer memory[3];
    void* matrix[3];
    for (int i = 0; i < 3; ++i) {
        matrix[i] = memory[i].room<char>(n * n * size_of(compute));
        dispatch(compute, [&](auto tag) {
            launch(noise_kernel<decltype(tag)>, blocks_for(n * n, 256), 256, 0, stream_, static_cast<decltype(tag)*>(matrix[i]), n * n);
        });
    }
    Event begin, end;
    std::vector<float> ms;
    for (int i = 0; i < 13; ++i) {
        cuda_check(cudaEventRecord(begin, stream_), "cudaEventRecord");
        multiply({n, n, n, true, false, false, compute, compute}, matrix[0], matrix[1], matrix[2]);
        cuda_check(cudaEventRecord(end, stream_), "cudaEventRecord");
        cuda_check(cudaEventSynchronize(end), "cudaEventSynchronize");
        float t = 0;
        cuda_check(cudaEventElapsedTime(&t, begin, end), "cudaEventElapsedTime");
        if (i >= 3) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    return 2.0 * double(n) * double(n) * double(n) / ((ms[4] + ms[5]) / 2 * 1e-3);
}

}  // namespace bam
