// Any backend under tests that hold their arrays on the host: every call copies what it is given to the device, runs, and copies
// results back. What lies between the elements of a strided view must come back unchanged.
#pragma once
#include <map>
#include <memory>

#include "src/backend.h"

namespace bam::test {

class ThroughDevice : public Backend {
public:
    explicit ThroughDevice(std::unique_ptr<Backend> device) : device_(std::move(device)) {}
    ~ThroughDevice() override;

    std::string name() const override { return device_->name(); }
    std::map<std::string, std::string> describe() const override { return device_->describe(); }
    bool fast_bf16() const override { return device_->fast_bf16(); }
    bool host_memory() const override { return true; }
    int64_t total_memory() const override { return device_->total_memory(); }
    int64_t used_memory() const override { return device_->used_memory(); }
    void* allocate(int64_t bytes) override;
    void release(void* p) override;
    void upload(Tensor dst, const void* src) override;
    void download(void* dst, Tensor src) override;
    void copy(Tensor dst, Tensor src) override;
    void zero(Tensor x) override;
    void synchronize() override { device_->synchronize(); }

    WeightId bind_weight(Tensor master, DType compute, bool keep_copies) override;
    void refresh_weights() override;
    int64_t weight_bytes(int64_t out, int64_t in, DType compute) const override { return device_->weight_bytes(out, in, compute); }
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
    void update(Tensor p, Tensor m, Tensor v, Tensor g, const std::vector<UpdateGroup>& groups, const UpdateStep& s) override;
    double measure_gemm(DType compute) override { return device_->measure_gemm(compute); }
    void profile(bool on) override { device_->profile(on); }
    std::map<std::string, double> profile_seconds() override { return device_->profile_seconds(); }

private:
    struct Copy {
        Tensor host, device;
        bool changes = false;
    };
    // A view's tokens: rows of `width` elements.
    struct ViewCopy {
        HeadsView host, device;
        int64_t B, tokens, width, span;
    };
    class Call;  // copies of one call

    std::unique_ptr<Backend> device_;
    std::map<WeightId, Copy> masters_;
};

}  // namespace bam::test
