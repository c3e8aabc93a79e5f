// The language of `bam make-corpus`: a few hundred words, templates with slots, and filler sentences of any wanted
// length in tokens, so that documents can be made to measure.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tokenizer.h"

namespace bam {

// A sequence of random numbers: f(seed, stream, 0), f(seed, stream, 1), ...
class Draw {
public:
    Draw(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
    int below(int64_t n);  // uniform in [0, n)
    int between(int low, int high) { return low + below(high - low + 1); }
    bool one_in(int n) { return below(n) == 0; }

private:
    uint64_t seed_, stream_, next_ = 0;
};

// The words of a slot: "name", "city", "color", ... A name that is no slot is a std::logic_error.
const std::vector<std::string>& words_of(const std::string& slot);

// Fills "{slot}" in a template: from `bound` if it is there, else with a word of that slot.
using Bindings = std::map<std::string, std::string>;
std::string fill_in(const std::string& text, const Bindings& bound, Draw& draw);

// A sentence of exactly this many tokens, the full stop included.
constexpr int kShortestSentence = 3, kLongestSentence = 17;
std::string prose_sentence(int tokens, Draw& draw);

// Sentences of `tokens` tokens together; none for 0. Not for 1 and 2, which no sentence has.
std::vector<std::string> prose(int tokens, Draw& draw);

// A tokenizer for all of the above, digits, punctuation, and the words of `more` (templates too).
std::unique_ptr<Tokenizer> make_prose_tokenizer(const std::vector<std::string>& more);

}  // namespace bam
