// `bam bench`: the figures fit each other, on a model so small that it takes no time; and what it refuses.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "test_support.h"

namespace bam::test {
namespace {

using json = nlohmann::json;

json bench(std::vector<std::string> args) {
    args.insert(args.begin(), "bench");
    args.insert(args.end(), {"--json", "--device", "cpu"});
    const RunResult r = run_bam(args);
    EXPECT_EQ(r.code, 0) << r.err;
    return json::parse(r.out);
}

TEST(BenchTest, TrainFiguresFitEachOther) {
    REQUIRE_BAM();
    const json j = bench(
        {"train", "--model", "nano", "--vocab-size", "257", "--seq-len", "40", "--tokens", "170", "--steps", "3"});
    const double seconds = j["step_seconds"], tokens = j["tokens_per_step"], flops = j["model_flops_per_s"];
    EXPECT_EQ(tokens, 160);  // whole rows
    EXPECT_NEAR(j["tok_per_s"], tokens / seconds, 1e-6 * tokens / seconds);
    // nano is 4 layers of width 128 and 256, by hand: matrices and the causal half of attention, three times.
    const double matrices = 4 * (4 * 128 * 128 + 3 * 128 * 256) + 257 * 128;
    EXPECT_NEAR(flops * seconds / tokens, 6 * matrices + 6 * 4 * 128 * 40, 1);
    EXPECT_NEAR(j["utilization"], flops / j["gemm_flops_per_s"].get<double>(), 1e-9);
    double named = 0;
    for (const auto& [op, time] : j["seconds_by_op"].items()) named += time.get<double>();
    EXPECT_GT(named, 0);
    EXPECT_GE(j["seconds_outside_ops"], 0);  // of the same step
    EXPECT_NEAR(named + j["seconds_outside_ops"].get<double>(), seconds, 1e-9);
    EXPECT_GT(j["peak_bytes"], 1 << 20);
}

TEST(BenchTest, OpsStandBesideTheirFloors) {
    REQUIRE_BAM();
    const json j = bench({"ops", "--model", "nano", "--layers", "1", "--vocab-size", "257", "--seq-len", "16",
                          "--tokens", "64", "--pe", "rope", "--steps", "1"});
    std::map<std::string, double> floors;
    for (const json& op : j["ops"]) floors[op["op"]] = op["floor_seconds"];
    const double products = 2 * 64.0 * (4 * 128 * 128 + 3 * 128 * 256 + 257 * 128);
    EXPECT_NEAR(floors.at("matmul_forward") * j["gemm_flops_per_s"].get<double>(), products, 1e-6 * products);
    EXPECT_NEAR(floors.at("matmul_backward"), 2 * floors.at("matmul_forward"), 1e-12);
    EXPECT_GT(floors.at("rope_forward"), 0);
}

TEST(BenchTest, AttentionHasARowForEachEncodingAndLength) {
    REQUIRE_BAM();
    const json j = bench({"attention", "--model", "nano", "--pe", "rope,ggd_bam_ssmax", "--seq-len", "24,70",
                          "--tokens", "48", "--steps", "1"});
    std::vector<std::string> rows;
    for (const json& r : j["attention"]) {
        rows.push_back(r["encoding"].get<std::string>() + " " + r["seq_len"].dump() + " " + r["tokens"].dump());
        const double flops =
            2.0 * r["tokens"].get<double>() * r["seq_len"].get<double>() * 128;  // two products, half of the keys
        EXPECT_NEAR(r["forward"]["flops_per_s"].get<double>() * r["forward"]["seconds"].get<double>(), flops,
                    1e-6 * flops);
        EXPECT_NEAR(r["backward"]["flops_per_s"].get<double>() * r["backward"]["seconds"].get<double>(), 2.5 * flops,
                    1e-6 * flops);
        EXPECT_GT(r["encoding_seconds"].get<double>(), 0) << rows.back();
    }
    EXPECT_EQ(rows, (std::vector<std::string>{"rope 24 48", "bam_ssmax 24 48", "rope 70 70", "bam_ssmax 70 70"}));
}

TEST(BenchTest, BadOptionsAreNamed) {
    REQUIRE_BAM();
    for (const auto& [args, word] : std::vector<std::pair<std::vector<std::string>, std::string>>{
             {{"bench", "train", "--tokens", "8", "--seq-len", "16"}, "--tokens 8"},
             {{"bench", "train", "--model", "l13"}, "l13"},
             {{"bench", "ops", "--layers", "-1"}, "--layers"},
             {{"bench", "train", "--threads", "-2"}, "--threads"},
             {{"bench", "attention", "--pe", "rope,rotten"}, "rotten"},
             {{"bench", "attention", "--seq-len", "16,0"}, "--seq-len: 0, expected a number above 0"},
             {{"bench"}, "subcommand"}}) {
        const RunResult r = run_bam(args);
        EXPECT_EQ(r.code, 2) << word;
        EXPECT_NE(r.err.find(word), std::string::npos) << r.err;
        EXPECT_EQ(lines_of(r.err).size(), 1u) << r.err;
    }
}

}  // namespace
}  // namespace bam::test
