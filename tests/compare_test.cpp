// `bam compare`: variants differ in the encoding only, parts are skipped and resumed, the table does not depend on interruptions.
#include "compare.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "random.h"
#include "test_support.h"

namespace bam {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

class CompareTest : public testing::Test {
protected:
    void SetUp() override {
        test::write_shard(at("a.bin"), test::random_tokens(3000, 51, 1, 2, 20));
        test::write_shard(at("val.bin"), test::random_tokens(200, 51, 3, 2, 20));
        config_ = json::parse(R"({
            "run": {"name": "tiny", "seed": 7, "device": "cpu", "dtype": "fp32", "threads": 1},
            "model": {"dim": 24, "n_layers": 2, "n_heads": 4, "ffn_hidden": 40, "vocab_size": 51,
                      "position": {"encoding": "bam", "ssmax": true}},
            "data": {"separator": {"id": 2, "position": "end"}},
            "train": {"seq_len": 16, "tokens_per_step": 64, "steps": 6, "val_every": 6, "checkpoint_every": 2},
            "eval": {"suites": ["perplexity"], "lengths": [16, 32]}
        })");
        config_["run"]["out"] = at("runs");
        config_["data"]["train"] = {at("a.bin")};
        config_["data"]["val"] = {at("val.bin")};
        test::write_file(at("c.json"), config_.dump());
    }
    std::string at(const std::string& name) const { return dir_.file(name); }
    CompareOptions options(const std::string& pe) const {
        CompareOptions o;
        o.config = at("c.json");
        o.pe = pe;
        return o;
    }
    // The final table without its tok/s column, which is a timing.
    std::string table(const std::string& out) const {
        json j = json::parse(test::read_file(at("runs/" + out + "/compare.json")));
        for (json& v : j["variants"]) v["metrics"].erase("tok_per_s");
        return j.dump();
    }

    test::TempDir dir_;
    json config_;
};

TEST_F(CompareTest, AllVariantsShareWeightsAndRows) {
    CompareOptions o = options("all");
    o.seeds = 2;
    const json proof = compare_proof(compare_parts(o));  // throws if a hash differs
    ASSERT_EQ(proof["parts"].size(), 20u);
    EXPECT_EQ(proof["seeds"].size(), 2u);
    EXPECT_NE(proof["seeds"]["7"], proof["seeds"]["8"]);
    // Two layers of four heads: s, and alpha and beta.
    for (const json& p : proof["parts"]) {
        const std::string name = p["variant"];
        int64_t own = 0;
        for (const auto& [key, n] : p["own_parameters"].items()) own += n.get<int64_t>();
        const bool ssmax = name.ends_with("_ssmax"), bam = name.starts_with("bam");
        EXPECT_EQ(own, (ssmax ? 8 : 0) + (bam ? 16 : 0)) << name;
        for (const auto& [key, value] : p["config_difference"].items())
            EXPECT_TRUE(key == "/run/name" || key == "/run/seed" || key.starts_with("/model/position/")) << key;
    }
}

TEST_F(CompareTest, OrderOfTheListChangesNothing) {
    REQUIRE_BAM();
    ASSERT_EQ(test::run_bam({"compare", at("c.json"), "--pe", "nope,bam", "--out", at("runs/one")}).code, 0);
    ASSERT_EQ(test::run_bam({"compare", at("c.json"), "--pe", "bam,nope", "--out", at("runs/two")}).code, 0);
    for (const char* v : {"nope-s7", "bam-s7"}) {
        const std::string model = std::string("/runs/") + v + "/checkpoints/step_00000006/model.safetensors";
        EXPECT_EQ(test::read_file(at("runs/one" + model)), test::read_file(at("runs/two" + model)));
    }
    // BAM's prior is constant at its default start: the first step's loss is that of NoPE.
    auto first_loss = [&](const std::string& run) {
        for (const std::string& line : test::lines_of(test::read_file(at("runs/one/runs/" + run + "/metrics.jsonl"))))
            if (const json j = json::parse(line); j["event"] == "step") return j["loss"].get<double>();
        return -1.0;
    };
    EXPECT_GT(first_loss("nope-s7"), 0);
    EXPECT_NEAR(first_loss("nope-s7"), first_loss("bam-s7"), 1e-6);
}

TEST_F(CompareTest, KilledFiveTimesGivesTheSameTable) {
    REQUIRE_BAM();
    auto command = [&](const std::string& out) {
        return std::vector<std::string>{"compare", at("c.json"), "--pe", "nope,rope_ssmax,bam_ssmax", "--out", at("runs/" + out)};
    };
    ASSERT_EQ(test::run_bam(command("calm")).code, 0);
    for (int i = 0; i < 5; ++i) {
        test::Process p(command("killed"));
        usleep(useconds_t(20000 + random_below(3, 4, i, 150000)));
        p.signal(i % 2 ? SIGKILL : SIGTERM);
        p.wait();
        usleep(300000);  // a killed parent's child ends by itself
    }
    const test::RunResult last = test::run_bam(command("killed"));
    ASSERT_EQ(last.code, 0) << last.err;
    EXPECT_EQ(table("calm"), table("killed"));
    EXPECT_NE(last.out.find("validation loss"), std::string::npos);
}

TEST_F(CompareTest, AFailedVariantDoesNotStopTheOthers) {
    REQUIRE_BAM();
    const test::RunResult r = test::run_bam({"compare", at("c.json"), "--pe", "nope", "--extra",
                                             "broken: rope train.optimizer.lr=1e30 train.optimizer.name=adamw train.schedule.name=constant",
                                             "--extra", "spread: bam_ssmax model.position.bam.init_beta=[-0.5,1]", "--out",
                                             at("runs/f")});
    EXPECT_EQ(r.code, 1) << r.err;
    EXPECT_NE(r.err.find("broken-s7 failed, exit 4"), std::string::npos) << r.err;
    const json j = json::parse(test::read_file(at("runs/f/compare.json")));
    EXPECT_TRUE(j["failed"].contains("broken-s7"));
    for (const json& v : j["variants"])
        EXPECT_EQ(v["metrics"].contains("ppl@32"), v["name"] != "broken") << v.dump();
}

TEST_F(CompareTest, WrongNamesAreRefused) {
    REQUIRE_BAM();
    for (const auto& [pe, extra] : std::vector<std::pair<std::string, std::string>>{
             {"nope,nopf", ""}, {"nope,nope", ""}, {"nope", "no colon"}, {"nope", "nope: bam"}}) {
        std::vector<std::string> args = {"compare", at("c.json"), "--pe", pe};
        if (!extra.empty()) args.insert(args.end(), {"--extra", extra});
        const test::RunResult r = test::run_bam(args);
        EXPECT_EQ(r.code, 2) << pe << extra;
        EXPECT_EQ(test::lines_of(r.err).size(), 1u) << r.err;
    }
}

}  // namespace
}  // namespace bam
