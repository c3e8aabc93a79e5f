// `bam eval`, `score`, `generate` and `inspect` as a user meets them: a small random model of bytes on disk.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "batches.h"
#include "checkpoint.h"
#include "model.h"
#include "reference_model.h"
#include "test_support.h"
#include "tokenizer.h"

namespace bam {
namespace {

using test::lines_of;
using test::read_file;
using test::run_bam;
using test::RunResult;
using json = nlohmann::ordered_json;

constexpr int kSeparator = 256;

class EvalCli : public testing::Test {
protected:
    void SetUp() override {
        REQUIRE_BAM();
        config_.dim = 24, config_.n_layers = 2, config_.n_heads = config_.n_kv_heads = 3, config_.ffn_hidden = 32, config_.vocab_size = 257;
        apply_variant(config_.position, "bam_ssmax");
        config_.position.init_beta.values = {-0.5, 1};
        table_ = make_parameter_table(config_);
        const std::vector<double> w = test::reference_weights(config_, table_, 1);
        weights_.assign(w.begin(), w.end());
        extras_.seq_len = 64;
        extras_.data.has_separator = true, extras_.data.separator_id = kSeparator;
        extras_.tokenizer = "byte";
        extras_.tokenizer_fingerprint = make_byte_tokenizer()->fingerprint();
        model_ = dir_.file("model");
        write(model_, extras_);
        ids_ = test::random_tokens(200, 257, 3, kSeparator, 20);
        test::write_shard(dir_.file("val.bin"), ids_);
    }

    void write(const std::string& path, const ModelExtras& extras) {
        std::filesystem::create_directories(path);
        write_model(path, config_, extras, table_, weights_.data());
    }

    RunResult bam(std::vector<std::string> args, const std::string& model = "") {
        args.insert(args.begin() + 1, model.empty() ? model_ : model);
        args.insert(args.end(), {"--threads", "1", "--dtype", "fp32", "--device", "cpu"});
        return run_bam(args);
    }

    // One line on stderr, nothing half done.
    void refused(const std::vector<std::string>& args, int code, const std::string& expected, const std::string& model = "") {
        const RunResult r = bam(args, model);
        EXPECT_EQ(r.code, code) << r.err;
        EXPECT_EQ(lines_of(r.err).size(), 1u) << r.err;
        EXPECT_NE(r.err.find(expected), std::string::npos) << r.err;
    }

    json summary(const std::string& name) { return json::parse(read_file(model_ + "/eval/" + name)); }

