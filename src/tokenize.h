// `bam tokenize`: text files and JSON lines -> a data set (shards, tokenizer file, dataset.json), in memory that does
// not grow with the input.
#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "dataset.h"

namespace bam {

struct TokenizeOptions {
    std::string tokenizer;            // file, directory or built-in name
    std::string out;                  // directory
    std::vector<std::string> inputs;  // .txt: a document each; .jsonl: a document a line, in "text"; -: one from stdin
    bool force = false;               // replace the data set that is there
    int64_t shard_tokens = 100'000'000;
    // Validation: so many documents, or this share of them (at least one), drawn by seed. Whole documents, 0: none.
    int64_t val_documents = 0;
    double val_fraction = 0;
    uint64_t seed = 42;
};

// Errors: Error(kExitUsage) for options that do not fit together, Error(kExitData) naming file and line of a bad
// document and what was expected, Error(kExitFailure) when the output cannot be written; in every case nothing stays
// behind.
DatasetInfo tokenize(const TokenizeOptions& options);

// Three lines for people: tokenizer, then tokens, documents and bytes of each part.
void print_dataset(const DatasetInfo& d, std::ostream& out);

}  // namespace bam
