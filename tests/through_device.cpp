#include "through_device.h"

#include <cstring>
#include <stdexcept>
#include <vector>

namespace bam::test {

class ThroughDevice::Call {
public:
    explicit Call(Backend& device) : device_(device) {}
    ~Call() {
        for (auto& [host, c] : copies_) device_.release(c.device.data);
        for (ViewCopy& v : views_) device_.release(v.device.data);
    }
    Call(const Call&) = delete;

    // The device's copy of t; one array given twice is one copy.
    Tensor in(Tensor t) {
        if (!t) return t;
        auto it = copies_.find(t.data);
        if (it == copies_.end()) {
            Tensor d = t;
            d.data = device_.allocate(t.bytes());
            device_.upload(d, t.data);
            it = copies_.emplace(t.data, Copy{t, d, false}).first;
        }
        return it->second.device;
    }
    Tensor out(Tensor t) {
        const Tensor d = in(t);
        if (t) copies_.at(t.data).changes = true;
        return d;
    }
    HeadsView in(HeadsView v, int64_t B, int64_t tokens, int64_t width) { return copy(v, B, tokens, width).device; }
    HeadsView out(HeadsView v, int64_t B, int64_t tokens, int64_t width) {
        ViewCopy c = copy(v, B, tokens, width);
        changed_.push_back(c);
        return c.device;
    }

    // Copies results back.
    void finish() {
        for (auto& [host, c] : copies_)
            if (c.changes) device_.download(c.host.data, c.device);
        for (const ViewCopy& v : changed_) bring_back(v);
    }

private:
    ViewCopy copy(HeadsView v, int64_t B, int64_t tokens, int64_t width) {
        ViewCopy c{v, v, B, tokens, width, (B - 1) * v.batch_stride + (tokens - 1) * v.token_stride + width};
        const Tensor host(v.data, v.dtype, {c.span});
        Tensor device = host;
        c.device.data = device.data = device_.allocate(host.bytes());
        device_.upload(device, v.data);
        views_.push_back(c);
        return c;
    }

    void bring_back(const ViewCopy& v) {
        const int64_t size = size_of(v.host.dtype);
        std::vector<char> got(v.span * size), expected(v.span * size);
        device_.download(got.data(), Tensor(v.device.data, v.host.dtype, {v.span}));
        std::memcpy(expected.data(), v.host.data, expected.size());
        for (int64_t b = 0; b < v.B; ++b)
            for (int64_t t = 0; t < v.tokens; ++t) {
                const int64_t at = (b * v.host.batch_stride + t * v.host.token_stride) * size;
                std::memcpy(expected.data() + at, got.data() + at, v.width * size);
            }
        if (got != expected) throw std::logic_error("a view's op wrote between its rows");
        std::memcpy(v.host.data, got.data(), got.size());
    }

    Backend& device_;
    std::map<void*, Copy> copies_;
    std::vector<ViewCopy> views_, changed_;
};

ThroughDevice::~ThroughDevice() {
    for (auto& [id, c] : masters_) device_->release(c.device.data);
}

void* ThroughDevice::allocate(int64_t bytes) { return ::operator new(bytes, std::align_val_t(64)); }
void ThroughDevice::release(void* p) { ::operator delete(p, std::align_val_t(64)); }
void ThroughDevice::upload(Tensor dst, const void* src) { std::memcpy(dst.data, src, dst.bytes()); }
void ThroughDevice::download(void* dst, Tensor src) { std::memcpy(dst, src.data, src.bytes()); }

void ThroughDevice::copy(Tensor dst, Tensor src) {
    Call c(*device_);
    device_->copy(c.out(dst), c.in(src));
    c.finish();
}

void ThroughDevice::zero(Tensor x) {
    Call c(*device_);
    device_->zero(c.out(x));
    c.finish();
}

WeightId ThroughDevice::bind_weight(Tensor master, DType compute, bool keep_copies) {
    Tensor d = master;
    d.data = device_->allocate(master.bytes());
    device_->upload(d, master.data);
    const WeightId id = device_->bind_weight(d, compute, keep_copies);
    masters_[id] = {master, d, false};
    return id;
}

void ThroughDevice::refresh_weights() {
    for (auto& [id, c] : masters_) device_->upload(c.device, c.host.data);
    device_->refresh_weights();
}

void ThroughDevice::matmul_forward(Tensor y, Tensor x, WeightId w) {
    Call c(*device_);
    device_->matmul_forward(c.out(y), c.in(x), w);
    c.finish();
}

void ThroughDevice::matmul_backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, WeightId w) {
    Call c(*device_);
    device_->matmul_backward(c.out(dx), c.out(dw), c.in(dy), c.in(x), w);
    c.finish();
}

void ThroughDevice::embedding_forward(Tensor x, Tensor table, Tensor ids, Tensor added, Tensor positions) {
    Call c(*device_);
    device_->embedding_forward(c.out(x), c.in(table), c.in(ids), c.in(added), c.in(positions));
    c.finish();
}

void ThroughDevice::embedding_backward(Tensor dtable, Tensor dx, Tensor ids) {
    Call c(*device_);
    device_->embedding_backward(c.out(dtable), c.in(dx), c.in(ids));
    c.finish();
}

