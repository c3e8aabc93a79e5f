// Perplexity at chosen lengths (DESIGN §8): over non-overlapping windows, over sliding ones, or by absolute position in long
// documents. Means over tokens.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "eval/suite.h"
#include "loader.h"

namespace bam {

struct PerplexityOptions {
    std::vector<int64_t> lengths;
    int64_t stride = 0;             // "sliding": 0 means half the length
    int64_t tokens = 1 << 18;       // scored at each length at most, from the data's start; 0: all
    int bins = 32;                  // "by_position"
    bool document_mask = false;     // recorded; the reader does it
    DataConfig data;                // the separator, for "by_position"
};

// Tokens [begin, end) of a stream.
struct TokenRange {
    std::shared_ptr<const TokenStream> stream;
    int64_t begin = 0, end = 0;
};

// The validation tokens a model's data section names, or those of `files` if there are any.
// Errors: Error(kExitData) when there are neither.
TokenRange evaluation_tokens(const DataConfig& data, const std::vector<std::string>& files);

// variant "windows", "sliding" or "by_position". Errors: Error(kExitUsage) for an unknown variant, or a stride past the length;
// Error(kExitData) for a range too short for a length, or no document long enough.
Suite make_perplexity(const std::string& variant, const PerplexityOptions& o, const TokenRange& range, int vocab_size);

}  // namespace bam
