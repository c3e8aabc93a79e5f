// The decoder of DESIGN §2.1 on any backend, with any positional encoding: weights, forward and backward as two readable
// lists of backend calls. Training, evaluation and generation all run through forward().
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "backend.h"
#include "config.h"
#include "parameters.h"

namespace bam {

// B rows of T tokens, on the host.
struct Batch {
    int B = 0, T = 0;
    std::vector<int32_t> ids;        // (B, T)
    std::vector<int32_t> targets;    // (B, T) or empty; negative: no target
    std::vector<int32_t> key_begin;  // (B, T) first key each query sees, as an index of its row (of the cache, if there is one)
    std::vector<int32_t> positions;  // (B, T) absolute positions for RoPE and sinusoidal
    std::vector<int32_t> offset;     // (B) index of the row's first token in the cache; empty: 0
};

// Keys and values of earlier tokens in the compute dtype, one pair of (B, capacity, K, D) per layer.
struct KvCache {
    Arena memory;
    int B = 0;
    int64_t capacity = 0;
    std::vector<HeadsView> k, v;  // per layer
};

// Which activations a forward pass keeps for the backward pass.
enum class Keep : uint8_t {
    nothing,       // inference: every layer uses the same buffers
    all,
    no_attention,  // made again in backward: first norm, qkv, attention output
    inputs,        // made again in backward: all but each block's input
};

Keep keep_for(const std::string& recompute);  // "none" | "attention" | "block"

class Model {
public:
    // compute: dtype of matrices and activations; keep_copies: Backend::bind_weight. Weights are uninitialised until
    // fill_weights().
    Model(Backend& device, const ModelConfig& config, DType compute, bool keep_copies = true);
    ~Model();

    Backend& device() { return device_; }
    const ModelConfig& config() const { return config_; }
    const ParameterTable& table() const { return table_; }
    DType compute() const { return compute_; }

    Tensor weights() { return weights_; }                             // (table().total) f32
    Tensor part(Tensor arena, const std::string& name) const;         // a parameter's slice of an arena, with its shape
    void fill_weights(const std::function<void(float* values)>& f);   // f writes all (table().total)
    void weights_changed() { stale_ = true; }                         // after an update in place

    // Bytes that reserve() would take on the device (activations; not weights, gradients, moments).
    static int64_t activation_bytes(const ModelConfig& c, DType compute, int B, int T, Keep keep);
    // Makes room for batches up to B rows of T tokens; anything larger makes room by itself, forgetting what was kept.
    void reserve(int B, int T, Keep keep);

    // ---- training and scoring ----
    // losses (B*T) f32 on the device, 0 where there is no target. No gradients.
    void loss(const Batch& batch, Tensor losses);
    // The same, and grads (table().trained) += scale * d(sum of losses)/d(weights).
    void loss_and_gradients(const Batch& batch, Tensor losses, Tensor grads, float scale);

    // ---- inference ----
    KvCache make_cache(int B, int64_t capacity);
    static int64_t cache_bytes(const ModelConfig& c, int B, int64_t capacity, DType dtype);
    // Runs the blocks and the last norm over the batch; with a cache, appends to it and attends to all of it.
    // skip_below: Attention::skip_below.
    void forward(const Batch& batch, KvCache* cache = nullptr, float skip_below = 0);
    // After forward(): logits (count, V) f32 of tokens [begin, begin + count) of the flattened batch, into host memory.
    void logits(int64_t begin, int64_t count, float* host);
    // After forward() of a batch with targets: losses (count) f32 of those tokens, on the device.
    void losses(int64_t begin, int64_t count, Tensor losses);
    // After forward() with Keep::all: q, k and v of a layer (N, (H+2K)*D), RoPE applied.
    Tensor qkv(int layer) const;

private:
    struct Layer;        // weights of one block
    struct Kept;         // activations of one block
    struct Activations;  // all buffers of one batch shape
    struct Inputs;       // a batch on the device

    void upload(const Batch& batch, const KvCache* cache);
    void refresh(int64_t distances);  // weight copies and prior tables
    void make_tables(int64_t distances);
    void make_position_table(int64_t first, int64_t last);
    Attention attention(int layer) const;
    void attention_part(int layer, KvCache* cache);
    void feed_forward_part(int layer);
    void recompute(int layer);
    void attention_backward(int layer, Tensor grads);
    void backward_layer(int layer, Tensor grads);
    void classifier(Tensor losses, Tensor grads, float scale);

    Backend& device_;
    ModelConfig config_;
    ParameterTable table_;
    DType compute_;
    Arena weight_memory_, table_memory_, position_memory_;
    Tensor weights_;
    std::vector<Layer> layers_;
    Tensor embedding_, norm_;
    WeightId output_ = -1;
    bool stale_ = true;
    int64_t table_capacity_ = 0;
    Tensor bias_, dbias_[kMaxThetas];  // (layers or 1, H, distances)
    Tensor position_table_;            // RoPE (P, D) or sinusoidal (P, C), from position_first_ on
    int64_t position_first_ = 0;
    std::unique_ptr<Activations> act_;
    std::unique_ptr<Inputs> in_;
    float skip_below_ = 0;
};

// Rows of logits made at a time, so that (N, V) never exists.
int64_t logit_rows(const ModelConfig& c, int64_t N);

}  // namespace bam
