// Memory, description, and the plain ops as loops over threads. Attention is in attention.cpp.
#include "cpu/backend.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "check.h"
#include "cpu/threads.h"

namespace bam {

using Low = uint16_t;

void* allocate_memory(int64_t bytes) {
    constexpr int64_t kHuge = 2 << 20;
    const int64_t alignment = bytes >= kHuge ? kHuge : 64;
    const int64_t size = (std::max<int64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    void* p = std::aligned_alloc(alignment, size);
    if (!p) throw Error(kExitFailure, "out of memory: " + std::to_string(bytes) + " bytes wanted");
    if (alignment == kHuge) madvise(p, size, MADV_HUGEPAGE);
    return p;
}

static bool is_low(Tensor t) {
    return t.dtype == DType::bf16;
}

// Element i of a tensor of either float type.
static void* at(Tensor t, int64_t i) {
    return t ? static_cast<char*>(t.data) + i * size_of(t.dtype) : nullptr;
}

CpuBackend::Timed::Timed(CpuBackend& b, const char* op) : b_(b), op_(op) {
#ifdef _OPENMP
    omp_set_num_threads(b.threads_);
#endif
    if (b.profiling_) begin_ = std::chrono::steady_clock::now();
}

CpuBackend::Timed::~Timed() {
    if (!b_.profiling_) return;
    const std::chrono::duration<double> d = std::chrono::steady_clock::now() - begin_;
    b_.seconds_[op_] += d.count();
}

CpuBackend::CpuBackend(int threads, const Kernels& kernels)
    : kernels_(kernels), threads_(threads > 0 ? threads : usable_threads()), matmul_(kernels_, threads_) {}

std::map<std::string, std::string> CpuBackend::describe() const {
    return {{"isa", name_of(kernels_.isa)},
            {"threads", std::to_string(threads_)},
            {"oneDNN", Matmul::version()},
            {"matmul bf16", matmul_.implementation(DType::bf16)},
            {"matmul fp32", matmul_.implementation(DType::f32)}};
}

// Of the machine, or of the container if that is less.
int64_t CpuBackend::total_memory() const {
    int64_t bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE), limit;
    if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) bytes = std::min(bytes, limit);
    return bytes;
}

int64_t CpuBackend::used_memory() const {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return int64_t(u.ru_maxrss) * 1024;
}

void* CpuBackend::allocate(int64_t bytes) {
    return allocate_memory(bytes);
}
void CpuBackend::release(void* p) {
    std::free(p);
}
void CpuBackend::upload(Tensor dst, const void* src) {
    std::memcpy(dst.data, src, dst.bytes());
}
void CpuBackend::download(void* dst, Tensor src) {
    std::memcpy(dst, src.data, src.bytes());
}

void CpuBackend::copy(Tensor dst, Tensor src) {
    Timed t(*this, "copy");
    for_ranges(threads_, dst.bytes(), 1 << 16, [&](int64_t b, int64_t e) {
        std::memcpy(static_cast<char*>(dst.data) + b, static_cast<char*>(src.data) + b, e - b);
    });
}

void CpuBackend::zero(Tensor x) {
    Timed t(*this, "zero");
    for_ranges(threads_, x.bytes(), 1 << 16,
               [&](int64_t b, int64_t e) { std::memset(static_cast<char*>(x.data) + b, 0, e - b); });
}

// ---- matmul
// -----------------------------------------------------------------------------------------------------------

WeightId CpuBackend::bind_weight(Tensor master, DType compute, bool keep_copies) {
    Timed t(*this, "refresh_weights");
    return matmul_.bind(master, compute, keep_copies);
}

void CpuBackend::refresh_weights() {
    Timed t(*this, "refresh_weights");
    matmul_.refresh();
}

int64_t CpuBackend::weight_bytes(int64_t out, int64_t in, DType compute) const {
    return matmul_.weight_bytes(out, in, compute);
}

void CpuBackend::matmul_forward(Tensor y, Tensor x, WeightId w) {
    Timed t(*this, "matmul_forward");
    matmul_.forward(y, x, w);
}

void CpuBackend::matmul_backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, WeightId w) {
    Timed t(*this, "matmul_backward");
    matmul_.backward(dx, dw, dy, x, w);
}

