// Forward and backward of the decoder as lists of backend calls. See model.h.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "device.h"

namespace bam {

struct Model::Layer {
    std::string name;                 // "layers.3."
    Tensor attention_norm, ffn_norm;  // (C)
    Tensor seq_scale;                 // (H) or empty
    WeightId qkv, wo, w13, w2;
    std::string prior;                // "layers.3.attention.prior." or "prior."
};

struct Model::Kept {
    Tensor x, x2;         // (N, C) f32: residual stream before attention and before the feed-forward part
    Tensor n1, n2;        // (N, C): normed
    Tensor rstd1, rstd2;  // (N) f32
    Tensor qkv;           // (N, (H+2K)*D)
    Tensor att;           // (N, H*D)
    Tensor lse;           // (B, H, T) f32
    Tensor gate_up;       // (N, 2F)
    Tensor act;           // (N, F)
};

struct Model::Activations {
    Arena memory;
    int64_t capacity = 0;  // bytes
    Keep keep = Keep::nothing;
    int B = 0, T = 0;
    std::vector<Kept> layers;
    Tensor x_final, hidden, rstd_final;  // (N, C) f32; (N, C) normed; (N) f32
    Tensor proj;                         // (N, C): what a part adds to the residual stream
    Tensor logits;                       // (R, V) f32
    // Backward only.
    Tensor dlogits;                      // (G, V)
    Tensor dx, dx_low;                   // (N, C) f32, and rounded to bf16 when computing in it
    Tensor dn;                           // (N, C): gradient by a norm's output or by the attention output
    Tensor dact, dgate_up, dqkv;

