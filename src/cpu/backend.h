// The CPU backend: memory and loops over threads; the arithmetic is in matmul.cpp (oneDNN) and isa/.
#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "../backend.h"
#include "cpu/buffer.h"
#include "cpu/kernels.h"
#include "cpu/matmul.h"

namespace bam {

void check_head_size(int64_t D);

class CpuBackend : public Backend {
public:
    CpuBackend(int threads, const Kernels& kernels);
    CpuBackend(int threads, Isa isa) : CpuBackend(threads, kernels_for(isa)) {}

    std::string name() const override { return "cpu"; }
    std::map<std::string, std::string> describe() const override;
    bool fast_bf16() const override { return matmul_.fast_bf16(); }
    bool host_memory() const override { return true; }
    int64_t total_memory() const override;
    int64_t used_memory() const override;
    void* allocate(int64_t bytes) override;
    void release(void* p) override;
    void upload(Tensor dst, const void* src) override;
    void download(void* dst, Tensor src) override;
    void copy(Tensor dst, Tensor src) override;
    void zero(Tensor x) override;
    void synchronize() override {}

    WeightId bind_weight(Tensor master, DType compute, bool keep_copies) override;
    void refresh_weights() override;
    int64_t weight_bytes(int64_t out, int64_t in, DType compute) const override;
    void matmul_forward(Tensor y, Tensor x, WeightId w) override;
    void matmul_backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, WeightId w) override;

    void embedding_forward(Tensor x, Tensor table, Tensor ids, Tensor added, Tensor positions) override;
    void embedding_backward(Tensor dtable, Tensor dx, Tensor ids) override;
    void norm_forward(Tensor y, Tensor rstd, Tensor x_out, Tensor x_in, Tensor delta, Tensor w, float eps) override;
    void norm_backward(Tensor dx, Tensor dx_low, Tensor dw, Tensor dy, Tensor x, Tensor rstd, Tensor w) override;
    void rope_forward(Tensor qkv, Tensor table, Tensor positions, int heads, RopeLayout layout) override;
    void rope_backward(Tensor dqkv, Tensor table, Tensor positions, int heads, RopeLayout layout) override;
    void cache_append(HeadsView k_cache, HeadsView v_cache, Tensor qkv, Tensor offset, int H, int K, int D) override;
    void prior_tables(Tensor bias, const Tensor dbias[kMaxThetas], Encoding e, const Tensor theta[kMaxThetas]) override;
    void attention_forward(Tensor out, Tensor lse, HeadsView q, HeadsView k, HeadsView v, const Attention& a) override;
    void attention_backward(const AttentionBackward& g, const Attention& a) override;
    void swiglu_forward(Tensor y, Tensor gate_up) override;
    void swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) override;
    void cross_entropy(Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) override;
    double global_norm(Tensor g) override;
    void update(Tensor p, Tensor m, Tensor v, Tensor g, const std::vector<UpdateGroup>& groups,
                const UpdateStep& s) override;

    double measure_gemm(DType compute) override;
    void profile(bool on) override;
    std::map<std::string, double> profile_seconds() override { return seconds_; }

private:
    // Adds the time of an op to the profile, and makes OpenMP and oneDNN use this backend's threads.
    class Timed {
    public:
        Timed(CpuBackend& b, const char* op);
        ~Timed();

    private:
        CpuBackend& b_;
        const char* op_;
        std::chrono::steady_clock::time_point begin_;
    };

    void rope(Tensor x, Tensor table, Tensor positions, int heads, RopeLayout layout, bool inverse);
    void make_bounds(AttentionCall& c, const Attention& a);
    void make_tables(AttentionCall& c, const AttentionGrads& grads, const Attention& a);
    void head_sums(const AttentionCall& c, const AttentionGrads& grads, int64_t parts);

    const Kernels& kernels_;
    int threads_;
    Matmul matmul_;
    Buffer scratch_, tables_, bounds_;
    std::vector<double> sums_;
    bool profiling_ = false;
    std::map<std::string, double> seconds_;
};

}  // namespace bam
