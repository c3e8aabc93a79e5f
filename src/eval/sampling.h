// From logits to the next token.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace bam {

struct SampleOptions {
    int max_tokens = 128;
    double temperature = 0;         // 0: always the likeliest token
    int top_k = 0;                  // only the k likeliest; 0: all
    double top_p = 1;               // only the likeliest whose probabilities reach p together
    double min_p = 0;               // only those at least min_p times as likely as the likeliest
    double repetition_penalty = 1;  // logits of tokens already in the text: divided if positive, multiplied if negative
    std::vector<std::string> stop;  // texts that end the answer; not part of it
    uint64_t seed = 42;
};

// Errors: Error(kExitUsage) naming the option, its value and what was expected.
void check_sampling(const SampleOptions& o);

// The next token; `seen` are the row's tokens so far, u in [0, 1) decides. Penalty, temperature, top-k, top-p and min-p act in
// this order; equal logits rank by id.
int pick_token(const float* logits, int V, const std::vector<int>& seen, const SampleOptions& o, double u);

}  // namespace bam
