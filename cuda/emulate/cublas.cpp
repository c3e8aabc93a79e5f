// Stand-ins for the part of cuBLASLt that matmul.cu uses, with the real prototypes, stricter than the library: only the attributes and
// type rows we mean to use, fp32 accumulation without TF32 or partial sums in bf16, promised alignments kept, the workspace overwritten.
#include <cublasLt.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda/emulate/parts.h"

using namespace bam::emu;

namespace {

struct Operation {
    cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
};

struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
    size_t bytes() const { return (size_t(ld) * (columns - 1) + rows) * element(); }
    size_t element() const { return type == CUDA_R_32F ? 4 : 2; }
};

struct Preference {
    uint64_t workspace = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment[4] = {256, 256, 256, 256};  // A, B, C, D
};

// What an algorithm was chosen for; kept in the algorithm's opaque words.
struct Chosen {
    uint64_t m, n, k;
    uint32_t alignment[4];
    uint64_t workspace;
    uint64_t types;
};
static_assert(sizeof(Chosen) <= sizeof(cublasLtMatmulAlgo_t));

uint64_t types_of(const Layout& a, const Layout& b, const Layout& c) { return uint64_t(a.type) | uint64_t(b.type) << 8 | uint64_t(c.type) << 16; }

Chosen shape_of(const Operation& o, const Layout& a, const Layout& b, const Layout& c) {
    const uint64_t m = o.a == CUBLAS_OP_N ? a.rows : a.columns, k = o.a == CUBLAS_OP_N ? a.columns : a.rows;
    const uint64_t n = o.b == CUBLAS_OP_N ? b.columns : b.rows, kb = o.b == CUBLAS_OP_N ? b.rows : b.columns;
    if (k != kb || c.rows != m || c.columns != n) die("cuBLASLt: layouts of %lux%lu, %lux%lu and %lux%lu do not fit", a.rows, a.columns, b.rows, b.columns, c.rows, c.columns);
    const bool bf16 = a.type == CUDA_R_16BF && b.type == CUDA_R_16BF && (c.type == CUDA_R_16BF || c.type == CUDA_R_32F);
    const bool fp32 = a.type == CUDA_R_32F && b.type == CUDA_R_32F && c.type == CUDA_R_32F;
    if (!bf16 && !fp32) die("cuBLASLt: types %d, %d and %d are no row of its table", a.type, b.type, c.type);
    return {m, n, k, {}, 0, types_of(a, b, c)};
}

float value(const void* p, int64_t i, cudaDataType t) {
    if (t == CUDA_R_32F) return static_cast<const float*>(p)[i];
    return __builtin_bit_cast(float, uint32_t(static_cast<const uint16_t*>(p)[i]) << 16);
}

// The matrix as (rows of `inner`) x (contiguous `outer`) fp32.
std::vector<float> unpack(const void* p, const Layout& l, bool transposed) {
    const int64_t rows = int64_t(l.rows), columns = int64_t(l.columns);
    std::vector<float> out(size_t(rows * columns));
    for (int64_t c = 0; c < columns; ++c)
        for (int64_t r = 0; r < rows; ++r) out[size_t(transposed ? r * columns + c : c * rows + r)] = value(p, c * l.ld + r, l.type);
    return out;
}

void multiply(const Operation& o, const Chosen& s, float alpha, const void* a, const Layout& la, const void* b, const Layout& lb, float beta, void* c, const Layout& lc) {
    const std::vector<float> A = unpack(a, la, o.a != CUBLAS_OP_N);  // (k, m)
    const std::vector<float> B = unpack(b, lb, o.b != CUBLAS_OP_N);  // (n, k)
    const int64_t m = int64_t(s.m), n = int64_t(s.n), k = int64_t(s.k);
    std::vector<float> sum(static_cast<size_t>(m));
    for (int64_t j = 0; j < n; ++j) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t p = 0; p < k; ++p) {
            const float x = B[size_t(j * k + p)], *row = A.data() + p * m;
            for (int64_t i = 0; i < m; ++i) sum[size_t(i)] += x * row[i];
        }
        for (int64_t i = 0; i < m; ++i) {
            const float y = alpha * sum[size_t(i)] + (beta == 0 ? 0 : beta * value(c, j * lc.ld + i, lc.type));
            if (lc.type == CUDA_R_32F) static_cast<float*>(c)[j * lc.ld + i] = y;
            else static_cast<uint16_t*>(c)[j * lc.ld + i] = __builtin_bit_cast(uint16_t, __float2bfloat16(y));
        }
    }
}

void check_operand(const char* name, const void* p, const Layout& l, uint32_t alignment) {
    const std::string what = std::string("cublasLtMatmul: ") + name;
    check_device_range(p, l.bytes(), what.c_str());
    if (reinterpret_cast<uintptr_t>(p) % alignment) die("%s is not aligned to the %u bytes that its algorithm was promised", what.c_str(), alignment);
}

