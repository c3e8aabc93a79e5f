// `bam train` as a user runs it: repeatable, resumable at any moment, strict about what it is given.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "random.h"
#include "safetensors.h"
#include "test_support.h"

namespace bam {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;
using test::RunOptions;
using test::RunResult;

// A tiny run: 8 rows of 16 tokens a step over 43 rows, so that 12 steps are in the third epoch.
class TrainTest : public testing::Test {
protected:
    void SetUp() override {
        REQUIRE_BAM();
        test::write_shard(at("a.bin"), test::random_tokens(400, 51, 1, 2, 20));
        test::write_shard(at("b.bin"), test::random_tokens(300, 51, 2, 2, 20), 4);
        test::write_shard(at("val.bin"), test::random_tokens(75, 51, 3, 2, 20));
        config_ = json::parse(R"({
            "run": {"name": "r", "seed": 7, "device": "cpu", "dtype": "fp32"},
            "model": {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden": 40, "vocab_size": 51,
                      "position": {"encoding": "bam", "ssmax": true,
                                   "bam": {"init_alpha": -1, "init_beta": [-0.5, 1], "train_mu": true}}},
            "data": {"separator": {"id": 2, "position": "end"}},
            "train": {"seq_len": 16, "tokens_per_step": 128, "micro_batch": 3, "steps": 12, "val_every": 5,
                      "checkpoint_every": 4, "keep_last": 2, "log_priors_every": 6,
                      "optimizer": {"name": "radam", "lr": 0.01}}
        })");
        config_["run"]["out"] = at("runs");
        config_["data"]["train"] = {at("a.bin"), at("b.bin")};
        config_["data"]["val"] = {at("val.bin")};
        test::write_file(at("c.json"), config_.dump());
    }

    std::string at(const std::string& name) const { return dir_.file(name); }

    // bam train c.json --set ...; extra words that start with "-" are passed on.
    std::vector<std::string> command(const std::vector<std::string>& words = {}) const {
        std::vector<std::string> args = {"train", at("c.json")};
        for (const std::string& w : words) {
            if (w[0] != '-') args.push_back("--set");
            args.push_back(w);
        }
        return args;
    }
    RunResult train(const std::vector<std::string>& words = {}, const RunOptions& o = {}) const {
        return test::run_bam(command(words), o);
    }
    std::string weights(const std::string& run, int step) const {
        char name[32];
        std::snprintf(name, sizeof name, "step_%08d", step);
        return test::read_file(at("runs/" + run + "/checkpoints/" + name + "/model.safetensors")) +
               test::read_file(at("runs/" + run + "/checkpoints/" + name + "/optimizer.safetensors"));
    }
    // step -> "loss grad_norm lr", of each step's last line; also validation losses.
    std::map<std::string, std::string> course(const std::string& run) const {
        std::map<std::string, std::string> c;
        for (const std::string& line : test::lines_of(test::read_file(at("runs/" + run + "/metrics.jsonl")))) {
            const json j = json::parse(line);
            const std::string event = j["event"];
            if (event == "step") c["step" + j["step"].dump()] = j["loss"].dump() + j["grad_norm"].dump() + j["lr"].dump();
            if (event == "val") c["val" + j["step"].dump()] = j["loss"].dump();
            if (event == "priors") c["priors" + j["step"].dump()] = j["layers"].dump();
        }
        return c;
    }

    test::TempDir dir_;
    json config_;
};

TEST_F(TrainTest, SameCommandTwiceIsBitwiseEqual) {
    for (const char* dtype : {"fp32", "bf16"}) {
        const std::string d = dtype;
        ASSERT_EQ(train({"run.name=" + d + "1", "run.dtype=" + d}).code, 0);
        ASSERT_EQ(train({"run.name=" + d + "2", "run.dtype=" + d}).code, 0);
        EXPECT_EQ(course(d + "1"), course(d + "2"));
        EXPECT_EQ(course(d + "1").count("step12"), 1u);
        EXPECT_EQ(course(d + "1").count("val12"), 1u);
        EXPECT_EQ(weights(d + "1", 12), weights(d + "2", 12));
    }
}