double CpuBackend::measure_gemm(DType compute) {
    Timed t(*this, "measure_gemm");
    return matmul_.measure(compute);
}

// ---- embedding
// --------------------------------------------------------------------------------------------------------

void CpuBackend::embedding_forward(Tensor x, Tensor table, Tensor ids, Tensor added, Tensor positions) {
    Timed t(*this, "embedding_forward");
    const int64_t C = x.last();
    for_ranges(threads_, x.rows(), 64, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; ++i) {
            float* to = x.as<float>() + i * C;
            std::memcpy(to, table.as<float>() + ids.as<int32_t>()[i] * C, C * sizeof(float));
            if (added) kernels_.add(to, added.as<float>() + positions.as<int32_t>()[i] * C, C);
        }
    });
}

// Each thread adds all rows in order, but only its channels.
void CpuBackend::embedding_backward(Tensor dtable, Tensor dx, Tensor ids) {
    Timed t(*this, "embedding_backward");
    const int64_t C = dx.last(), N = dx.rows();
    for_ranges(
        threads_, C, 16,
        [&](int64_t b, int64_t e) {
            for (int64_t i = 0; i < N; ++i)
                kernels_.add(dtable.as<float>() + ids.as<int32_t>()[i] * C + b, dx.as<float>() + i * C + b, e - b);
        },
        16);
}

// ---- RMSNorm
// ----------------------------------------------------------------------------------------------------------

void CpuBackend::norm_forward(Tensor y, Tensor rstd, Tensor x_out, Tensor x_in, Tensor delta, Tensor w, float eps) {
    Timed t(*this, "norm_forward");
    const int64_t C = x_in.last();
    for_ranges(threads_, x_in.rows(), 16, [&](int64_t b, int64_t e) {
        kernels_.norm_forward(at(y, b * C), is_low(y), rstd.as<float>() + b,
                              delta ? x_out.as<float>() + b * C : nullptr, x_in.as<float>() + b * C, at(delta, b * C),
                              is_low(delta), w.as<float>(), e - b, C, eps);
    });
}

void CpuBackend::norm_backward(Tensor dx, Tensor dx_low, Tensor dw, Tensor dy, Tensor x, Tensor rstd, Tensor w) {
    Timed t(*this, "norm_backward");
    const int64_t C = x.last(), N = x.rows(), chunk = std::max<int64_t>(16, (N + 63) / 64),
                  chunks = (N + chunk - 1) / chunk;
    float* partial = scratch_.room<float>(chunks * C);  // dw of each chunk of rows
    for_parts(threads_, chunks, [&](int64_t i, int) {
        const int64_t b = i * chunk;
        std::memset(partial + i * C, 0, C * sizeof(float));
        kernels_.norm_backward({dx.as<float>() + b * C, at(dx_low, b * C), partial + i * C, at(dy, b * C), is_low(dy),
                                x.as<float>() + b * C, rstd.as<float>() + b, w.as<float>(), std::min(chunk, N - b), C});
    });
    for (int64_t i = 1; i < chunks; ++i) kernels_.add(partial, partial + i * C, C);
    kernels_.add(dw.as<float>(), partial, C);
}

// ---- RoPE and the cache
// -----------------------------------------------------------------------------------------------

void CpuBackend::rope(Tensor x, Tensor table, Tensor positions, int heads, RopeLayout layout, bool inverse) {
    const int64_t width = x.last(), D = table.last();
    check_head_size(D);
    for_ranges(threads_, x.rows(), 16, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; ++i)
            kernels_.rope(at(x, i * width), is_low(x), table.as<float>() + positions.as<int32_t>()[i] * D, heads,
                          int(D), layout == RopeLayout::half, inverse);
    });
}

void CpuBackend::rope_forward(Tensor qkv, Tensor table, Tensor positions, int heads, RopeLayout layout) {
    Timed t(*this, "rope_forward");
    rope(qkv, table, positions, heads, layout, false);
}

void CpuBackend::rope_backward(Tensor dqkv, Tensor table, Tensor positions, int heads, RopeLayout layout) {
    Timed t(*this, "rope_backward");
    rope(dqkv, table, positions, heads, layout, true);
}

