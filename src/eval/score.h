// Log-probabilities of given tokens, in one piece or in overlapping windows.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "eval/reader.h"

namespace bam {

// Tokens [begin, end) of a text are read; those from `from` on are scored.
struct Window {
    int64_t begin, end, from;
};

// Windows of `context` inputs that begin every `stride` tokens and score each of tokens 1 .. n-1 once: the first all of its
// own, the others what no earlier one scored. 1 <= stride <= context.
std::vector<Window> make_windows(int64_t n, int64_t context, int64_t stride);

// ln p of each token given those before it in its window; NaN for the first. context 0: one window over everything.
std::vector<double> score_tokens(Reader& reader, const std::vector<int>& ids, int64_t context, int64_t stride);

// Ids of a shard (by its magic number), or of a text of decimal ids separated by white space or commas.
// Errors: Error(kExitData) naming the file and place.
std::vector<int> read_token_file(const std::string& path, int vocab_size);

}  // namespace bam