void ThroughDevice::norm_forward(Tensor y, Tensor rstd, Tensor x_out, Tensor x_in, Tensor delta, Tensor w, float eps) {
    Call c(*device_);
    device_->norm_forward(c.out(y), c.out(rstd), c.out(x_out), c.in(x_in), c.in(delta), c.in(w), eps);
    c.finish();
}

void ThroughDevice::norm_backward(Tensor dx, Tensor dx_low, Tensor dw, Tensor dy, Tensor x, Tensor rstd, Tensor w) {
    Call c(*device_);
    device_->norm_backward(c.out(dx), c.out(dx_low), c.out(dw), c.in(dy), c.in(x), c.in(rstd), c.in(w));
    c.finish();
}

void ThroughDevice::rope_forward(Tensor qkv, Tensor table, Tensor positions, int heads, RopeLayout layout) {
    Call c(*device_);
    device_->rope_forward(c.out(qkv), c.in(table), c.in(positions), heads, layout);
    c.finish();
}

void ThroughDevice::rope_backward(Tensor dqkv, Tensor table, Tensor positions, int heads, RopeLayout layout) {
    Call c(*device_);
    device_->rope_backward(c.out(dqkv), c.in(table), c.in(positions), heads, layout);
    c.finish();
}

void ThroughDevice::cache_append(HeadsView k_cache, HeadsView v_cache, Tensor qkv, Tensor offset, int H, int K, int D) {
    Call c(*device_);
    const int64_t B = offset.numel(), capacity = k_cache.batch_stride / k_cache.token_stride;
    const HeadsView k = c.out(k_cache, B, capacity, int64_t(K) * D), v = c.out(v_cache, B, capacity, int64_t(K) * D);
    device_->cache_append(k, v, c.in(qkv), c.in(offset), H, K, D);
    c.finish();
}

void ThroughDevice::prior_tables(Tensor bias, const Tensor dbias[kMaxThetas], Encoding e, const Tensor theta[kMaxThetas]) {
    Call c(*device_);
    Tensor d[kMaxThetas], t[kMaxThetas];
    for (int p = 0; p < kMaxThetas; ++p) d[p] = c.out(dbias[p]), t[p] = c.in(theta[p]);
    device_->prior_tables(c.out(bias), d, e, t);
    c.finish();
}

void ThroughDevice::attention_forward(Tensor out, Tensor lse, HeadsView q, HeadsView k, HeadsView v, const Attention& a) {
    Call c(*device_);
    Attention d = a;
    for (Tensor* t : {&d.key_begin, &d.offset, &d.log_n, &d.seq_scale, &d.bias}) *t = c.in(*t);
    const int64_t K = int64_t(a.K) * a.D;
    device_->attention_forward(c.out(out), c.out(lse), c.in(q, a.B, a.T, int64_t(a.H) * a.D), c.in(k, a.B, a.S, K), c.in(v, a.B, a.S, K), d);
    c.finish();
}

void ThroughDevice::attention_backward(const AttentionBackward& g, const Attention& a) {
    Call c(*device_);
    Attention d = a;
    for (Tensor* t : {&d.key_begin, &d.offset, &d.log_n, &d.seq_scale, &d.bias}) *t = c.in(*t);
    for (Tensor& t : d.dbias) t = c.in(t);
    const int64_t H = int64_t(a.H) * a.D, K = int64_t(a.K) * a.D;
    AttentionBackward e;
    e.q = c.in(g.q, a.B, a.T, H), e.k = c.in(g.k, a.B, a.S, K), e.v = c.in(g.v, a.B, a.S, K);
    e.dq = c.out(g.dq, a.B, a.T, H), e.dk = c.out(g.dk, a.B, a.S, K), e.dv = c.out(g.dv, a.B, a.S, K);
    e.dout = c.in(g.dout), e.out = c.in(g.out), e.lse = c.in(g.lse);
    e.grads.dseq_scale = c.out(g.grads.dseq_scale), e.grads.dscale = c.out(g.grads.dscale);
    for (int p = 0; p < kMaxThetas; ++p) e.grads.dtheta[p] = c.out(g.grads.dtheta[p]);
    device_->attention_backward(e, d);
    c.finish();
}

void ThroughDevice::swiglu_forward(Tensor y, Tensor gate_up) {
    Call c(*device_);
    device_->swiglu_forward(c.out(y), c.in(gate_up));
    c.finish();
}

void ThroughDevice::swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) {
    Call c(*device_);
    device_->swiglu_backward(c.out(dgate_up), c.in(dy), c.in(gate_up));
    c.finish();
}

void ThroughDevice::cross_entropy(Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    Call c(*device_);
    device_->cross_entropy(c.out(losses), c.out(dlogits), c.in(logits), c.in(targets), scale);
    c.finish();
}

double ThroughDevice::global_norm(Tensor g) {
    Call c(*device_);
    return device_->global_norm(c.in(g));
}

void ThroughDevice::update(Tensor p, Tensor m, Tensor v, Tensor g, const std::vector<UpdateGroup>& groups, const UpdateStep& s) {
    Call c(*device_);
    device_->update(c.out(p), c.out(m), c.out(v), c.in(g), groups, s);
    c.finish();
}

}  // namespace bam::test
