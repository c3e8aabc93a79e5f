// Agreement with numbers that other programs computed (DESIGN §2.5): first of the double-precision reference, then of the
// product.
#include <gtest/gtest.h>

#include <cmath>

#include "golden.h"
#include "reference_model.h"
#include "test_support.h"

namespace bam::test {
namespace {

// Largest |got - wanted| over one tensor, got from got[0]; NaN counts as infinite.
template <typename T>
double worst(const T* got, const std::vector<float>& wanted) {
    double w = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        const double d = std::fabs(double(got[i]) - double(wanted[i]));
        w = std::isnan(d) ? HUGE_VAL : std::max(w, d);
    }
    return w;
}

// Gradients within 1e-5 max|g| + 1e-7, and exact zeros where the other program has them, whatever precision.
template <typename T>
void expect_gradients(const Golden& g, const ParameterTable& table, const T* grads) {
    int seen = 0;
    for (const Parameter& p : table.all) {
        const auto it = g.expected.find("grad." + p.name);
        if (it == g.expected.end()) continue;
        ++seen;
        EXPECT_LE(worst(grads + p.offset, it->second), 1e-5 * max_abs(it->second) + 1e-7) << g.name() << " " << p.name;
        if (p.name != "tok_embeddings.weight" || g.model.tie_embeddings) continue;
        for (size_t i = 0; i < it->second.size(); ++i) {
            if (it->second[i] != 0) continue;
            ASSERT_EQ(grads[size_t(p.offset) + i], T(0)) << g.name() << " " << p.name << " " << i;
        }
    }
    EXPECT_GE(seen, 20);
}

class GoldenTest : public testing::TestWithParam<Golden> {};

TEST(GoldenData, IsThere) {
    EXPECT_FALSE(all_goldens().empty());
    if (goldens_dir().empty()) GTEST_SKIP() << "no goldens directory (BAM_GOLDENS): only the copies in tests/data are used";
    EXPECT_GE(all_goldens().size(), 11u);
}

TEST_P(GoldenTest, ReferenceAgrees) {
    const Golden& g = GetParam();
    const ParameterTable table = make_parameter_table(g.model);
    const std::vector<float> arena = g.arena(table);
    const std::vector<double> weights(arena.begin(), arena.end());
    const ReferenceOutput out = reference_run(g.model, table, weights, reference_batch(g.tokens, g.rows, g.train.seq_len, g.data));
    EXPECT_LE(worst(out.logits.data(), g.expected.at("logits")), 1e-5);
    EXPECT_NEAR(out.loss, g.expected.at("loss")[0], 1e-5);
    expect_gradients(g, table, out.grads.data());
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest, testing::ValuesIn(all_goldens()), [](const auto& info) {
    return info.param.case_name();
});

}  // namespace
}  // namespace bam::test
