// What a training run plans with little memory: fewer rows a micro-batch, then weights whose copies are made at each
// use.
#include "plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "batches.h"
#include "cpu/backend.h"
#include "refusal.h"
#include "stepper.h"
#include "test_support.h"

namespace bam::test {
namespace {

class SmallCpu : public CpuBackend {
public:
    explicit SmallCpu(int64_t bytes) : CpuBackend(2, choose_isa()), bytes_(bytes) {}
    int64_t total_memory() const override { return bytes_; }

private:
    int64_t bytes_;
};

constexpr int64_t kGiB = 1 << 30;

Config config_of(const std::string& preset, int seq_len, int64_t tokens, int micro_batch = 0) {
    const nlohmann::ordered_json j = {
        {"model", {{"preset", preset}, {"vocab_size", preset == "nano" ? 67 : 32768}}},
        {"data", {{"train", {"none.bin"}}}},
        {"train", {{"seq_len", seq_len}, {"tokens_per_step", tokens}, {"micro_batch", micro_batch}}}};
    return parse_config(j, "test");
}

// The device that is just too small, or just large enough, for what `plan` needs.
int64_t memory_for(const MemoryPlan& plan, bool enough) {
    return int64_t(double(plan.total()) / 0.9) + (enough ? 2 : -2);
}

TEST(Plan, TheLargestPresetTrainsWith24GiB) {
    const Config c = config_of("l24", 512, 8192);
    for (DType t : {DType::f32, DType::bf16}) {
        const SmallCpu device(24 * kGiB);
        const int rows = choose_micro_batch(c, device, t);
        const MemoryPlan p = plan_memory(c, device, t, rows);
        EXPECT_FALSE(p.keeps_copies);
        EXPECT_GE(rows, t == DType::bf16 ? 4 : 2);
        EXPECT_LE(double(p.total()), 0.9 * 24 * kGiB);
    }
    const SmallCpu large(48 * kGiB);
    EXPECT_TRUE(plan_memory(c, large, DType::bf16, choose_micro_batch(c, large, DType::bf16)).keeps_copies);
}

TEST(Plan, FewerRowsComeBeforeCopiesMadeAtEachUse) {
    const Config c = config_of("nano", 128, 1024);
    const SmallCpu any(kGiB);
    for (int rows : {8, 4}) {
        const SmallCpu device(memory_for(plan_memory(c, any, DType::f32, rows), true));
        EXPECT_EQ(choose_micro_batch(c, device, DType::f32), rows);
        EXPECT_TRUE(plan_memory(c, device, DType::f32, rows).keeps_copies);
    }
    const SmallCpu device(memory_for(plan_memory(c, any, DType::f32, 1), false));
    EXPECT_FALSE(plan_memory(c, device, DType::f32, choose_micro_batch(c, device, DType::f32)).keeps_copies);
}

TEST(Plan, TooLittleMemoryIsSaid) {
    const Config c = config_of("l24", 512, 8192);
    const std::string line = refusal([&] { choose_micro_batch(c, SmallCpu(8 * kGiB), DType::bf16); }, kExitFailure);
    EXPECT_NE(line.find("8.00 GiB in all"), std::string::npos) << line;
}

TEST(Plan, CopiesMadeAtEachUseTrainTheSameToTheBit) {
    const Config c = config_of("nano", 48, 192, 2);
    for (DType t : {DType::f32, DType::bf16}) {
        std::vector<float> weights[2], losses[2];
        for (bool keeps : {true, false}) {
            const SmallCpu any(kGiB);
            SmallCpu device(memory_for(plan_memory(c, any, t, 2), keeps));
            ASSERT_EQ(plan_memory(c, device, t, 2).keeps_copies, keeps);
            Stepper stepper(device, c, t);
            const ParameterTable& table = stepper.model().table();
            stepper.model().fill_weights([&](float* values) { init_weights(table, c.model, 1, values); });
            for (int step = 0; step < 3; ++step) {
                stepper.begin();
                for (int64_t row : {0, 2})
                    stepper.accumulate(make_batch(random_tokens(2 * 49, 67, uint64_t(10 * step + row)), 2, 48, c.data),
                                       row);
                const Stepper::Result r = stepper.measure();
                losses[keeps].push_back(float(r.loss));
                stepper.apply(r, step + 1, 1.0);
            }
            weights[keeps].resize(size_t(table.total));
            device.download(weights[keeps].data(), stepper.model().weights());
        }
        EXPECT_EQ(losses[0], losses[1]) << name_of(t);
        EXPECT_EQ(weights[0], weights[1]) << name_of(t);
        EXPECT_NE(losses[0].front(), losses[0].back());
    }
}

}  // namespace
}  // namespace bam::test
