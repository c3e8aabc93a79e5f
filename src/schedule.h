// Learning-rate schedules: pure functions of the update number (DESIGN §2.4).
#pragma once
#include <cstdint>

#include "config.h"

namespace bam {

// Factor on the base learning rate for update k = 1 .. steps.
double schedule_factor(const ScheduleConfig& s, int64_t k, int64_t steps);

}  // namespace bam
