// `bam train`: from a config to a finished run directory, resumable at any step (DESIGN §2.4, §3, §4).
#pragma once
#include <cstdint>
#include <string>

#include "config.h"

namespace bam {

struct TrainOptions {
    Config config;
    std::string resume = "auto";  // auto | no | a checkpoint
    bool force_resume = false;    // go on although the config differs
    int64_t stop_at = 0;          // > 0: save after this step and return kExitInterrupted
    bool dry_run = false;
    bool quiet = false;           // nothing on stdout (bam compare)
};

// Returns kExitDone, or kExitInterrupted after a signal or stop_at. Everything else is an Error.
int train(const TrainOptions& options);

// The run directory of a config: <out>/<name>.
std::string run_directory(const Config& c);

}  // namespace bam