TEST_F(TrainTest, StopAndResumeIsBitwise) {
    for (const char* dtype : {"fp32", "bf16"})
        for (const char* recompute : {"none", "block"}) {
            const std::string d = std::string(dtype) + recompute;
            const std::vector<std::string> sets = {std::string("run.dtype=") + dtype, std::string("train.recompute=") + recompute};
            auto with = [&](std::vector<std::string> more) {
                more.insert(more.end(), sets.begin(), sets.end());
                return more;
            };
            ASSERT_EQ(train(with({"run.name=whole" + d})).code, 0);
            const RunResult stopped = train(with({"run.name=parts" + d, "--stop-at=7"}));
            ASSERT_EQ(stopped.code, 75) << stopped.err;
            ASSERT_EQ(train(with({"run.name=parts" + d})).code, 0);
            EXPECT_EQ(course("whole" + d), course("parts" + d));
            EXPECT_EQ(weights("whole" + d, 12), weights("parts" + d, 12));
        }
    // Recomputing activations changes nothing.
    EXPECT_EQ(weights("wholefp32none", 12), weights("wholefp32block", 12));
}

TEST_F(TrainTest, FinishedRunSaysSo) {
    ASSERT_EQ(train().code, 0);
    const RunResult again = train();
    EXPECT_EQ(again.code, 0);
    EXPECT_NE(again.out.find("finished, step 12 of 12"), std::string::npos) << again.out;
}

TEST_F(TrainTest, SurvivesKillNine) {
    const std::vector<std::string> sets = {"train.steps=40", "train.checkpoint_every=1", "train.val_every=0"};
    auto with = [&](std::string name) {
        std::vector<std::string> words = sets;
        words.push_back("run.name=" + name);
        return words;
    };
    ASSERT_EQ(train(with("calm")).code, 0);
    for (int i = 0; i < 30; ++i) {
        test::Process p(command(with("killed")));
        usleep(useconds_t(5000 + random_below(1, 2, i, 60000)));
        p.signal(SIGKILL);
        p.wait();
    }
    const RunResult last = train(with("killed"));
    ASSERT_EQ(last.code, 0) << last.err;
    EXPECT_EQ(course("calm"), course("killed"));
    EXPECT_EQ(weights("calm", 40), weights("killed", 40));
}

TEST_F(TrainTest, SignalsSaveAndExit75) {
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
        const std::string name = "s" + std::to_string(signal);
        test::Process p(command({"run.name=" + name, "train.steps=1000000", "train.val_every=0"}));
        const std::string metrics = at("runs/" + name + "/metrics.jsonl");
        for (int i = 0; i < 2000 && (!fs::exists(metrics) || test::read_file(metrics).find("\"step\":20,") == std::string::npos); ++i)
            usleep(10000);
        p.signal(signal);
        const RunResult r = p.wait();
        EXPECT_EQ(r.code, 75) << r.err;
        const auto lines = test::lines_of(test::read_file(metrics));
        const int64_t step = json::parse(lines.back())["step"];
        EXPECT_GE(step, 20);
        EXPECT_FALSE(weights(name, int(step)).empty());
    }
}

TEST_F(TrainTest, DamagedNewestCheckpointIsNamedAndSkipped) {
    ASSERT_EQ(train({"run.name=whole"}).code, 0);
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json", "config.json"})
        for (bool truncate : {false, true}) {
            fs::remove_all(at("runs/r"));
            ASSERT_EQ(train({"--stop-at=8"}).code, 75);  // checkpoints 4 and 8
            const std::string victim = at("runs/r/checkpoints/step_00000008/") + file;
            std::string bytes = test::read_file(victim);
            if (truncate) bytes.resize(bytes.size() / 2);
            else bytes[bytes.size() / 2] ^= 4;
            test::write_file(victim, bytes);
            const RunResult r = train();
            EXPECT_EQ(r.code, 0) << r.err;
            EXPECT_NE(r.err.find("step_00000008"), std::string::npos) << r.err;
            EXPECT_NE(r.out.find("from step 4"), std::string::npos) << r.out;
            EXPECT_EQ(weights("whole", 12), weights("r", 12));
        }
}