bool overlap(const void* p, size_t n, const void* q, size_t m) {
    const char *a = static_cast<const char*>(p), *b = static_cast<const char*>(q);
    return a < b + m && b < a + n;
}

}  // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) {
    *h = reinterpret_cast<cublasLtHandle_t>(new int(0));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return delete reinterpret_cast<int*>(h), CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t) { return "emulated error"; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute, cudaDataType_t scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) die("cuBLASLt: compute type %d, expected CUBLAS_COMPUTE_32F (no TF32)", compute);
    *d = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete reinterpret_cast<Operation*>(d), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes) {
    auto& o = *reinterpret_cast<Operation*>(d);
    if (attribute != CUBLASLT_MATMUL_DESC_TRANSA && attribute != CUBLASLT_MATMUL_DESC_TRANSB) die("cuBLASLt: operation attribute %d is not emulated", attribute);
    if (bytes != sizeof(cublasOperation_t)) die("cuBLASLt: operation attribute %d of %zu bytes", attribute, bytes);
    memcpy(attribute == CUBLASLT_MATMUL_DESC_TRANSA ? &o.a : &o.b, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld) {
    if (rows == 0 || columns == 0 || ld < int64_t(rows)) die("cuBLASLt: layout of %lu x %lu with leading dimension %ld", rows, columns, ld);
    *l = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, ld});
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return delete reinterpret_cast<Layout*>(l), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    *p = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return delete reinterpret_cast<Preference*>(p), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle, cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes) {
    auto& p = *reinterpret_cast<Preference*>(handle);
    void* to = nullptr;
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: to = &p.workspace; break;
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: to = &p.reductions; break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: to = &p.alignment[0]; break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: to = &p.alignment[1]; break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: to = &p.alignment[2]; break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: to = &p.alignment[3]; break;
        default: die("cuBLASLt: preference %d is not emulated", attribute);
    }
    if (bytes != (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4)) die("cuBLASLt: preference %d of %zu bytes", attribute, bytes);
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t handle, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    const auto& p = *reinterpret_cast<Preference*>(handle);
    if (c != d || wanted < 1) die("cuBLASLt: C and D are expected to be one layout");
    // As the library may, ours has no algorithm for odd rows of bf16: callers must be able to go on.
    for (cublasLtMatrixLayout_t l : {a, b, c}) {
        const Layout& layout = *reinterpret_cast<Layout*>(l);
        if (layout.element() == 2 && layout.ld % 2) return *found = 0, CUBLAS_STATUS_NOT_SUPPORTED;
    }
    Chosen chosen = shape_of(*reinterpret_cast<Operation*>(o), *reinterpret_cast<Layout*>(a), *reinterpret_cast<Layout*>(b), *reinterpret_cast<Layout*>(c));
    if (p.reductions & ~uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) die("cuBLASLt: the preference allows partial sums in the output type");
    memcpy(chosen.alignment, p.alignment, sizeof p.alignment);
    chosen.workspace = p.workspace;
    results[0] = {};
    memcpy(&results[0].algo, &chosen, sizeof chosen);
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t o, const void* alpha, const void* a, cublasLtMatrixLayout_t la, const void* b,
                              cublasLtMatrixLayout_t lb, const void* beta, const void* c, cublasLtMatrixLayout_t lc, void* d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    const Operation operation = *reinterpret_cast<Operation*>(o);
    const Layout A = *reinterpret_cast<Layout*>(la), B = *reinterpret_cast<Layout*>(lb), C = *reinterpret_cast<Layout*>(lc);
    const Chosen shape = shape_of(operation, A, B, C);
    Chosen chosen;
    if (!algo) die("cublasLtMatmul: no algorithm: heuristics are asked once and kept");
    memcpy(&chosen, algo, sizeof chosen);
    if (chosen.m != shape.m || chosen.n != shape.n || chosen.k != shape.k || chosen.types != shape.types) die("cublasLtMatmul: the algorithm was chosen for another product");
    if (c != d || lc != ld) die("cublasLtMatmul: C and D are expected to be one matrix");
    check_operand("A", a, A, chosen.alignment[0]);
    check_operand("B", b, B, chosen.alignment[1]);
    check_operand("C", c, C, std::max(chosen.alignment[2], chosen.alignment[3]));
    if (overlap(d, C.bytes(), a, A.bytes()) || overlap(d, C.bytes(), b, B.bytes())) die("cublasLtMatmul: the result overlaps an operand");
    if (workspace_bytes < chosen.workspace) die("cublasLtMatmul: a workspace of %zu bytes, %lu were promised", workspace_bytes, chosen.workspace);
    check_device_range(workspace, workspace_bytes, "cublasLtMatmul: workspace");
    const float factors[2] = {*static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    enqueue(stream, [=] {
        DeviceAccess access;
        memset(workspace, 0xff, std::min<size_t>(workspace_bytes, 1 << 16));  // nothing may be kept there
        multiply(operation, shape, factors[0], a, A, b, B, factors[1], d, C);
    }, "cublasLtMatmul", {{a, A.bytes(), false}, {b, B.bytes(), false}, {d, C.bytes(), true}, {workspace, workspace_bytes, true}});
    return CUBLAS_STATUS_SUCCESS;
}
