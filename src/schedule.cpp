// Warm-up, then cosine, linear, wsd or constant. See schedule.h.
#include "schedule.h"

#include <algorithm>
#include <cmath>

namespace bam {

double schedule_factor(const ScheduleConfig& s, int64_t k, int64_t steps) {
    const int64_t W = s.warmup_steps;
    if (k <= W) return double(k) / double(W);
    const double q = double(k - 1 - W) / double(steps - W);  // 0 at the first update after warm-up, < 1 at the last
    const double f = s.final_fraction;
    if (s.name == "cosine") return f + (1 - f) * (1 + std::cos(M_PI * q)) / 2;
    if (s.name == "linear") return 1 - (1 - f) * q;
    if (s.name == "wsd") {  // the last decay_fraction of all steps falls to f by 1 - sqrt
        const double begin = 1 - s.decay_fraction * double(steps) / double(steps - W);
        if (q <= begin || begin >= 1) return 1;
        return f + (1 - f) * (1 - std::sqrt((q - std::max(begin, 0.0)) / (1 - std::max(begin, 0.0))));
    }
    return 1;
}

}  // namespace bam
