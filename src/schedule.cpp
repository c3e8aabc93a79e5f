// Warm-up, then cosine, linear, wsd or constant. See schedule.h.
#include "schedule.h"

#include <cmath>

namespace bam {

double schedule_factor(const ScheduleConfig& s, int64_t k, int64_t steps) {
    const int64_t W = s.warmup_steps;
    if (k <= W) return double(k) / double(W);
    const double q = double(k - 1 - W) / double(steps - W);  // 0 at the first update after warm-up, < 1 at the last
    const double f = s.final_fraction;
    if (s.name == "cosine") return f + (1 - f) * (1 + std::cos(M_PI * q)) / 2;
    if (s.name == "linear") return 1 - (1 - f) * q;
    if (s.name == "wsd") {  // constant, then 1 - sqrt over the last decay_fraction of the updates after warm-up
        const double r = (q - (1 - s.decay_fraction)) / s.decay_fraction;
        return q > 1 - s.decay_fraction ? f + (1 - f) * (1 - std::sqrt(r)) : 1;
    }
    return 1;
}

}  // namespace bam
