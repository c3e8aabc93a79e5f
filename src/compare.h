// `bam compare`: every variant x seed of one config, trained and evaluated by child `bam` processes, differing in nothing
// else; with the proof of that, and one table at the end. What is finished is skipped when started again.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "config.h"

namespace bam {

struct CompareOptions {
    std::string config;
    std::vector<std::string> sets;   // for all variants
    std::string pe = "all";          // "all" or names separated by commas
    std::vector<std::string> extra;  // further variants: "NAME: PE key=value key=value"
    int seeds = 1;                   // run.seed, run.seed + 1, ...
    int jobs = 1;                    // variants at a time, sharing the cores
    std::string out;                 // directory; empty: <run.out>/<run.name>-compare
};

// One variant with one seed: its whole config, named "<variant>-s<seed>", in <out>/runs.
struct ComparePart {
    std::string variant;
    uint64_t seed;
    Config config;
};

std::vector<ComparePart> compare_parts(const CompareOptions& o);

// What shows that the parts differ in the encoding only: per part its trained parameters and those that not all have, by name; xxh64
// of the initial weights that all share, and of the token rows training will read; the config keys that differ from the first part.
nlohmann::ordered_json compare_proof(const std::vector<ComparePart>& parts);

// Collects metrics.jsonl and eval/*.json of all parts: mean and standard deviation over seeds of each variant's final
// validation loss, tok/s, perplexity and passkey accuracy by length.
nlohmann::ordered_json compare_results(const std::vector<ComparePart>& parts);
std::string results_table(const nlohmann::ordered_json& results);
std::string results_csv(const nlohmann::ordered_json& results);

// kExitDone, kExitInterrupted after a signal (start again to go on), or kExitFailure if a part failed; the others are done all
// the same.
int compare(const CompareOptions& o);

}  // namespace bam
