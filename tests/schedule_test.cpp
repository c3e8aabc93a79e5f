// Learning-rate factors against values worked by hand from DESIGN §2.4.
#include "schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace bam::test {
namespace {

ScheduleConfig schedule(const char* name, int64_t warmup, double final_fraction = 0.1, double decay_fraction = 0.2) {
    ScheduleConfig s;
    s.name = name;
    s.warmup_steps = warmup;
    s.final_fraction = final_fraction;
    s.decay_fraction = decay_fraction;
    return s;
}

void expect_table(const ScheduleConfig& s, const std::vector<double>& wanted) {
    const int64_t steps = int64_t(wanted.size());
    for (int64_t k = 1; k <= steps; ++k)
        EXPECT_NEAR(schedule_factor(s, k, steps), wanted[size_t(k - 1)], 1e-12) << s.name << " update " << k;
}

TEST(Schedule, CosineWithWarmup) {  // q = 0, 1/6, ... 5/6: cos 0, 30, ... 150 degrees
    const double c30 = std::sqrt(3.0) / 2;
    expect_table(schedule("cosine", 2),
                 {0.5, 1, 1, 0.1 + 0.45 * (1 + c30), 0.775, 0.55, 0.325, 0.1 + 0.45 * (1 - c30)});
}

TEST(Schedule, CosineWithoutWarmupStartsAtTheFullRate) {
    expect_table(schedule("cosine", 0, 0.0), {1, 0.75, 0.25});
    expect_table(schedule("cosine", 0, 1.0), {1, 1, 1, 1});
    expect_table(schedule("cosine", 0), {1});
}

TEST(Schedule, Linear) {
    expect_table(schedule("linear", 1), {1, 1, 0.775, 0.55, 0.325});
}

TEST(Schedule, WarmupStableDecay) {  // the last tenth of a hundred: 1 - sqrt of 0, 0.1, ... 0.9
    std::vector<double> wanted = {0.25, 0.5, 0.75, 1};
    for (int i = 0; i < 90; ++i) wanted.push_back(1);
    for (int i = 0; i < 10; ++i) wanted.push_back(0.2 + 0.8 * (1 - std::sqrt(i / 10.0)));
    ASSERT_EQ(wanted.size(), 104u);
    const ScheduleConfig s = schedule("wsd", 4, 0.2, 0.1);
    for (int64_t k = 1; k <= 104; ++k) EXPECT_NEAR(schedule_factor(s, k, 104), wanted[size_t(k - 1)], 1e-7) << k;
}

TEST(Schedule, WarmupStableDecayAtItsLimits) {
    expect_table(schedule("wsd", 1, 0.1, 0.0), {1, 1, 1, 1, 1});                                    // no decay at all
    expect_table(schedule("wsd", 0, 0.0, 1.0), {1, 0.5, 1 - std::sqrt(0.5), 1 - std::sqrt(0.75)});  // nothing but
}

TEST(Schedule, Constant) {
    expect_table(schedule("constant", 3), {1 / 3.0, 2 / 3.0, 1, 1, 1, 1});
}

TEST(Schedule, WarmupMayTakeAllUpdates) {
    for (const char* name : {"cosine", "linear", "wsd", "constant"}) {
        expect_table(schedule(name, 4), {0.25, 0.5, 0.75, 1});
        expect_table(schedule(name, 1), {1});
    }
}

TEST(Schedule, NearsTheFinalFraction) {
    for (const char* name : {"cosine", "linear", "wsd"}) {
        const ScheduleConfig s = schedule(name, 100);
        EXPECT_NEAR(schedule_factor(s, 20000, 20000), 0.1, 2e-3) << name;
        EXPECT_GT(schedule_factor(s, 20000, 20000), 0.1) << name;
        for (int64_t k = 101; k < 20000; ++k)
            ASSERT_GE(schedule_factor(s, k, 20000), schedule_factor(s, k + 1, 20000)) << name << k;
    }
}

}  // namespace
}  // namespace bam::test
