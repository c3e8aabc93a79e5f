// `bam --device cuda` as a user runs it, on the emulation or on a GPU: the CPU's results, the same bits in every order of threads, blocks and
// streams, checkpoints that move between devices, and one line for what cannot run.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "test_support.h"

namespace bam::test {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

class CudaTrain : public testing::Test {
protected:
    void SetUp() override {
        REQUIRE_BAM();
        const RunResult device = run_bam({"info", "--device", "cuda"});
        if (device.code != 0) GTEST_SKIP() << device.err;
        write_shard(at("a.bin"), random_tokens(500, 51, 1, 2, 20));
        write_shard(at("val.bin"), random_tokens(75, 51, 3, 2, 20));
        json c = json::parse(R"({
            "run": {"seed": 7, "device": "cuda", "dtype": "fp32"},
            "model": {"dim": 24, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_hidden": 40, "vocab_size": 51,
                      "position": {"encoding": "bam", "ssmax": true,
                                   "bam": {"init_alpha": -1, "init_beta": [-0.5, 1], "train_mu": true}}},
            "data": {"separator": {"id": 2, "position": "end"}},
            "train": {"seq_len": 16, "tokens_per_step": 80, "micro_batch": 3, "steps": 20, "val_every": 10,
                      "checkpoint_every": 10, "keep_last": 5, "log_priors_every": 10,
                      "optimizer": {"name": "radam", "lr": 0.01}}
        })");
        c["run"]["out"] = at("runs");
        c["data"]["train"] = {at("a.bin")};
        c["data"]["val"] = {at("val.bin")};
        write_file(at("c.json"), c.dump());
    }

    std::string at(const std::string& name) const { return dir_.file(name); }

    // Words with "=" are --set; others, which start with "-", are passed on.
    RunResult train(const std::string& name, std::vector<std::string> words = {}, const std::map<std::string, std::string>& env = {}) const {
        std::vector<std::string> args = {"train", at("c.json"), "--set", "run.name=" + name};
        for (const std::string& w : words) {
            if (w[0] != '-') args.push_back("--set");
            args.push_back(w);
        }
        RunOptions o;
        o.env = env;
        return run_bam(args, o);
    }
    std::string weights(const std::string& run, int step) const {
        char name[32];
        std::snprintf(name, sizeof name, "step_%08d", step);
        return read_file(at("runs/" + run + "/checkpoints/" + name + "/model.safetensors"));
    }
    // Losses of steps, then of validations.
    std::vector<double> losses(const std::string& run) const {
        std::vector<double> steps, vals;
        for (const std::string& line : lines_of(read_file(at("runs/" + run + "/metrics.jsonl")))) {
            const json j = json::parse(line);
            if (j["event"] == "step") steps.push_back(j["loss"]);
            if (j["event"] == "val") vals.push_back(j["loss"]);
        }
        steps.insert(steps.end(), vals.begin(), vals.end());
        return steps;
    }

    TempDir dir_;
};

std::string read_all(const std::vector<std::string>& lines) {
    std::string all;
    for (const std::string& line : lines) all += line + "\n";
    return all;
}

const std::map<std::string, std::string> kOtherOrders = {{"EMU_SCHEDULE", "random:3"}, {"EMU_STREAMS", "random:5"}, {"EMU_ASYNC", "late"}};

TEST_F(CudaTrain, FollowsTheCpuAndRepeatsBitwise) {
    for (const char* dtype : {"fp32", "bf16"}) {
        const std::string d = dtype, set = "run.dtype=" + d;
        RunResult r = train(d + "cpu", {set, "--device=cpu"});
        ASSERT_EQ(r.code, 0) << r.err;
        r = train(d + "cuda", {set});
        ASSERT_EQ(r.code, 0) << r.err;
        r = train(d + "again", {set}, kOtherOrders);
        ASSERT_EQ(r.code, 0) << r.err;
        const std::vector<double> cpu = losses(d + "cpu"), cuda = losses(d + "cuda");
        ASSERT_EQ(cpu.size(), 22u);
        ASSERT_EQ(cuda.size(), cpu.size());
        for (size_t i = 0; i < cpu.size(); ++i) EXPECT_NEAR(cuda[i], cpu[i], d == "fp32" ? 1e-5 : 1e-2) << d << " " << i;
        EXPECT_EQ(losses(d + "again"), cuda) << d;
        EXPECT_EQ(weights(d + "again", 20), weights(d + "cuda", 20)) << d;
    }
}

TEST_F(CudaTrain, RecomputeChangesNothing) {
    for (const char* recompute : {"none", "attention", "block"})
        ASSERT_EQ(train(recompute, {std::string("train.recompute=") + recompute, "train.steps=5"}, kOtherOrders).code, 0);
    EXPECT_EQ(weights("none", 5), weights("attention", 5));
    EXPECT_EQ(weights("none", 5), weights("block", 5));
}