    void layout(Arena& a, const ModelConfig& c, DType compute);
    Tensor dy() const { return dx_low ? dx_low : dx; }
};

struct Model::Inputs {
    Arena memory;
    int64_t capacity = 0;
    int64_t S = 0;
    bool has_targets = false;
    Tensor ids, targets, key_begin, positions;  // (N) i32
    Tensor offset;                              // (B) i32 or empty
    Tensor log_n;                               // (N) f32
};

Keep keep_for(const std::string& recompute) {
    return recompute == "block" ? Keep::inputs : recompute == "attention" ? Keep::no_attention : Keep::all;
}

// Chunks of logits whose gradients are kept, to meet the (V, C) gradient of the output matrix once: it is larger than a cache.
constexpr int64_t kGradientChunks = 4;

int64_t logit_rows(const ModelConfig& c, int64_t N) {
    constexpr int64_t kElements = 1 << 24;  // 64 MiB of fp32 logits
    return std::min<int64_t>(N, std::max<int64_t>(64, kElements / c.vocab_size));
}

void Model::Activations::layout(Arena& a, const ModelConfig& c, DType compute) {
    const int64_t N = int64_t(B) * T, C = c.dim, F = c.ffn_hidden, V = c.vocab_size, R = logit_rows(c, N);
    const int64_t G = std::min(N, kGradientChunks * R);
    const bool training = keep != Keep::nothing;
    layers.assign(c.n_layers, {});
    for (int l = 0; l < c.n_layers; ++l) {
        Kept& k = layers[l];
        const bool first = l == 0;
        const bool own_all = first || keep == Keep::all, own_ffn = own_all || keep == Keep::no_attention;
        k.x = first || training ? a.take(DType::f32, {N, C}) : layers[0].x;
        k.n1 = own_all ? a.take(compute, {N, C}) : layers[0].n1;
        k.rstd1 = own_all ? a.take(DType::f32, {N}) : layers[0].rstd1;
        k.qkv = own_all ? a.take(compute, {N, c.qkv_dim()}) : layers[0].qkv;
        k.att = own_all ? a.take(compute, {N, C}) : layers[0].att;
        if (training) k.lse = own_all ? a.take(DType::f32, {B, c.n_heads, T}) : layers[0].lse;
        k.x2 = !training ? k.x : own_ffn ? a.take(DType::f32, {N, C}) : layers[0].x2;
        k.n2 = own_ffn ? a.take(compute, {N, C}) : layers[0].n2;
        k.rstd2 = own_ffn ? a.take(DType::f32, {N}) : layers[0].rstd2;
        k.gate_up = own_ffn ? a.take(compute, {N, 2 * F}) : layers[0].gate_up;
        k.act = own_ffn ? a.take(compute, {N, F}) : layers[0].act;
    }
    x_final = training ? a.take(DType::f32, {N, C}) : layers[0].x;
    hidden = a.take(compute, {N, C});
    rstd_final = a.take(DType::f32, {N});
    proj = a.take(compute, {N, C});
    logits = a.take(DType::f32, {training && compute == DType::f32 ? G : R, V});
    if (!training) return;
    dlogits = compute == DType::f32 ? logits : a.take(compute, {G, V});
    dx = a.take(DType::f32, {N, C});
    if (compute != DType::f32) dx_low = a.take(compute, {N, C});
    dn = a.take(compute, {N, C});
    dact = a.take(compute, {N, F});
    dgate_up = a.take(compute, {N, 2 * F});
    dqkv = a.take(compute, {N, c.qkv_dim()});
}

int64_t Model::activation_bytes(const ModelConfig& c, DType compute, int B, int T, Keep keep) {
    Activations a;
    a.B = B, a.T = T, a.keep = keep;
    Arena counting;
    a.layout(counting, c, compute);
    return counting.used();
}

// ---- weights and tables ---------------------------------------------------------------------------------------------

Model::Model(Backend& device, const ModelConfig& config, DType compute, bool keep_copies)
    : device_(device),
      config_(config),
      table_(make_parameter_table(config)),
      compute_(compute),
      act_(std::make_unique<Activations>()),
      in_(std::make_unique<Inputs>()) {
    weight_memory_ = make_arena(device, [&](Arena& a) { weights_ = a.take(DType::f32, {table_.total}); });
    const int64_t C = config.dim, F = config.ffn_hidden;
    auto bind = [&](const std::string& first, int64_t out, int64_t in) {
        Tensor w = part(weights_, first);
        return device_.bind_weight(Tensor(w.data, DType::f32, {out, in}), compute, keep_copies);
    };
    for (int l = 0; l < config.n_layers; ++l) {
        Layer w;
        w.name = "layers." + std::to_string(l) + ".";
        w.prior = config.position.bam_global ? "prior." : w.name + "attention.prior.";
        w.attention_norm = part(weights_, w.name + "attention_norm.weight");
        w.ffn_norm = part(weights_, w.name + "ffn_norm.weight");
        if (config.position.ssmax) w.seq_scale = part(weights_, w.name + "attention.seq_scale");
        w.qkv = bind(w.name + "attention.wq.weight", config.qkv_dim(), C);
        w.wo = bind(w.name + "attention.wo.weight", C, C);
        w.w13 = bind(w.name + "feed_forward.w1.weight", 2 * F, C);
        w.w2 = bind(w.name + "feed_forward.w2.weight", C, F);
        layers_.push_back(std::move(w));
    }
    embedding_ = part(weights_, "tok_embeddings.weight");
    norm_ = part(weights_, "norm.weight");
    output_ = bind(config.tie_embeddings ? "tok_embeddings.weight" : "output.weight", config.vocab_size, C);
}

Model::~Model() = default;

Tensor Model::part(Tensor arena, const std::string& name) const {
    const Parameter& p = table_.at(name);
    Tensor t(arena.as<float>() + p.offset, DType::f32, {});
    for (int64_t d : p.shape) t.shape[t.rank++] = d;
    return t;
}

void Model::fill_weights(const std::function<void(float*)>& f) {
    HostRoom values(device_, weights_);
    f(values.data());
    values.upload();
    weights_changed();
}

void Model::make_tables(int64_t distances) {
    const PositionConfig& p = config_.position;
    if (!has_prior(p.encoding)) return;
    const bool own = p.encoding == Encoding::bam && !p.bam_global;
    const int64_t sets = own ? config_.n_layers : 1;
    const std::vector<PriorTheta> thetas = prior_thetas(p);
    auto layout = [&](Arena& a) {
        bias_ = a.take(DType::f32, {sets, config_.n_heads, distances});
        for (size_t i = 0; i < thetas.size(); ++i)
            if (thetas[i].trained && !thetas[i].scales_bias && act_->keep != Keep::nothing)
                dbias_[i] = a.take(DType::f32, {sets, config_.n_heads, distances});
            else
                dbias_[i] = {};
    };
    Arena counting;
    layout(counting);
    if (counting.used() > table_capacity_) {
        table_memory_ = Arena(device_, counting.used());
        table_capacity_ = counting.used();
    }
    table_memory_.rewind();
    layout(table_memory_);
    for (int64_t s = 0; s < sets; ++s) {
        auto set = [&](Tensor t) { return t ? t.slice(s, 1).view({config_.n_heads, distances}) : t; };
        Tensor dbias[kMaxThetas], theta[kMaxThetas];
        for (size_t i = 0; i < thetas.size(); ++i) {
            dbias[i] = set(dbias_[i]);
            theta[i] = part(weights_, layers_[s].prior + thetas[i].name);
        }
        device_.prior_tables(set(bias_), dbias, p.encoding, theta);
    }
}

void Model::refresh(int64_t distances) {
    const bool too_short = has_prior(config_.position.encoding) && (!bias_ || bias_.last() < distances);
    if (stale_) device_.refresh_weights();
    if (stale_ || too_short) make_tables(distances);
    stale_ = false;
}

// Keeps the window of positions the batches use; a window that moves (decoding) is made a little ahead.
void Model::make_position_table(int64_t first, int64_t last) {
    const PositionConfig& p = config_.position;
    const bool rope = p.encoding == Encoding::rope;
    if (!rope && p.encoding != Encoding::sinusoidal) return;
    const int64_t width = rope ? config_.head_dim() : config_.dim;
    const int64_t have = position_table_ ? position_table_.shape[0] : 0;
    if (first >= position_first_ && last < position_first_ + have) return;
    const int64_t count = std::max<int64_t>(last - first + 1 + 256, have);
    const std::vector<float> host = rope ? rope_table(p.rope_theta, int(width), first, count)
                                         : sinusoidal_table(p.sinusoidal_theta, p.sinusoidal_variant, int(width), first, count);
    if (count > have) position_memory_ = Arena(device_, count * width * 4);
    position_memory_.rewind();
    position_table_ = position_memory_.take(DType::f32, {count, width});
    position_first_ = first;
    device_.upload(position_table_, host.data());
}

// ---- a batch on the device ----------------------------------------------------------------------------------------------

void Model::reserve(int B, int T, Keep keep) {
    Activations& a = *act_;
    if (a.B == B && a.T == T && a.keep == keep) return;
    if ((a.keep == Keep::nothing) != (keep == Keep::nothing)) bias_ = {};  // with or without derivatives
    const int64_t bytes = activation_bytes(config_, compute_, B, T, keep);
    if (bytes > a.capacity) {
        a.memory = Arena();
        a.memory = Arena(device_, bytes);
        a.capacity = bytes;
    }
    a.B = B, a.T = T, a.keep = keep;
    a.memory.rewind();
    a.layout(a.memory, config_, compute_);
}

void Model::upload(const Batch& batch, const KvCache* cache) {
    const int64_t N = int64_t(batch.B) * batch.T;
    const auto [first, last] = std::minmax_element(batch.positions.begin(), batch.positions.end());
    make_position_table(*first, *last);
    std::vector<int32_t> positions(batch.positions);
    for (int32_t& p : positions) p -= int32_t(position_first_);

    std::vector<float> log_n(N);
    int64_t S = 0;
    for (int64_t i = 0; i < N; ++i) {
        const int64_t own = (batch.offset.empty() ? 0 : batch.offset[i / batch.T]) + i % batch.T;
        log_n[i] = float(std::log(double(own - batch.key_begin[i] + 1)));
        S = std::max(S, own + 1);
    }

    Inputs& in = *in_;
    auto layout = [&](Arena& a) {
        in.ids = a.take(DType::i32, {N});
        in.targets = a.take(DType::i32, {N});
        in.key_begin = a.take(DType::i32, {batch.B, batch.T});
        in.positions = a.take(DType::i32, {N});
        in.offset = a.take(DType::i32, {batch.B});
        in.log_n = a.take(DType::f32, {batch.B, batch.T});
    };
    Arena counting;
    layout(counting);
    if (counting.used() > in.capacity) {
        in.memory = Arena(device_, counting.used());
        in.capacity = counting.used();
    }
    in.memory.rewind();
    layout(in.memory);
    device_.upload(in.ids, batch.ids.data());
    in.has_targets = !batch.targets.empty();
    if (in.has_targets) device_.upload(in.targets, batch.targets.data());
    device_.upload(in.key_begin, batch.key_begin.data());
    device_.upload(in.positions, positions.data());
    if (cache) device_.upload(in.offset, batch.offset.data());
    else in.offset = {};
    device_.upload(in.log_n, log_n.data());
    in.S = S;
    refresh(cache ? std::max(S, cache->capacity) : S);
}

Attention Model::attention(int layer) const {
    Attention a;
    a.B = act_->B, a.T = act_->T, a.S = in_->S;
    a.H = config_.n_heads, a.K = config_.n_kv_heads, a.D = config_.head_dim();
    a.order = config_.position.ssmax_order;
    a.key_begin = in_->key_begin, a.offset = in_->offset, a.log_n = in_->log_n;
    a.seq_scale = layers_[layer].seq_scale;
    if (!bias_) return a;
    auto set = [&](Tensor t) {
        return t ? t.slice(t.shape[0] > 1 ? layer : 0, 1).view({config_.n_heads, t.last()}) : t;
    };
    a.bias = set(bias_);
    for (int i = 0; i < kMaxThetas; ++i) a.dbias[i] = set(dbias_[i]);
    return a;
}

// ---- forward ----------------------------------------------------------------------------------------------------------

// The heads of q, k or v inside a (N, (H+2K)*D) buffer.
static HeadsView heads_of(Tensor qkv, int T, int first_head, int D) {
    const int64_t width = qkv.last();
    char* data = static_cast<char*>(qkv.data) + int64_t(first_head) * D * size_of(qkv.dtype);
    return {data, qkv.dtype, T * width, width};
}

void Model::attention_part(int layer, KvCache* cache) {
    const Kept& k = act_->layers[layer];
    const int H = config_.n_heads, K = config_.n_kv_heads, D = config_.head_dim(), T = act_->T;
    device_.matmul_forward(k.qkv, k.n1, layers_[layer].qkv);
    if (config_.position.encoding == Encoding::rope)
        device_.rope_forward(k.qkv, position_table_, in_->positions, H + K, config_.position.rope_layout);
    HeadsView keys = heads_of(k.qkv, T, H, D), values = heads_of(k.qkv, T, H + K, D);
    if (cache) {
        keys = cache->k[layer], values = cache->v[layer];
        device_.cache_append(keys, values, k.qkv, in_->offset, H, K, D);
    }
    Attention a = attention(layer);
    a.skip_below = skip_below_;
    device_.attention_forward(k.att, k.lse, heads_of(k.qkv, T, 0, D), keys, values, a);
}

void Model::feed_forward_part(int layer) {
    const Kept& k = act_->layers[layer];
    device_.matmul_forward(k.gate_up, k.n2, layers_[layer].w13);
    device_.swiglu_forward(k.act, k.gate_up);
}

void Model::forward(const Batch& batch, KvCache* cache, float skip_below) {
    if (act_->B != batch.B || act_->T != batch.T) reserve(batch.B, batch.T, act_->keep);
    upload(batch, cache);
    skip_below_ = skip_below;
    const Activations& a = *act_;
    const float eps = float(config_.norm_eps);
    const bool sinusoidal = config_.position.encoding == Encoding::sinusoidal;
    device_.embedding_forward(a.layers[0].x, embedding_, in_->ids, sinusoidal ? position_table_ : Tensor(), in_->positions);
    device_.norm_forward(a.layers[0].n1, a.layers[0].rstd1, {}, a.layers[0].x, {}, layers_[0].attention_norm, eps);
    for (int l = 0; l < config_.n_layers; ++l) {
        const Kept& k = a.layers[l];
        const Layer& w = layers_[l];
        attention_part(l, cache);
        device_.matmul_forward(a.proj, k.att, w.wo);
        device_.norm_forward(k.n2, k.rstd2, k.x2, k.x, a.proj, w.ffn_norm, eps);
        feed_forward_part(l);
        device_.matmul_forward(a.proj, k.act, w.w2);
        if (l + 1 < config_.n_layers) {
            const Kept& next = a.layers[l + 1];
            device_.norm_forward(next.n1, next.rstd1, next.x, k.x2, a.proj, layers_[l + 1].attention_norm, eps);
        } else {
            device_.norm_forward(a.hidden, a.rstd_final, a.x_final, k.x2, a.proj, norm_, eps);
        }
    }
}

// Logits, loss and, with grads, their gradients, a chunk of rows at a time.
void Model::classifier(Tensor losses, Tensor grads, float scale) {
    const Activations& a = *act_;
    const int64_t N = int64_t(a.B) * a.T, R = logit_rows(config_, N), G = grads ? a.dlogits.shape[0] : R;
    Tensor dw;
    if (grads) dw = part(grads, config_.tie_embeddings ? "tok_embeddings.weight" : "output.weight");
    for (int64_t begin = 0; begin < N; begin += G) {
        const int64_t rows = std::min(G, N - begin);
        for (int64_t i = 0; i < rows; i += R) {
            const int64_t n = std::min(R, rows - i);
            const Tensor dlogits = grads ? a.dlogits.slice(i, n) : Tensor();
            const Tensor logits = dlogits.data && compute_ == DType::f32 ? dlogits : a.logits.slice(0, n);
            device_.matmul_forward(logits, a.hidden.slice(begin + i, n), output_);
            device_.cross_entropy(losses.slice(begin + i, n), dlogits, logits, in_->targets.slice(begin + i, n), scale);
        }
        if (grads)
            device_.matmul_backward(a.dn.slice(begin, rows), dw, a.dlogits.slice(0, rows), a.hidden.slice(begin, rows), output_);
    }
}

void Model::loss(const Batch& batch, Tensor losses) {
    forward(batch);
    classifier(losses, {}, 0);
}

KvCache Model::make_cache(int B, int64_t capacity) {
    KvCache cache;
    cache.B = B, cache.capacity = capacity;
    const int64_t K = config_.n_kv_heads, D = config_.head_dim();
    cache.memory = make_arena(device_, [&](Arena& a) {
        cache.k.clear(), cache.v.clear();
        for (int l = 0; l < config_.n_layers; ++l)
            for (auto* side : {&cache.k, &cache.v})
                side->push_back({a.take(compute_, {B, capacity, K, D}).data, compute_, capacity * K * D, K * D});
    });
    return cache;
}

int64_t Model::cache_bytes(const ModelConfig& c, int B, int64_t capacity, DType dtype) {
    return 2 * c.n_layers * int64_t(B) * capacity * c.n_kv_heads * c.head_dim() * size_of(dtype);
}

void Model::logits(int64_t begin, int64_t count, float* host) {
    const Activations& a = *act_;
    const int64_t R = a.logits.shape[0];
    for (int64_t i = 0; i < count; i += R) {
        const int64_t n = std::min(R, count - i);
        device_.matmul_forward(a.logits.slice(0, n), a.hidden.slice(begin + i, n), output_);
        device_.download(host + i * config_.vocab_size, a.logits.slice(0, n));
    }
}

void Model::losses(int64_t begin, int64_t count, Tensor losses) {
    const Activations& a = *act_;
    const int64_t R = a.logits.shape[0];
    for (int64_t i = 0; i < count; i += R) {
        const int64_t n = std::min(R, count - i);
        device_.matmul_forward(a.logits.slice(0, n), a.hidden.slice(begin + i, n), output_);
        device_.cross_entropy(losses.slice(i, n), {}, a.logits.slice(0, n), in_->targets.slice(begin + i, n), 0);
    }
}

Tensor Model::qkv(int layer) const { return act_->layers[layer].qkv; }

// ---- backward ---------------------------------------------------------------------------------------------------------

void Model::loss_and_gradients(const Batch& batch, Tensor losses, Tensor grads, float scale) {
    if (act_->keep == Keep::nothing) reserve(batch.B, batch.T, Keep::all);
    forward(batch);
    const Activations& a = *act_;
    classifier(losses, grads, scale);
    device_.zero(a.dx);
    device_.norm_backward(a.dx, a.dx_low, part(grads, "norm.weight"), a.dn, a.x_final, a.rstd_final, norm_);
    for (int l = config_.n_layers - 1; l >= 0; --l) backward_layer(l, grads);
    device_.embedding_backward(part(grads, "tok_embeddings.weight"), a.dx, in_->ids);
}

// Makes again what the forward pass did not keep of a block.
void Model::recompute(int layer) {
    const Activations& a = *act_;
    const Kept& k = a.layers[layer];
    const Layer& w = layers_[layer];
    if (a.keep == Keep::all) return;
    device_.norm_forward(k.n1, k.rstd1, {}, k.x, {}, w.attention_norm, float(config_.norm_eps));
    attention_part(layer, nullptr);
    if (a.keep == Keep::no_attention) return;
    device_.matmul_forward(a.proj, k.att, w.wo);
    device_.norm_forward(k.n2, k.rstd2, k.x2, k.x, a.proj, w.ffn_norm, float(config_.norm_eps));
    feed_forward_part(layer);
}

void Model::attention_backward(int layer, Tensor grads) {
    const Activations& a = *act_;
    const Kept& k = a.layers[layer];
    const Layer& w = layers_[layer];
    const int H = config_.n_heads, K = config_.n_kv_heads, D = config_.head_dim();
    Backend::AttentionBackward g;
    g.dq = heads_of(a.dqkv, a.T, 0, D), g.dk = heads_of(a.dqkv, a.T, H, D), g.dv = heads_of(a.dqkv, a.T, H + K, D);
    g.q = heads_of(k.qkv, a.T, 0, D), g.k = heads_of(k.qkv, a.T, H, D), g.v = heads_of(k.qkv, a.T, H + K, D);
    g.dout = a.dn, g.out = k.att, g.lse = k.lse;
    if (w.seq_scale) g.grads.dseq_scale = part(grads, w.name + "attention.seq_scale");
    const std::vector<PriorTheta> thetas = prior_thetas(config_.position);
    for (size_t i = 0; i < thetas.size(); ++i)
        if (thetas[i].trained)
            (thetas[i].scales_bias ? g.grads.dscale : g.grads.dtheta[i]) = part(grads, w.prior + thetas[i].name);
    device_.attention_backward(g, attention(layer));
    if (config_.position.encoding == Encoding::rope)
        device_.rope_backward(a.dqkv, position_table_, in_->positions, H + K, config_.position.rope_layout);
}

// dx comes in as the gradient by the block's output and leaves as that by its input.
void Model::backward_layer(int layer, Tensor grads) {
    const Activations& a = *act_;
    const Kept& k = a.layers[layer];
    const Layer& w = layers_[layer];
    const int64_t C = config_.dim, F = config_.ffn_hidden;
    auto grad = [&](const char* name) { return part(grads, w.name + name); };
    auto fused = [&](const char* first, int64_t out) { return Tensor(grad(first).data, DType::f32, {out, C}); };
    recompute(layer);

    device_.matmul_backward(a.dact, grad("feed_forward.w2.weight"), a.dy(), k.act, w.w2);
    device_.swiglu_backward(a.dgate_up, a.dact, k.gate_up);
    device_.matmul_backward(a.dn, fused("feed_forward.w1.weight", 2 * F), a.dgate_up, k.n2, w.w13);
    device_.norm_backward(a.dx, a.dx_low, grad("ffn_norm.weight"), a.dn, k.x2, k.rstd2, w.ffn_norm);

    device_.matmul_backward(a.dn, grad("attention.wo.weight"), a.dy(), k.att, w.wo);
    attention_backward(layer, grads);
    device_.matmul_backward(a.dn, fused("attention.wq.weight", config_.qkv_dim()), a.dqkv, k.n1, w.qkv);
    device_.norm_backward(a.dx, a.dx_low, grad("attention_norm.weight"), a.dn, k.x, k.rstd1, w.attention_norm);
}

}  // namespace bam
