// `bam inspect`: what a model's heads prefer by distance (the prior alone, a formula), and where they look in a prompt (measured).
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "eval/loaded_model.h"

namespace bam {

// ---- the prior alone -----------------------------------------------------------------------------------------------------

struct HeadPrior {
    double theta[kMaxThetas] = {};  // BAM's; unused otherwise
    double slope = 0;               // ALiBi's m
    double seq_scale = 0;           // s, with SSMax
    std::vector<std::pair<int64_t, double>> bias;  // at distances 0, 1, 2, 4, ... below the length
    int64_t distance_50 = 0, distance_90 = 0;      // that hold half and nine tenths of softmax(prior) from the query backwards
    std::string shape;              // "local" (beta >= 1), "heavy-tailed" (0 < beta < 1), "far-looking" (beta <= 0), "content only"
};

// weights: the model's fp32 arena. length: keys the query sees.
HeadPrior head_prior(const ModelConfig& m, const ParameterTable& t, const float* weights, int layer, int head, int64_t length);

// ---- attention of a prompt's last token ----------------------------------------------------------------------------------

using TokenSpan = std::pair<int64_t, int64_t>;  // [begin, end)

struct HeadAttention {
    double entropy = 0;    // nats; ln of the number of keys when all are alike
    double span_mass = 0;  // on the marked tokens
    int64_t distance_50 = 0, distance_90 = 0;
    struct Bin {
        int64_t from, to;  // distances [from, to): 0, 1, 2-3, 4-7, ...
        double mass;
    };
    std::vector<Bin> by_distance;
};

// One entry for each layer and head, computed on the host in double from the q and k the model made; memory linear in the prompt.
std::vector<std::vector<HeadAttention>> last_token_attention(Model& model, const std::vector<int>& ids,
                                                             const std::vector<TokenSpan>& spans, int chunk = 512);

// Tokens of every occurrence of `text` in the prompt. Errors: Error(kExitUsage) if there is none.
std::vector<TokenSpan> find_spans(const Tokenizer& tokenizer, const std::string& prompt, const std::string& text);

// ---- the command -------------------------------------------------------------------------------------------------------

struct InspectCommand {
    std::string model, prompt, span;
    int64_t passkey = 0;  // > 0: the passkey task's prompt of so many tokens, key in the middle, its digits marked
    int64_t length = 0;   // of the prior's mass; 0: the prompt's, else the trained length, else 512
    uint64_t seed = 42;
    std::string out;      // JSON file; empty: eval/inspect.json of the run, if it is a run and there is a prompt
    bool json = false;    // JSON on stdout instead of the table
    LoadOptions load;
};

nlohmann::ordered_json inspect(LoadedModel& m, const InspectCommand& c);
int inspect_command(const InspectCommand& c);

}  // namespace bam