TEST_F(TrainTest, NonFiniteNeverReachesWeights) {
    // Weights so large that the loss overflows after the first updates.
    const RunResult r = train({"train.optimizer.lr=1e30", "train.optimizer.name=adamw", "train.schedule.name=constant"});
    EXPECT_EQ(r.code, 4) << r.err;
    EXPECT_NE(r.err.find("step "), std::string::npos);
    EXPECT_NE(r.err.find("a.bin, byte "), std::string::npos) << r.err;
    EXPECT_EQ(test::lines_of(r.err).size(), 1u) << r.err;
    int seen = 0;
    for (const auto& entry : fs::directory_iterator(at("runs/r/checkpoints"))) {
        const SafetensorsFile f(entry.path().string() + "/model.safetensors");
        for (const auto& [name, e] : f.entries())
            for (float x : f.floats(name)) ASSERT_TRUE(std::isfinite(x)) << name;
        ++seen;
    }
    EXPECT_GT(seen, 0);
    // The same with "skip" counts steps and ends after ten in a row.
    const RunResult s = train({"run.name=skip", "train.optimizer.lr=1e30", "train.optimizer.name=adamw",
                               "train.schedule.name=constant", "train.on_nonfinite=skip", "train.steps=30"});
    EXPECT_EQ(s.code, 4) << s.err;
    EXPECT_NE(s.err.find("10 such steps in a row"), std::string::npos) << s.err;
}

TEST_F(TrainTest, ResumeRefusesAnotherRun) {
    ASSERT_EQ(train({"--stop-at=4"}).code, 75);
    const std::vector<std::pair<std::string, std::string>> changes = {
        {"model.position.encoding=rope", "model.position.encoding"},
        {"model.dim=48", "model.dim"},
        {"train.steps=24", "train.steps"},
        {"train.seq_len=32", "train.seq_len"},
        {"run.seed=8", "run.seed"},
        {"data.train=[\"" + at("a.bin") + "\"]", "data.train"},
        {"train.schedule.warmup_steps=3", "train.schedule.warmup_steps"}};
    for (const auto& [set, field] : changes) {
        const RunResult r = train({set});
        EXPECT_EQ(r.code, 2) << set << r.err;
        EXPECT_NE(r.err.find(field), std::string::npos) << r.err;
        EXPECT_EQ(test::lines_of(r.err).size(), 1u) << r.err;
    }
    for (const char* set : {"train.val_every=3", "train.keep_last=1", "train.micro_batch=2", "run.threads=1"})
        EXPECT_EQ(train({set, "--stop-at=5"}).code, 75) << set;
    // Same names, other contents.
    test::write_shard(at("a.bin"), test::random_tokens(400, 51, 99, 2, 20));
    const RunResult r = train();
    EXPECT_EQ(r.code, 2);
    EXPECT_NE(r.err.find("data.train"), std::string::npos) << r.err;
    EXPECT_EQ(train({"--force-resume"}).code, 0);
}

TEST_F(TrainTest, ResumeNoSetsTheOldRunAside) {
    ASSERT_EQ(train({"--stop-at=4"}).code, 75);
    ASSERT_EQ(train({"--resume=no", "run.seed=9", "--stop-at=2"}).code, 75);
    EXPECT_TRUE(fs::exists(at("runs/r/replaced-1/checkpoints/step_00000004")));
    EXPECT_FALSE(fs::exists(at("runs/r/checkpoints/step_00000004")));
}

TEST_F(TrainTest, SecondProcessOnTheSameRunIsRefused) {
    test::Process p(command({"train.steps=1000000", "train.val_every=0"}));
    for (int i = 0; i < 2000 && !fs::exists(at("runs/r/run.json")); ++i) usleep(10000);
    const RunResult r = train({"train.steps=1000000", "train.val_every=0"});
    EXPECT_EQ(r.code, 1);
    EXPECT_NE(r.err.find("runs/r"), std::string::npos) << r.err;
    EXPECT_EQ(test::lines_of(r.err).size(), 1u);
}