void CpuBackend::cache_append(HeadsView k_cache, HeadsView v_cache, Tensor qkv, Tensor offset, int H, int K, int D) {
    Timed t(*this, "cache_append");
    const int64_t B = offset.numel(), N = qkv.rows(), T = N / B, width = qkv.last(), n = int64_t(K) * D;
    auto put = [&](HeadsView cache, int64_t token, int64_t from) {
        const int64_t b = token / T,
                      to = b * cache.batch_stride + (offset.as<int32_t>()[b] + token % T) * cache.token_stride;
        void* y = static_cast<char*>(cache.data) + to * size_of(cache.dtype);
        const void* x = at(qkv, token * width + from);
        if (cache.dtype == qkv.dtype)
            std::memcpy(y, x, n * size_of(cache.dtype));
        else if (is_low(qkv))
            kernels_.to_fp32(static_cast<float*>(y), static_cast<const Low*>(x), n);
        else
            kernels_.to_bf16(static_cast<Low*>(y), static_cast<const float*>(x), n);
    };
    for_ranges(threads_, N, 64, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; ++i) put(k_cache, i, int64_t(H) * D), put(v_cache, i, int64_t(H + K) * D);
    });
}

// ---- pointwise and loss
// -----------------------------------------------------------------------------------------------

void CpuBackend::swiglu_forward(Tensor y, Tensor gate_up) {
    Timed t(*this, "swiglu_forward");
    const int64_t F = y.last();
    for_ranges(threads_, y.rows(), 16, [&](int64_t b, int64_t e) {
        kernels_.swiglu_forward(at(y, b * F), is_low(y), at(gate_up, 2 * b * F), e - b, F);
    });
}

void CpuBackend::swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) {
    Timed t(*this, "swiglu_backward");
    const int64_t F = dy.last();
    for_ranges(threads_, dy.rows(), 16, [&](int64_t b, int64_t e) {
        kernels_.swiglu_backward(at(dgate_up, 2 * b * F), is_low(dy), at(dy, b * F), at(gate_up, 2 * b * F), e - b, F);
    });
}

void CpuBackend::cross_entropy(Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    Timed t(*this, "cross_entropy");
    const int64_t V = logits.last();
    for_ranges(threads_, logits.rows(), 1, [&](int64_t b, int64_t e) {
        for (int64_t i = b; i < e; ++i)
            losses.as<float>()[i] = kernels_.cross_entropy(
                at(dlogits, i * V), is_low(dlogits), logits.as<float>() + i * V, V, targets.as<int32_t>()[i], scale);
    });
}

// ---- optimizer
// --------------------------------------------------------------------------------------------------------

double CpuBackend::global_norm(Tensor g) {
    Timed t(*this, "global_norm");
    constexpr int64_t kBlock = 1 << 16;
    const int64_t n = g.numel(), blocks = (n + kBlock - 1) / kBlock;
    sums_.assign(std::max<int64_t>(blocks, 1), 0.0);
    for_parts(threads_, blocks, [&](int64_t i, int) {
        sums_[i] = kernels_.sum_squares(g.as<float>() + i * kBlock, std::min(kBlock, n - i * kBlock));
    });
    for (int64_t step = 1; step < blocks; step *= 2)
        for (int64_t i = 0; i + step < blocks; i += 2 * step) sums_[i] += sums_[i + step];
    return std::sqrt(sums_[0]);
}

void CpuBackend::update(Tensor p, Tensor m, Tensor v, Tensor g, const std::vector<UpdateGroup>& groups,
                        const UpdateStep& s) {
    Timed t(*this, "update");
    for (const UpdateGroup& u : groups)
        for_ranges(threads_, u.end - u.begin, 1 << 14, [&](int64_t b, int64_t e) {
            b += u.begin, e += u.begin;
            kernels_.update({p.as<float>() + b, m.as<float>() + b, v.as<float>() + b, g.as<float>() + b, e - b, u.lr,
                             u.weight_decay, s.beta1, s.beta2, s.rest1, s.rest2, s.eps, s.c1, s.c2, s.grad_scale,
                             s.adaptive});
        });
}

void CpuBackend::profile(bool on) {
    profiling_ = on;
    if (on) seconds_.clear();
}

std::unique_ptr<Backend> make_cpu_backend(int threads) {
    return std::make_unique<CpuBackend>(threads, choose_isa());
}

}  // namespace bam
