// `bam make-corpus`: documents in which facts stated somewhere are asked for later, among filler prose, with a
// word-level tokenizer of their own. A corpus small enough for a laptop's CPU on which it shows how far an encoding
// reads.
//
// Every row of seq_len tokens holds whole documents: none crosses a multiple of seq_len, so that with the document mask
// every question finds its fact. Same options -> same bytes. Constant memory.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tokenizer.h"

namespace bam {

// One 5-digit number in ten never occurs in training documents: evaluation asks for these, and so do the validation
// documents.
bool is_held_out_key(int key);

struct CorpusOptions {
    std::string out;
    int64_t tokens = 16'000'000;  // of training documents; rounded up to rows, as val_tokens
    int64_t val_tokens = 131'072;
    int seq_len = 128;
    uint64_t seed = 1;
    bool force = false;  // replace a data set in `out`
};

constexpr int kShortestRow = 32;  // least seq_len

// The vocabulary of every corpus and of DESIGN §8's passkey task.
std::unique_ptr<Tokenizer> make_corpus_tokenizer();

// The documents of row `row`, as text; with their separators they are exactly seq_len tokens.
std::vector<std::string> corpus_row(const Tokenizer& tokenizer, uint64_t seed, bool held_out, int64_t row, int seq_len);

// Writes shards, dataset.json and tokenizer.json. Errors: Error(kExitUsage) for a seq_len below kShortestRow or no
// tokens, and those of DatasetWriter.
void make_corpus(const CorpusOptions& options);

}  // namespace bam