TEST_F(CudaTrain, CheckpointsMoveBetweenDevices) {
    ASSERT_EQ(train("whole").code, 0);
    ASSERT_EQ(train("moved", {"--stop-at=6"}).code, 75);
    RunResult r = train("moved", {"--stop-at=13", "--device=cpu"});
    ASSERT_EQ(r.code, 75) << r.err;
    r = train("moved");
    ASSERT_EQ(r.code, 0) << r.err;
    const std::vector<double> whole = losses("whole"), moved = losses("moved");
    ASSERT_EQ(moved.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(moved[i], whole[i], 1e-5) << i;
}

TEST_F(CudaTrain, OtherCommandsGiveTheCpusResults) {
    ASSERT_EQ(train("model", {"train.steps=3", "--device=cpu"}).code, 0);
    const auto run = [&](std::vector<std::string> args, const std::string& device) {
        args.insert(args.end(), {"--device", device});
        const RunResult r = run_bam(args);
        EXPECT_EQ(r.code, 0) << r.err;
        return lines_of(r.out);
    };
    const std::string model = at("runs/model");
    const auto cpu = run({"score", model, "--tokens", at("val.bin"), "--dtype", "fp32"}, "cpu");
    const auto cuda = run({"score", model, "--tokens", at("val.bin"), "--dtype", "fp32"}, "cuda");
    ASSERT_EQ(cpu.size(), cuda.size());
    ASSERT_GE(cpu.size(), 75u);
    for (size_t i = 1; i < cpu.size(); ++i)
        EXPECT_NEAR(json::parse(cpu[i])["logprob"].get<double>(), json::parse(cuda[i])["logprob"].get<double>(), 1e-5) << i;
    EXPECT_EQ(run({"inspect", model}, "cpu").size(), run({"inspect", model}, "cuda").size());
    const auto nll = [&](const std::string& device) {
        run({"eval", model, "--suite", "perplexity", "--data", at("val.bin"), "--lengths", "16,40", "--dtype", "fp32"}, device);
        std::vector<double> of_length;
        const json summary = json::parse(read_file(model + "/eval/perplexity.json"));
        EXPECT_EQ(summary.dump().find("\"cpu\"") == std::string::npos, device == "cuda") << summary;
        const int64_t expected[][2] = {{16, 64}, {40, 40}};  // lengths and tokens, of 75
        for (const json& r : summary["results"]) {
            EXPECT_EQ(r["length"], expected[of_length.size() % 2][0]);
            EXPECT_EQ(r["tokens"], expected[of_length.size() % 2][1]);
            of_length.push_back(r["nll"]);
        }
        return of_length;
    };
    const std::vector<double> cpu_nll = nll("cpu"), cuda_nll = nll("cuda");
    ASSERT_EQ(cpu_nll.size(), 2u);
    ASSERT_EQ(cuda_nll.size(), 2u);
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(cuda_nll[i], cpu_nll[i], 1e-5);
    const json bench = json::parse(read_all(run({"bench", "train", "--model", "nano", "--vocab-size", "64", "--seq-len", "8", "--tokens", "16",
                                                 "--steps", "1", "--json"}, "cuda")));
    EXPECT_GT(bench["seconds_by_op"]["attention_backward"].get<double>(), 0);
    EXPECT_GT(bench["gemm_flops_per_s"].get<double>(), 0);
}

#ifdef BAM_CUDA_EMULATED
void expect_one_line(const RunResult& r, int code, const std::string& what) {
    EXPECT_EQ(r.code, code);
    EXPECT_EQ(lines_of(r.err).size(), 1u) << r.err;
    EXPECT_NE(r.err.find(what), std::string::npos) << r.err;
}

TEST_F(CudaTrain, WhatCannotRunGetsOneLine) {
    const auto says = expect_one_line;
    says(train("none", {}, {{"EMU_ARCH", "none"}}), 1, "no usable GPU: no CUDA-capable device is detected; use --device cpu");
    says(train("old", {}, {{"EMU_ARCH", "75"}}), 1, "has compute capability 7.5, this build is for");
    says(train("small", {"train.micro_batch=0", "model.dim=256"}, {{"EMU_MEMORY", "2000000"}}), 1, "training needs ");
    says(train("wide", {"model.dim=516"}), 2, "gives a head size of 258");
    EXPECT_FALSE(fs::exists(at("runs/small/checkpoints")));
}

TEST_F(CudaTrain, AutoTakesTheCpuOnlyWhereThereIsNoGpu) {
    const std::vector<std::string> few = {"train.steps=1", "--device=auto"};
    EXPECT_NE(train("gpu", few).out.find("on cuda"), std::string::npos);
    EXPECT_NE(train("cpu", few, {{"EMU_ARCH", "none"}}).out.find("on cpu"), std::string::npos);
    expect_one_line(train("old", few, {{"EMU_ARCH", "75"}}), 1, "has compute capability 7.5");
}

// A launch has at most 65,535 blocks along the batch.
TEST_F(CudaTrain, AtMostSoManyRowsAtATime) {
    const RunResult r = train("short", {"train.seq_len=1", "train.tokens_per_step=100000", "train.micro_batch=0", "--dry-run"});
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_NE(r.out.find("65535"), std::string::npos) << r.out;
}
#endif

}  // namespace
}  // namespace bam::test