TEST_F(TrainTest, BadInputIsOneLineAndACode) {
    auto expect = [&](const std::vector<std::string>& words, int code, const std::string& text) {
        const RunResult r = train(words);
        EXPECT_EQ(r.code, code) << words[0] << ": " << r.err;
        EXPECT_NE(r.err.find(text), std::string::npos) << words[0] << ": " << r.err;
        EXPECT_EQ(test::lines_of(r.err).size(), 1u) << r.err;
        EXPECT_FALSE(fs::exists(at("runs/r/checkpoints"))) << words[0];
    };
    expect({"train.optimiser.lr=1"}, 2, "optimizer");
    expect({"model.positon.ssmax=true"}, 2, "position");
    expect({"train.steps=many"}, 2, "train.steps");
    expect({"train.steps=-1"}, 2, "train.steps");
    expect({"train.tokens_per_step=100"}, 2, "tokens_per_step");
    expect({"model.n_heads=5", "model.n_kv_heads=5"}, 2, "model.n_heads");
    expect({"model.dim=20", "--pe=rope"}, 2, "rope");  // head size 5
    expect({"--pe=bamm"}, 2, "bam_ssmax");
    expect({"data.train=[\"" + at("nothing_*.bin") + "\"]"}, 3, "nothing_*.bin");
    test::write_file(at("empty.bin"), "");
    expect({"data.train=[\"" + at("empty.bin") + "\"]"}, 3, "empty.bin");
    test::write_file(at("foreign.bin"), std::string(5000, 'x'));
    expect({"data.train=[\"" + at("foreign.bin") + "\"]"}, 3, "foreign.bin");
    std::string shard = test::read_file(at("a.bin"));
    test::write_file(at("short.bin"), shard.substr(0, shard.size() - 10));
    expect({"data.train=[\"" + at("short.bin") + "\"]"}, 3, "short.bin");
    shard[8] = 127, shard[11] = 127;
    test::write_file(at("huge.bin"), shard);
    expect({"data.train=[\"" + at("huge.bin") + "\"]"}, 3, "huge.bin");
    test::write_shard(at("few.bin"), test::random_tokens(16, 51, 1));
    expect({"data.train=[\"" + at("few.bin") + "\"]"}, 3, "16");
    expect({"run.out=/proc/none"}, 1, "/proc/none");
    expect({"model.init_from=" + at("nowhere")}, 3, "nowhere");
    EXPECT_EQ(test::run_bam({"train", at("missing.json")}).code, 2);
    EXPECT_EQ(test::run_bam({"trian", at("c.json")}).code, 2);
    EXPECT_EQ(test::run_bam({"train", at("c.json"), "--stop-at", "0"}).code, 2);
}

// What tokenize wrote beside its shards is believed before a config that contradicts it.
TEST_F(TrainTest, ConfigMustFitTheDataSet) {
    test::write_file(at("text.txt"), std::string(2000, 'a'));
    const RunResult made = test::run_bam({"tokenize", "--tokenizer", "byte", "--out", at("set"), at("text.txt")});
    ASSERT_EQ(made.code, 0) << made.err;
    const auto says = [&](const std::vector<std::string>& sets, const std::string& text) {
        std::vector<std::string> words = sets;
        words.insert(words.end(), {"data.train=[\"" + at("set") + "\"]", "data.val=[]", "train.val_every=0", "--dry-run"});
        const RunResult r = train(words);
        EXPECT_EQ(r.code, text.empty() ? 0 : 2) << r.err;
        EXPECT_NE(r.err.find(text), std::string::npos) << r.err;
    };
    const std::string file = at("set") + "/dataset.json";
    says({"model.vocab_size=257", "data.separator.id=256"}, "");
    says({"model.vocab_size=300", "data.separator=null", "data.document_mask=false"}, "");
    says({"model.vocab_size=257"}, "data.separator: id 2 at the end of documents, expected id 256 at the end, as " + file + " has it");
    says({"model.vocab_size=257", "data.separator={\"id\": 256, \"position\": \"start\"}"}, "id 256 at the start of documents, expected id 256 at the end");
    says({"data.separator=null", "data.document_mask=false"}, "model.vocab_size: 51, expected at least the 257 ids of " + file);
}

TEST_F(TrainTest, TokenOutsideTheVocabularyNamesFileAndByte) {
    std::vector<int32_t> tokens = test::random_tokens(400, 51, 1);
    tokens[123] = 60;
    test::write_shard(at("a.bin"), tokens);
    const RunResult r = train();
    EXPECT_EQ(r.code, 3);
    EXPECT_NE(r.err.find("a.bin"), std::string::npos) << r.err;
    EXPECT_NE(r.err.find(std::to_string(1024 + 2 * 123)), std::string::npos) << r.err;
}

