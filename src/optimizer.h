// RAdam and AdamW as scalars for one fused update of the arenas (DESIGN §2.4); moments live in one arena each.
#pragma once
#include <cstdint>
#include <vector>

#include "backend.h"
#include "config.h"
#include "parameters.h"

namespace bam {

// The scalars of update t = 1, 2, ...; grad_scale multiplies every gradient (the clip factor).
UpdateStep update_step(const OptimizerConfig& o, int64_t t, double grad_scale);

// Contiguous ranges of the arena with their learning rate and weight decay; frozen parameters are in none.
std::vector<UpdateGroup> update_groups(const ParameterTable& t, const OptimizerConfig& o, double schedule_factor);

// min(1, clip / (norm + 1e-6)); 1 when clip is 0.
double clip_factor(double norm, double clip);

}  // namespace bam
