// What a training run needs before it starts: memory by purpose, and the micro-batch when the config leaves it open. A
// pure function of the config and the device's total memory, never of what happens to be free.
#pragma once
#include <cstdint>
#include <string>

#include "backend.h"
#include "config.h"

namespace bam {

struct MemoryPlan {
    int64_t weights = 0, copies = 0, gradients = 0, moments = 0, activations = 0, tables = 0;
    bool keeps_copies = true;  // of the weights in the forms that matmuls take; if not, they are made at each use
    int64_t total() const { return weights + copies + gradients + moments + activations + tables; }
};

// Bytes of these copies, of all weights or where they are made at each use.
int64_t copy_bytes(const ModelConfig& m, const Backend& device, DType compute, bool kept);

// Copies are kept if they fit into the share of the device's memory that a run may take.
MemoryPlan plan_memory(const Config& c, const Backend& device, DType compute, int micro_batch);

// Rows a micro-batch: about as many tokens as keep the device busy, fewer where memory is short; where that leaves few,
// as many as fit without kept copies. Errors: Error(kExitFailure) when not even one row fits (says needed and there).
int choose_micro_batch(const Config& c, const Backend& device, DType compute);

// Writes into the config what it leaves open (dtype, micro_batch) as this device resolves it; returns the compute
// dtype.
DType resolve(Config& c, const Backend& device);

}  // namespace bam
