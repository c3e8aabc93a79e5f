// `bam eval`: runs suites on a model. Results of every item are appended to <out>/<suite>.jsonl as they come, finished items are
// not done again, and <out>/<suite>.json sums them up (format "bam-eval").
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "eval/loaded_model.h"

namespace bam {

struct EvalOptions {
    std::string model;
    LoadOptions load;
    std::vector<std::string> suites;   // passkey, niah, perplexity, choice
    std::string variant;               // of the only suite; empty: each one's default
    std::vector<int64_t> lengths;      // empty: the model's training length times 1, 2, 4, ... 16
    int samples = 0;                   // a length; 0: the suite's own number
    uint64_t seed = 42;
    double minutes = 0;                // stop after about so long; 0: no limit
    bool exact = false;                // no key block is skipped
    bool document_mask = false;        // perplexity: attention stays inside documents
    std::string out;                   // empty: eval/ of the run, or of the model directory
    bool quiet = false;                // nothing on stdout
    // passkey
    std::string position = "equidistant";
    // perplexity
    std::vector<std::string> data;     // shards instead of the model's validation data
    int64_t stride = 0, tokens = 1 << 18;
    // niah
    std::string haystack;              // essay text
    // choice
    std::vector<std::string> items;    // JSONL files
};

// Where the results of a model go unless told: <run>/eval for a run or one of its checkpoints, else <model>/eval.
std::string default_eval_directory(const std::string& model);

// Returns kExitDone, also when the time budget ran out, or kExitInterrupted after a signal, results so far being saved.
int evaluate(const EvalOptions& o);

}  // namespace bam