    test::TempDir dir_;
    ModelConfig config_;
    ParameterTable table_;
    std::vector<float> weights_;
    ModelExtras extras_;
    std::string model_;
    std::vector<int32_t> ids_;
};

// Every log-probability against the double-precision reference, with and without the document mask.
TEST_F(EvalCli, ScoreAgreesWithTheReference) {
    for (const bool mask : {false, true}) {
        std::vector<std::string> args = {"score", "--tokens", dir_.file("val.bin")};
        if (mask) args.push_back("--document-mask");
        const RunResult r = bam(args);
        ASSERT_EQ(r.code, 0) << r.err;
        const std::vector<std::string> lines = lines_of(r.out);
        ASSERT_EQ(lines.size(), 200u);
        DataConfig d = extras_.data;
        d.document_mask = mask;
        const auto batch = test::reference_batch(ids_, 1, 199, d);
        const auto out = test::reference_run(config_, table_, {weights_.begin(), weights_.end()}, batch, false);
        EXPECT_EQ(lines[0], "{\"id\":" + std::to_string(ids_[0]) + ",\"logprob\":null}");
        for (size_t i = 1; i < 200; ++i) {
            const json j = json::parse(lines[i]);
            EXPECT_EQ(j["id"], ids_[i]);
            EXPECT_NEAR(j["logprob"].get<double>(), -out.losses[i - 1], 2e-5) << i << " mask " << mask;
        }
    }
}

TEST_F(EvalCli, ScoreReadsTextAndWindows) {
    test::write_file(dir_.file("ids.txt"), "72 101 108 108 111");
    test::write_file(dir_.file("text.txt"), "Hello");
    const RunResult ids = bam({"score", "--tokens", dir_.file("ids.txt")}), text = bam({"score", "--text", dir_.file("text.txt")});
    EXPECT_EQ(ids.code, 0) << ids.err;
    EXPECT_EQ(ids.out, text.out);
    const RunResult windows = bam({"score", "--tokens", dir_.file("ids.txt"), "--context", "2"});
    const auto logprob = [](const RunResult& r, size_t i) { return json::parse(lines_of(r.out)[i])["logprob"].get<double>(); };
    EXPECT_NEAR(logprob(windows, 1), logprob(ids, 1), 1e-6);
    EXPECT_NEAR(logprob(windows, 2), logprob(ids, 2), 1e-6);
    test::write_file(dir_.file("tail.txt"), "108 108 111");  // the second window, alone
    const RunResult tail = bam({"score", "--tokens", dir_.file("tail.txt")});
    EXPECT_NEAR(logprob(windows, 3), logprob(tail, 1), 1e-6);
    EXPECT_NEAR(logprob(windows, 4), logprob(tail, 2), 1e-6);
}

TEST_F(EvalCli, GenerateIsGreedyAtTemperatureZeroAndSeeded) {
    const RunResult greedy = bam({"generate", "--prompt", "ab", "--temperature", "0", "-n", "6", "--json"});
    ASSERT_EQ(greedy.code, 0) << greedy.err;
    const json j = json::parse(greedy.out);
    std::vector<int32_t> row = {'a', 'b'};
    for (int id : j["ids"]) row.push_back(id);
    row.push_back(0);
    const auto batch = test::reference_batch(row, 1, int(row.size()) - 1, extras_.data);
    const auto out = test::reference_run(config_, table_, {weights_.begin(), weights_.end()}, batch, false);
    for (size_t t = 2; t + 1 < row.size(); ++t) {
        const double* logits = out.logits.data() + (t - 1) * 257;
        EXPECT_EQ(std::max_element(logits, logits + 257) - logits, row[t]) << t;
    }
    const std::vector<std::string> args = {"generate", "--prompt", "ab", "--prompt", "xyz", "--temperature", "1", "-n", "9", "--seed", "5"};
    const RunResult first = bam(args), again = bam(args);
    EXPECT_EQ(first.code, 0) << first.err;
    EXPECT_EQ(first.out, again.out);
    EXPECT_TRUE(first.out.starts_with("ab"));
    EXPECT_NE(first.out.find("\n\nxyz"), std::string::npos);
}

TEST_F(EvalCli, EvalWritesItemsAndSummaryAndSkipsWhatIsDone) {
    const std::vector<std::string> args = {"eval", "--suite", "passkey,perplexity", "--lengths", "250,400", "--samples", "3", "--tokens", "100",
                                           "--data", dir_.file("val.bin")};
    refused(args, 3, "expected at least 251");  // only 200 tokens of data: said before anything is done
    EXPECT_FALSE(std::filesystem::exists(model_ + "/eval"));
    std::vector<std::string> fits = args;
    fits[4] = "250,300", fits[2] = "passkey";
    RunResult r = bam(fits);
    ASSERT_EQ(r.code, 0) << r.err;
    const std::string items = read_file(model_ + "/eval/passkey.jsonl");
    EXPECT_EQ(lines_of(items).size(), 6u);
    json s = summary("passkey.json");
    EXPECT_EQ(s["format"], "bam-eval");
    EXPECT_EQ(s["trained_length"], 64);
    EXPECT_EQ(s["items_done"], 6);
    ASSERT_EQ(s["results"].size(), 2u);
    EXPECT_EQ(s["results"][0]["length"], 250);
    EXPECT_EQ(s["results"][0]["reached_tokens"], 243);
    EXPECT_EQ(s["results"][0]["samples"], 3);
    EXPECT_EQ(s["results"][0]["by_depth"].size(), 3u);
    EXPECT_NE(r.out.find("6 of 6 items"), std::string::npos) << r.out;

    test::write_file(model_ + "/eval/passkey.jsonl", items + "{\"torn");
    r = bam(fits);
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(read_file(model_ + "/eval/passkey.jsonl"), items + "{\"torn\n");  // nothing was done again
    fits[6] = "2";  // other samples: other depths
    EXPECT_EQ(bam(fits).code, 0);
    EXPECT_EQ(lines_of(read_file(model_ + "/eval/passkey.jsonl")).size(), 6u + 1 + 4);

    weights_[0] += 1;  // another model in the same place is evaluated anew
    write(model_, extras_);
    EXPECT_EQ(bam(fits).code, 0);
    EXPECT_EQ(lines_of(read_file(model_ + "/eval/passkey.jsonl")).size(), 6u + 1 + 4 + 4);

    for (const char* variant : {"windows", "sliding", "by_position"}) {
        r = bam({"eval", "--suite", "perplexity", "--variant", variant, "--lengths", "8,16", "--data", dir_.file("val.bin")});
        ASSERT_EQ(r.code, 0) << r.err;
    }
    EXPECT_EQ(summary("perplexity.json")["results"][1]["tokens"], 192);
    EXPECT_EQ(summary("perplexity-sliding.json")["results"][1]["tokens"], 199);
    EXPECT_EQ(summary("perplexity-by_position.json")["results"][0]["bins"].size(), 8u);
}

// The mean that perplexity reports is that of the scores.
TEST_F(EvalCli, PerplexityIsTheMeanOfTheScores) {
    ASSERT_EQ(bam({"eval", "--suite", "perplexity", "--lengths", "199", "--data", dir_.file("val.bin")}).code, 0);
    double sum = 0;
    for (const std::string& line : lines_of(bam({"score", "--tokens", dir_.file("val.bin")}).out))
        if (!json::parse(line)["logprob"].is_null()) sum -= json::parse(line)["logprob"].get<double>();
    const json r = summary("perplexity.json")["results"][0];
    EXPECT_NEAR(r["nll"].get<double>(), sum / 199, 1e-6);
    EXPECT_NEAR(r["perplexity"].get<double>(), std::exp(sum / 199), 1e-3);
}

// Stopped by a signal in the middle: 75; going on gives the summary of an undisturbed run.
TEST_F(EvalCli, SignalSavesAndTheSameCommandGoesOn) {
    const std::vector<std::string> args = {"eval", model_, "--suite", "passkey", "--lengths", "3000", "--samples", "60", "--threads", "1",
                                           "--dtype", "fp32", "--out", dir_.file("stopped")};
    const std::string items = dir_.file("stopped/passkey.jsonl");
    auto done = [&] { return std::filesystem::exists(items) ? lines_of(read_file(items)).size() : 0; };
    for (int i = 0; i < 2; ++i) {  // each time as soon as an item more is there
        const size_t before = done();
        test::Process p(args);
        while (p.running() && done() <= before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        p.signal(SIGTERM);
        const RunResult r = p.wait();
        EXPECT_EQ(r.code, 75) << r.err;
    }
    EXPECT_LT(done(), 60u);
    std::vector<std::string> undisturbed = args;
    undisturbed.back() = dir_.file("whole");
    ASSERT_EQ(run_bam(args).code, 0);
    ASSERT_EQ(run_bam(undisturbed).code, 0);
    EXPECT_EQ(read_file(dir_.file("stopped/passkey.json")), read_file(dir_.file("whole/passkey.json")));
}

TEST_F(EvalCli, TimeBudgetReportsWhatWasReached) {
    const RunResult r = bam({"eval", "--suite", "passkey", "--lengths", "250,300000", "--samples", "2", "--minutes", "0.02"});
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_NE(r.out.find("the 0.02 minutes are over"), std::string::npos) << r.out;
    EXPECT_EQ(summary("passkey.json")["items_done"], 2);
}

TEST_F(EvalCli, InspectSaysPriorsAndAttention) {
    const RunResult table = bam({"inspect", "--prompt", "The key is 123, so", "--span", "123"});
    ASSERT_EQ(table.code, 0) << table.err;
    EXPECT_EQ(lines_of(table.out).size(), 2u + 6);
    const RunResult r = bam({"inspect", "--passkey", "300", "--json"});
    ASSERT_EQ(r.code, 0) << r.err;
    const json j = json::parse(r.out);
    EXPECT_EQ(j["layers"].size(), 2u);
    EXPECT_EQ(j["prompt"]["spans"].size(), 2u);
    for (const json& h : j["layers"][1]["heads"]) {
        double mass = 0;
        for (const json& b : h["mass_by_distance"]) mass += b["mass"].get<double>();
        EXPECT_NEAR(mass, 1, 1e-9);
        EXPECT_GT(h["span_mass"].get<double>(), 0);
    }
}

TEST_F(EvalCli, WrongUseIsOneLine) {
    refused({"eval", "--suite", "passkeys"}, 2, "suite 'passkeys'");
    refused({"eval", "--suite", "passkey", "--variant", "needle"}, 2, "variant 'needle', expected paper or landmark");
    refused({"eval", "--suite", "passkey,niah", "--variant", "paper"}, 2, "several suites");
    refused({"eval", "--suite", "passkey", "--lengths", "242"}, 2, "the prompt takes 243 tokens without fillers");
    refused({"eval", "--suite", "passkey", "--position", "middle"}, 2, "key position 'middle'");
    refused({"eval", "--suite", "niah", "--lengths", "300"}, 2, "expected a length of at least that");
    refused({"eval", "--suite", "niah", "--variant", "single_2", "--lengths", "3000"}, 2, "--haystack");
    refused({"eval", "--suite", "perplexity"}, 3, "the model names no validation data");
    refused({"eval", "--suite", "perplexity", "--data", dir_.file("none.bin")}, 3, "none.bin");
    refused({"eval", "--suite", "choice"}, 2, "--items");
    test::write_file(dir_.file("bad.jsonl"), "{\"question\":\"q\"}\n");
    refused({"eval", "--suite", "choice", "--items", dir_.file("bad.jsonl")}, 3, "bad.jsonl line 1");
    refused({"eval", "--suite", "passkey", "--lengths", "100000000000"}, 1, "passkey at 100000000006 tokens needs ");
    refused({"score"}, 2, "--tokens FILE or --text FILE");
    refused({"score", "--tokens", dir_.file("val.bin"), "--stride", "4"}, 2, "without --context");
    refused({"score", "--tokens", dir_.file("val.bin"), "--context", "4", "--stride", "5"}, 2, "at most the context");
    refused({"generate", "--prompt", "a", "--top-p", "2"}, 2, "top-p is 2");
    refused({"inspect", "--prompt", "abc", "--span", "x"}, 2, "span 'x'");
    refused({"score", "--tokens", dir_.file("val.bin")}, 3, "nowhere", dir_.file("nowhere"));

    ModelExtras other = extras_;
    other.tokenizer_fingerprint ^= 1;
    write(dir_.file("other"), other);
    refused({"generate", "--prompt", "a"}, 3, "the model was trained with", dir_.file("other"));
    other = {};
    write(dir_.file("bare"), other);
    refused({"generate", "--prompt", "a"}, 3, "names no tokenizer", dir_.file("bare"));
    refused({"eval", "--suite", "passkey", "--tokenizer", "byte"}, 2, "expected --lengths", dir_.file("bare"));
    other.tokenizer = "/nowhere/tokenizer.json";
    write(dir_.file("lost"), other);
    refused({"generate", "--prompt", "a"}, 3, "/nowhere/tokenizer.json is missing", dir_.file("lost"));
    EXPECT_EQ(bam({"generate", "--prompt", "a", "-n", "1", "--tokenizer", "byte"}, dir_.file("lost")).code, 0);
}

}  // namespace
}  // namespace bam
