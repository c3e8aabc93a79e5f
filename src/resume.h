// How a training run starts: afresh, from a checkpoint, or not at all because it is finished (DESIGN §4).
#pragma once
#include <string>

#include "checkpoint.h"
#include "config.h"

namespace bam {

struct Start {
    std::string checkpoint;  // empty: afresh
    TrainState state;
};

// Decides for run_dir by `resume` (auto | no | a checkpoint). What the config leaves open (threads 0, dtype "auto",
// micro_batch 0) is taken from the checkpoint, so that a run goes on bitwise. With "no", and with a checkpoint older than the
// newest, files of the earlier run are moved to <run>/replaced-N, never deleted. Errors: Error(kExitUsage) naming every config field
// that differs and may not, unless `force`.
Start choose_start(const std::string& run_dir, const std::string& resume, bool force, Config& config, bool quiet);

}  // namespace bam
