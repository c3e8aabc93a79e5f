// What evaluation asks of a language model: tokens go in, row by row, and what it thinks of the next ones comes out. Session
// is the real one; tests plug in stand-ins whose answers are known.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace bam {

// Tokens appended to one row.
struct RowPart {
    std::vector<int> ids;
    int64_t logits_from = -1;  // logits are wanted after ids[logits_from] and all later ones; -1: none
};

// A whole row whose tokens [from, end) are scored given all before them; from >= 1.
struct ScoredRow {
    std::vector<int> ids;
    int64_t from = 1;
};

// Logits (V) of the token after ids[index] of `row`'s part.
using LogitsSink = std::function<void(int row, int64_t index, const float* logits)>;

class Reader {
public:
    virtual ~Reader() = default;
    virtual int vocab_size() const = 0;
    // Forgets all rows; then there are `rows` empty ones with room for `capacity` tokens each.
    virtual void start(int rows, int64_t capacity) = 0;
    // Appends parts[row] to each row; a part may be empty.
    virtual void feed(const std::vector<RowPart>& parts, const LogitsSink& sink) = 0;
    // ln p of each scored token, by row. Forgets what was fed before.
    virtual std::vector<std::vector<double>> logprobs(const std::vector<ScoredRow>& rows);
};

// ln softmax(logits)[target], in double.
double log_softmax_at(const float* logits, int V, int target);

// Index of the largest value, the first of equal ones.
int argmax(const float* x, int n);

}  // namespace bam
