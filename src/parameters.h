// The table of a model's parameters: names (DESIGN §3), shapes, places in one contiguous fp32 arena, optimizer group and
// initial values. Device-free: checkpoints, `--dry-run` and tests use it without a model. wq, wk, wv lie next to each other,
// so that (H+2K)*D x C is one matmul; likewise w1 and w3.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "config.h"

namespace bam {

enum class ParameterGroup : uint8_t { decayed, plain, prior, frozen };  // matrices | norms, s_h | trained thetas | the rest

struct Parameter {
    std::string name;
    std::vector<int64_t> shape;
    int64_t offset = 0;  // elements from the arena's start
    ParameterGroup group = ParameterGroup::decayed;
    int64_t numel() const {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        return n;
    }
};

struct ParameterTable {
    std::vector<Parameter> all;    // in arena order: decayed, plain, prior, frozen
    int64_t trained = 0;           // elements before the frozen ones: length of gradients and moments
    int64_t total = 0;             // length of the weight arena
    const Parameter& at(const std::string& name) const;  // std::logic_error if missing
    const Parameter* find(const std::string& name) const;
};

ParameterTable make_parameter_table(const ModelConfig& m);

// Initial weights (DESIGN §2.1): a function of the seed and each tensor's name only.
void init_weights(const ParameterTable& t, const ModelConfig& m, uint64_t seed, float* weights);

// Matrix elements that count in model FLOPs: all matrices incl. the output one, not the embedding lookup (DESIGN §5).
int64_t matmul_parameters(const ModelConfig& m);
// Training FLOPs a token: 6 * matmul_parameters + 6 L C T.
double training_flops_per_token(const ModelConfig& m, int64_t seq_len);

}  // namespace bam