TEST_F(TrainTest, AShardCutShortWhileInUseIsNamed) {
    test::Process p(command({"train.steps=1000000", "train.checkpoint_every=0", "train.val_every=0"}));
    const std::string log = at("runs/r/metrics.jsonl");
    while (p.running() && !(fs::exists(log) && test::read_file(log).find("\"step\":2") != std::string::npos)) usleep(10000);
    ASSERT_EQ(::truncate(at("b.bin").c_str(), 0), 0);
    const RunResult r = p.wait();
    EXPECT_EQ(r.code, 3);
    EXPECT_EQ(r.err, "bam: " + at("b.bin") + ": became shorter, or cannot be read any more, while in use\n");
}

TEST_F(TrainTest, InitFromNamesWhatIsWrong) {
    ASSERT_EQ(train({"--stop-at=1"}).code, 75);
    const std::string model = at("runs/r/checkpoints/step_00000001");
    RunResult r = train({"run.name=n", "--stop-at=1", "model.init_from=" + model});
    EXPECT_EQ(r.code, 75) << r.err;
    r = train({"run.name=n2", "model.dim=48", "model.init_from=" + model});
    EXPECT_EQ(r.code, 3);
    EXPECT_NE(r.err.find(".weight"), std::string::npos) << r.err;
    r = train({"run.name=n3", "--pe=nope_ssmax", "model.init_from=" + model});
    EXPECT_EQ(r.code, 3);
    EXPECT_NE(r.err.find("theta"), std::string::npos) << r.err;
}

TEST_F(TrainTest, FullDiskIsAnErrorAndKeepsTheLastCheckpoint) {
    if (geteuid() != 0) GTEST_SKIP() << "needs root to mount a small tmpfs";
    const std::string small = at("small");
    fs::create_directory(small);
    if (mount("none", small.c_str(), "tmpfs", 0, "size=400k") != 0) GTEST_SKIP() << "cannot mount a tmpfs here";
    const RunResult r = train({"run.out=" + small, "train.checkpoint_every=1", "train.keep_last=100", "train.steps=50"});
    EXPECT_EQ(r.code, 1) << r.err;
    EXPECT_NE(r.err.find(small), std::string::npos) << r.err;
    EXPECT_EQ(test::lines_of(r.err).size(), 1u) << r.err;
    // Room again: it goes on from what was saved.
    fs::remove_all(small + "/r/checkpoints/step_00000001");
    const RunResult again = train({"run.out=" + small, "train.checkpoint_every=100", "train.keep_last=1", "train.steps=50"});
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_NE(again.out.find("from step"), std::string::npos) << again.out;
    EXPECT_EQ(again.out.find("from step 0"), std::string::npos) << again.out;
    umount2(small.c_str(), MNT_DETACH);
}

TEST_F(TrainTest, DryRunPrintsThePlanAndWritesNothing) {
    const RunResult r = train({"--dry-run"});
    EXPECT_EQ(r.code, 0) << r.err;
    for (const char* word : {"parameters", "memory", "steps", "tokens", "dropped"})
        EXPECT_NE(r.out.find(word), std::string::npos) << r.out;
    EXPECT_NE(r.out.find("11 tokens dropped"), std::string::npos) << r.out;  // 700 = 43 * 16 + 1 + 11
    EXPECT_FALSE(fs::exists(at("runs")));
}

TEST_F(TrainTest, LongRowsNeedMemoryLinearInT) {
    // T x T scores of one head would be 1 GiB; address space is limited to 1.5 GiB in all.
    test::write_shard(at("long.bin"), test::random_tokens(16385, 51, 5));
    const std::string wrapper = at("limited.sh");
    test::write_file(wrapper, "#!/bin/sh\nulimit -v 1500000\nexec " + test::bam_program() + " \"$@\"\n");
    fs::permissions(wrapper, fs::perms::owner_all);
    RunOptions o;
    o.program = wrapper;
#if !defined(__SANITIZE_ADDRESS__)
    const RunResult r = train({"data.train=[\"" + at("long.bin") + "\"]", "data.val=[]", "train.seq_len=16384",
                               "train.tokens_per_step=16384", "train.micro_batch=1", "train.steps=1", "data.document_mask=false"},
                              o);
    EXPECT_EQ(r.code, 0) << r.err;
#endif
}

}  // namespace
}  // namespace bam
