// One JSON file holds a whole run (DESIGN §3 "Config"). Here it becomes plain structs, checked where it enters; everything
// behind trusts them. Unknown keys, wrong types and values out of range are Error(kExitUsage) naming the key, the value, and
// what was expected (for an unknown key: the nearest name).
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "backend.h"
#include "position.h"

namespace bam {

struct RunConfig {
    std::string name = "run";
    std::string out = "runs";
    uint64_t seed = 42;
    std::string device = "auto";  // auto | cpu | cuda
    std::string dtype = "auto";   // auto | fp32 | bf16
    int threads = 0;              // 0: all the process may use
};

struct ModelConfig {
    std::string preset;  // may be empty when the dimensions are given
    int dim = 0, n_layers = 0, n_heads = 0;
    int n_kv_heads = 0;  // default n_heads
    int ffn_hidden = 0;
    int vocab_size = 0;
    double norm_eps = 1e-5;
    std::string init = "pytorch";  // pytorch | gpt2
    std::string init_from;         // a model to start from, or empty
    bool tie_embeddings = false;
    PositionConfig position;

    int head_dim() const { return dim / n_heads; }
    int qkv_dim() const { return (n_heads + 2 * n_kv_heads) * head_dim(); }
};

struct DataConfig {
    std::vector<std::string> train, val;  // globs, files, or directories with dataset.json
    std::string tokenizer;                // file or directory, or empty
    bool has_separator = false;
    int separator_id = 0;
    bool separator_at_end = true;         // position "end" | "start"
    bool document_mask = true;
    bool positions_by_document = true;    // positions "document" | "row"
    bool shuffle = true;
    int64_t val_tokens = 0, val_gap = 0;  // validation cut from the start of the training stream
};

struct OptimizerConfig {
    OptimizerKind name = OptimizerKind::radam;
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
    double prior_lr = -1;  // negative (null in JSON): the model's lr
};

struct ScheduleConfig {
    std::string name = "cosine";  // cosine | linear | wsd | constant
    int64_t warmup_steps = 0;
    double final_fraction = 0.1, decay_fraction = 0.2;
};

// Rows at a time and heads: what one launch on a GPU can count.
constexpr int kMaxRows = 65535, kMaxHeads = 65535;

struct TrainConfig {
    int seq_len = 512;
    int64_t tokens_per_step = 589824;  // a multiple of seq_len
    int micro_batch = 0;               // rows; 0: chosen
    int64_t steps = 20000;
    OptimizerConfig optimizer;
    ScheduleConfig schedule;
    double grad_clip = 1.0;            // 0: off
    int64_t val_every = 250, sample_every = 0, checkpoint_every = 500, log_priors_every = 100;
    int keep_last = 3;
    int64_t keep_every = 0;
    std::string on_nonfinite = "stop";  // stop | skip
    std::string recompute = "none";     // none | attention | block: activations made again in backward

    int64_t rows_per_step() const { return tokens_per_step / seq_len; }
};

struct EvalConfig {
    std::vector<std::string> suites;
    std::vector<int64_t> lengths;
};

struct Config {
    RunConfig run;
    ModelConfig model;
    DataConfig data;
    TrainConfig train;
    EvalConfig eval;
};

// Reads a config file, applies `sets` ("a.b=value", the value JSON or a bare string) in order, then `variant` (the --pe
// shorthand, may be empty), fills in presets and defaults, and checks everything.
Config load_config(const std::string& path, const std::vector<std::string>& sets, const std::string& variant);
Config parse_config(const nlohmann::ordered_json& j, const std::string& origin);

// The resolved config, every key present, in the design's order: what run.json holds and parse_config reads back equal.
nlohmann::ordered_json to_json(const Config& c);
nlohmann::ordered_json to_json(const ModelConfig& m);  // the "model" section as a model directory's config.json stores it
ModelConfig parse_model(const nlohmann::ordered_json& j, const std::string& origin);

// Names of the presets with their dimensions, for --help and tests; vocab_size is 0, the config gives it.
const std::vector<ModelConfig>& presets();

// The candidate closest to word by edit distance, for "did you mean".
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace bam
