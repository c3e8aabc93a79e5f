// Agreement with numbers that other programs computed (DESIGN §2.5): first of the double-precision reference, then of
// the product.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "golden.h"
#include "product.h"
#include "reference_model.h"
#include "schedule.h"
#include "stepper.h"
#include "subjects.h"
#include "test_support.h"

namespace bam::test {
namespace {
using nlohmann::json;

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
    if (goldens_dir().empty())
        GTEST_SKIP() << "no goldens directory (BAM_GOLDENS): only the copies in tests/data are used";
    EXPECT_GE(all_goldens().size(), 11u);
}

TEST_P(GoldenTest, ReferenceAgrees) {
    const Golden& g = GetParam();
    const ParameterTable table = make_parameter_table(g.model);
    const std::vector<float> arena = g.arena(table);
    const std::vector<double> weights(arena.begin(), arena.end());
    const ReferenceOutput out =
        reference_run(g.model, table, weights, reference_batch(g.tokens, g.rows, g.train.seq_len, g.data));
    EXPECT_LE(worst(out.logits.data(), g.expected.at("logits")), 1e-5);
    EXPECT_NEAR(out.loss, g.expected.at("loss")[0], 1e-5);
    expect_gradients(g, table, out.grads.data());
}

TEST_P(GoldenTest, ProductAgrees) {
    const Golden& g = GetParam();
    const ParameterTable table = make_parameter_table(g.model);
    const ReferenceBatch batch = reference_batch(g.tokens, g.rows, g.train.seq_len, g.data);
    const ProductOutput out = Product(g.model, g.arena(table)).run(batch);
    EXPECT_LE(worst(out.logits.data(), g.expected.at("logits")), 1e-5);
    EXPECT_NEAR(out.loss(), g.expected.at("loss")[0], 1e-5);
    expect_gradients(g, table, out.grads.data());
}

// Losses 1e-5, grad_norms 1e-5 relative, final weights 1e-4.
TEST_P(GoldenTest, ProductTrainsAlike) {
    const Golden& g = GetParam();
    Config config;
    config.model = g.model, config.data = g.data, config.train = g.train;
    config.train.tokens_per_step = int64_t(g.rows) * g.train.seq_len;
    const auto device = make_test_backend(1);
    Stepper stepper(*device, config, DType::f32);
    const ParameterTable& table = stepper.model().table();
    stepper.model().fill_weights([&](float* values) { std::ranges::copy(g.arena(table), values); });
    const Batch batch = product_batch(reference_batch(g.tokens, g.rows, g.train.seq_len, g.data));
    for (int64_t k = 1; k <= g.train.steps; ++k) {
        stepper.begin();
        stepper.accumulate(batch, 0);
        const Stepper::Result r = stepper.measure();
        EXPECT_NEAR(r.loss, g.expected.at("losses")[size_t(k - 1)], 1e-5) << "step " << k;
        EXPECT_NEAR(r.grad_norm / g.expected.at("grad_norms")[size_t(k - 1)], 1.0, 1e-5) << "step " << k;
        stepper.apply(r, k, schedule_factor(config.train.schedule, k, config.train.steps));
    }
    std::vector<float> weights(size_t(table.total));
    device->download(weights.data(), stepper.model().weights());
    for (const Parameter& p : table.all) {
        const auto it = g.expected.find("final." + p.name);
        if (it == g.expected.end()) continue;  // the compact copy has none
        EXPECT_LE(worst(weights.data() + p.offset, it->second), 1e-4) << p.name;
    }
}

// ---- through the command line --------------------------------------------------------------------------------------

// ln softmax(logits of one token)[id], in double.
double log_probability(const float* logits, int vocab, int id) {
    double top = logits[0], sum = 0;
    for (int v = 0; v < vocab; ++v) top = std::max(top, double(logits[v]));
    for (int v = 0; v < vocab; ++v) sum += std::exp(logits[v] - top);
    return logits[id] - top - std::log(sum);
}

// Each row alone: its first token is not scored, the others as the row's logits say.
TEST_P(GoldenTest, ScoreCommandAgrees) {
    REQUIRE_BAM();
    const Golden& g = GetParam();
    const int T = g.train.seq_len, V = g.model.vocab_size;
    const char* positions = g.data.positions_by_document ? "document" : "row";
    for (int row = 0; row < g.rows; ++row) {
        const TempDir dir;
        const std::vector<int32_t> ids(g.tokens.begin() + row * T, g.tokens.begin() + row * T + T + 1);
        std::string text;
        for (int32_t id : ids) text += std::to_string(id) + " ";
        const std::string file = dir.file(row % 2 ? "ids.bin" : "ids.txt");  // a shard or text
        row % 2 ? write_shard(file, ids) : write_file(file, text);
        std::vector<std::string> args = {"score", g.directory, "--tokens", file, "--device", test_device(), "--dtype", "fp32"};
        if (g.data.document_mask) args.insert(args.end(), {"--document-mask", "--positions", positions});
        if (!g.data.separator_at_end) args.insert(args.end(), {"--separator", "2", "--separator-position", "start"});
        const RunResult r = run_bam(args);
        ASSERT_EQ(r.code, 0) << r.err;
        const std::vector<std::string> lines = lines_of(r.out);
        ASSERT_EQ(lines.size(), size_t(T + 1)) << r.out;
        for (int t = 0; t <= T; ++t) {
            const json line = json::parse(lines[size_t(t)]);
            ASSERT_EQ(line["id"], ids[size_t(t)]);
            ASSERT_EQ(line["logprob"].is_null(), t == 0) << lines[size_t(t)];
            if (t == 0) continue;
            const float* logits = g.expected.at("logits").data() + size_t(row * T + t - 1) * size_t(V);
            EXPECT_NEAR(double(line["logprob"]), log_probability(logits, V, ids[size_t(t)]), 2e-5) << "token " << t;
        }
    }
}

json run_config(const Golden& g, const TempDir& dir) {
    const json recipe = json::parse(read_file(g.directory + "/train.json"));
    json c;
    c["run"] = {{"name", "golden"}, {"out", dir.file("runs")}, {"device", "cpu"}, {"dtype", "fp32"}, {"threads", 1}};
    c["model"] = json::parse(read_file(g.directory + "/config.json"))["model"];
    c["data"] = {{"train", {dir.file("stream.bin")}},
                 {"separator", recipe["separator"]},
                 {"positions", recipe["positions"]},
                 {"document_mask", g.mask == "docmask"},
                 {"shuffle", false}};
    c["train"] = {{"seq_len", g.train.seq_len},     {"tokens_per_step", g.rows * g.train.seq_len},
                  {"steps", g.train.steps},         {"optimizer", recipe["optimizer"]},
                  {"schedule", recipe["schedule"]}, {"grad_clip", g.train.grad_clip}};
    return c;
}

// The stream is one batch long, so that every step is an epoch of its own.
TEST_P(GoldenTest, TrainCommandAgrees) {
    REQUIRE_BAM();
    const Golden& g = GetParam();
    const TempDir dir;
    write_shard(dir.file("stream.bin"), g.tokens);
    write_file(dir.file("config.json"), run_config(g, dir).dump());
    const RunResult r = run_bam({"train", dir.file("config.json"), "--set", "model.init_from=" + g.directory});
    ASSERT_EQ(r.code, 0) << r.err;
    const std::string run = dir.file("runs/golden");
    int steps = 0;
    for (const std::string& text : lines_of(read_file(run + "/metrics.jsonl"))) {
        const json line = json::parse(text);
        if (line["event"] != "step") continue;
        const size_t k = size_t(steps++);
        ASSERT_EQ(line["step"], steps);
        EXPECT_NEAR(double(line["loss"]), g.expected.at("losses").at(k), 1e-5) << text;
        EXPECT_NEAR(double(line["grad_norm"]) / g.expected.at("grad_norms").at(k), 1.0, 1e-5) << text;
    }
    EXPECT_EQ(steps, g.train.steps);
    const auto weights = read_tensors(run + "/checkpoints/step_00000008/model.safetensors");
    for (const auto& [name, wanted] : g.expected) {
        if (!name.starts_with("final.")) continue;
        const std::vector<float>& got = weights.at(name.substr(6));
        ASSERT_EQ(got.size(), wanted.size()) << name;
        EXPECT_LE(max_abs_difference(got, wanted), 1e-4) << name;
    }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest, testing::ValuesIn(all_goldens()),
                         [](const auto& info) { return info.param.case_name(); });

}  // namespace
}  // namespace bam::test
