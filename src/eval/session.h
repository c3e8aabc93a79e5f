// An inference session: a model with a KV cache. Tokens are read in chunks (prefill) or one by one (decoding); chunk size
// never changes a result beyond rounding, there is no largest position, and logits are made only where wanted, so memory is
// linear in length.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "eval/reader.h"
#include "model.h"

namespace bam {

// Share of a row's sum that a skipped key block stays below.
constexpr float kSkipBelow = 1e-9f;

struct SessionOptions {
    int chunk = 512;             // tokens read at a time, over all rows
    bool document_mask = false;  // attention and positions restart at documents as `data` says
    DataConfig data;             // separator and positions; used with document_mask
    float skip_below = 0;        // Attention::skip_below; 0: every key block is computed
    std::function<void(int64_t tokens)> on_chunk;  // told after every chunk how many tokens it read; may throw to stop
};

struct SessionMemory {
    int64_t weights = 0, cache = 0, activations = 0, tables = 0;
    int64_t total() const { return weights + cache + activations + tables; }
};

// What a session of `rows` rows of `capacity` tokens takes, weights included.
SessionMemory plan_session(const ModelConfig& m, const Backend& device, DType compute, int rows, int64_t capacity, int chunk);

// Errors: Error(kExitFailure) when the device's total memory cannot hold the plan; `what` begins the line.
void require_memory(const SessionMemory& plan, const Backend& device, const std::string& what);

std::string describe(const SessionMemory& plan);  // "1.2 GiB (weights 1.1 GiB, cache ...)"

// Uses the model in place: its activation buffers are remade, its weights are left alone.
class Session : public Reader {
public:
    Session(Model& model, SessionOptions options);

    int vocab_size() const override { return model_.config().vocab_size; }
    void start(int rows, int64_t capacity) override;
    // Errors: Error(kExitData) for an id outside the vocabulary, Error(kExitFailure) for a row longer than its capacity.
    void feed(const std::vector<RowPart>& parts, const LogitsSink& sink) override;
    std::vector<std::vector<double>> logprobs(const std::vector<ScoredRow>& rows) override;

    int64_t length(int row) const { return rows_[row].length; }

private:
    struct Row {
        int64_t length = 0;          // tokens read
        int64_t document_begin = 0;  // index of the current document's first token
    };
    struct Place {
        int64_t key_begin = 0, position = 0;
    };
    struct Chunk {
        Batch batch;
        std::vector<int> counts;     // tokens of each row; the rest is padding
        std::vector<int64_t> begin;  // of each row, in its part
    };
    using Ids = std::span<const int>;

    // Reads all rows to their ends, a chunk at a time. targets: of each token of ids, or no rows at all. The first row's tokens
    // before first_wanted need not be visited.
    void read(const std::vector<Ids>& ids, const std::vector<Ids>& targets, int64_t first_wanted,
              const std::function<void(const Chunk&)>& visit);
    void fill_row(Chunk& c, int row, Ids ids, Ids targets);
    Place enter(Row& row, int id) const;
    int64_t reuse(Ids ids, int64_t first_wanted);

    Model& model_;
    SessionOptions options_;
    KvCache cache_;
    Arena loss_memory_;
    Tensor losses_;         // (rows * T of a chunk) f32
    std::vector<Row> rows_;
    int64_t capacity_ = 0;  // tokens a row, as start() was told
    std::vector<float> logits_;
    // A session of one row remembers what its cache holds: a next row that begins alike reuses whole chunks. As chunks begin
    // at the same places either way, the values are bitwise the same.
    std::vector<int> kept_;
    int64_t reusable_ = 0;  // tokens of kept_ that were read in whole chunks from the row's start
};

}  // namespace bam
