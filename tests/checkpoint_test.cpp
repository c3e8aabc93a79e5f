// Models and checkpoints on disk: what is written is read back bit for bit; what is damaged, missing or foreign is
// named; and a writer killed at any moment leaves a checkpoint that loads.
#include "checkpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "check.h"
#include "random.h"
#include "safetensors.h"
#include "test_support.h"

namespace bam {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

Config small_config(const std::string& variant = "bam_ssmax") {
    Config c = parse_config(Json::parse(R"({
        "run": {"name": "r", "dtype": "fp32", "seed": 18446744073709551615},
        "model": {"dim": 12, "n_layers": 2, "n_heads": 3, "ffn_hidden": 10, "vocab_size": 17},
        "data": {"train": ["a_*.bin"], "tokenizer": "byte", "separator": {"id": 2, "position": "start"}, "positions": "row"},
        "train": {"seq_len": 7, "tokens_per_step": 14, "steps": 100}})"),
                            "small");
    apply_variant(c.model.position, variant);
    return c;
}

ModelExtras small_extras(const Config& c) {
    ModelExtras e;
    e.seq_len = c.train.seq_len;
    e.data = c.data;
    e.tokenizer = "byte";
    e.tokenizer_fingerprint = 0xfedcba9876543210ull;
    return e;
}

// Arenas whose content depends on the step.
struct Arenas {
    explicit Arenas(const Config& c, int64_t step = 0) : table(make_parameter_table(c.model)) {
        weights = test::random_normals(table.total, 1, 1, uint64_t(step));
        m = test::random_normals(table.trained, 1e-3, 2, uint64_t(step));
        v = test::random_floats(table.trained, 0, 1e-6, 3, uint64_t(step));
    }
    CheckpointData data() { return {&table, weights.data(), m.data(), v.data()}; }
    bool operator==(const Arenas& o) const { return weights == o.weights && m == o.m && v == o.v; }
    ParameterTable table;
    std::vector<float> weights, m, v;
};

TrainState state_at(int64_t step) {
    return {step, 2 * step, 14 * step, 0x8123456789abcdefull, 3};
}

void write_step(const std::string& run, const Config& c, int64_t step) {
    Arenas a(c, step);
    write_checkpoint(run, c, small_extras(c), state_at(step), a.data());
}

std::string mistake(const std::function<void()>& f, ExitCode code) {
    try {
        f();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, code) << e.what();
        return e.what();
    }
    return "";
}

std::vector<std::string> names_in(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(dir)) names.push_back(e.path().filename());
    std::sort(names.begin(), names.end());
    return names;
}

// ---- models --------------------------------------------------------------------------------------------------------

TEST(Model, RoundTripsInEveryVariant) {
    for (const std::string& v : variant_names()) {
        test::TempDir dir;
        const Config c = small_config(v);
        Arenas a(c), b(c, 1);
        write_model(dir.file("m/deep"), c.model, small_extras(c), a.table, a.weights.data());
        EXPECT_EQ(names_in(dir.file("m/deep")), (std::vector<std::string>{"config.json", "model.safetensors"}));
        const ModelFiles f = open_model(find_model(dir.file("m/deep")));
        EXPECT_EQ(to_json(f.config), to_json(c.model));
        EXPECT_EQ(f.extras.seq_len, 7);
        EXPECT_EQ(f.extras.tokenizer, "byte");
        EXPECT_EQ(f.extras.tokenizer_fingerprint, 0xfedcba9876543210ull);
        EXPECT_EQ(f.extras.data.separator_id, 2);
        EXPECT_FALSE(f.extras.data.separator_at_end);
        EXPECT_TRUE(f.extras.data.document_mask);
        EXPECT_FALSE(f.extras.data.positions_by_document);
        read_weights(f.path, make_parameter_table(f.config), b.weights.data());
        EXPECT_EQ(a.weights, b.weights);
    }
}

TEST(Model, ConfigHasTheGoldensFormAndMore) {
    test::TempDir dir;
    Config c = small_config("rope");
    Arenas a(c);
    ModelExtras e;
    e.data.has_separator = e.data.document_mask = false;
    write_model(dir.path(), c.model, e, a.table, a.weights.data());
    EXPECT_EQ(Json::parse(test::read_file(dir.file("config.json"))),
              Json::parse(R"({"format": "bam-model", "version": 1,
        "model": {"dim": 12, "n_layers": 2, "n_heads": 3, "n_kv_heads": 3, "ffn_hidden": 10, "vocab_size": 17, "norm_eps": 1e-05,
                  "tie_embeddings": false,
                  "position": {"encoding": "rope", "ssmax": false, "rope": {"theta": 500000.0, "layout": "interleaved"}}},
        "seq_len": 0, "data": {"separator": null, "document_mask": false, "positions": "document"}, "tokenizer": null})"));
    EXPECT_EQ(open_model(dir.path()).extras.tokenizer_fingerprint, 0u);
}

TEST(Model, GoldensLoad) {
    if (test::goldens_dir().empty()) GTEST_SKIP() << "no goldens";
    for (const char* name : {"alibi", "bam_ssmax", "nope", "rope_ssmax", "sinusoidal"}) {
        const ModelFiles f = open_model(find_model(test::goldens_dir() + "/" + name));
        EXPECT_FALSE(f.extras.data.has_separator);
        const ParameterTable t = make_parameter_table(f.config);
        std::vector<float> w(size_t(t.total), -99);
        read_weights(f.path, t, w.data());
        const SafetensorsFile raw(f.path + "/model.safetensors");
        EXPECT_EQ(raw.entries().size(), t.all.size());
        for (const Parameter& p : t.all) {
            const std::vector<float> x = raw.floats(p.name);  // also (1,H,1,1) tensors
            EXPECT_EQ(0, std::memcmp(x.data(), w.data() + p.offset, x.size() * 4)) << p.name;
        }
    }
}

// A model directory whose tensors were changed by `edit`.
std::string weights_mistake(const std::function<void(std::vector<SafetensorsItem>&)>& edit,
                            std::vector<float>* out = nullptr) {
    test::TempDir dir;
    const Config c = small_config();
    Arenas a(c), b(c, 1);
    write_model(dir.path(), c.model, small_extras(c), a.table, a.weights.data());
    std::vector<SafetensorsItem> items;
    for (const Parameter& p : a.table.all) items.push_back({p.name, "F32", p.shape, a.weights.data() + p.offset});
    edit(items);
    write_safetensors(dir.file("model.safetensors"), items);
    const std::string what = mistake([&] { read_weights(dir.path(), b.table, b.weights.data()); }, kExitData);
    if (out) *out = b.weights;
    const std::string file = dir.file("model.safetensors") + ": ";
    EXPECT_TRUE(what.empty() || what.starts_with(file)) << what;
    return what.empty() ? "" : what.substr(file.size());
}

TEST(Model, BadTensorsAreNamed) {
    const auto item = [](std::vector<SafetensorsItem>& items, const std::string& name) {
        return std::find_if(items.begin(), items.end(), [&](const SafetensorsItem& i) { return i.name == name; });
    };
    std::vector<float> poisoned(17 * 12, 1);
    const std::string w1 = "layers.1.feed_forward.w1.weight";
    EXPECT_EQ(weights_mistake([&](auto& items) { items.erase(item(items, w1)); }), "tensor " + w1 + " is missing");
    EXPECT_EQ(weights_mistake([&](auto& items) {
                  item(items, w1)->shape = {12, 10};
              }),
              "tensor " + w1 + ": shape [12, 10], expected [10, 12]");
    EXPECT_EQ(weights_mistake([&](auto& items) {
                  item(items, w1)->shape = {10, 11};
              }),
              "tensor " + w1 + ": shape [10, 11], expected [10, 12]");
    EXPECT_EQ(weights_mistake([&](auto& items) { item(items, w1)->dtype = "I32"; }),
              "tensor " + w1 + ": dtype I32, expected F32 or BF16");
    EXPECT_EQ(weights_mistake([&](auto& items) {
                  items.push_back({"layers.2.ffn_norm.weight", "F32", {12}, poisoned.data()});
              }),
              "tensor layers.2.ffn_norm.weight is not part of this model");
    poisoned[5] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(weights_mistake([&](auto& items) { item(items, "output.weight")->data = poisoned.data(); }),
              "tensor output.weight: element 5 is nan, expected finite values");
    poisoned[5] = 1;
    poisoned[203] = -std::numeric_limits<float>::infinity();
    EXPECT_EQ(weights_mistake([&](auto& items) { item(items, "output.weight")->data = poisoned.data(); }),
              "tensor output.weight: element 203 is -inf, expected finite values");
}

TEST(Model, OtherShapesAndTypesThatAreTheSame) {
    const Config c = small_config();
    const ParameterTable t = make_parameter_table(c.model);
    const std::string scale = "layers.0.attention.seq_scale", mu = "layers.1.attention.prior.theta_mu";
    const std::vector<uint16_t> low = {0x3f80, 0xc000, 0x4040};
    std::vector<float> w;
    EXPECT_EQ(weights_mistake(
                  [&](auto& items) {
                      std::erase_if(items, [&](const SafetensorsItem& i) { return i.name == mu; });
                      for (SafetensorsItem& i : items)
                          if (i.name == scale) i = {scale, "BF16", {1, 3, 1, 1}, low.data()};
                  },
                  &w),
              "");
    EXPECT_EQ(std::vector<float>(w.begin() + t.at(scale).offset, w.begin() + t.at(scale).offset + 3),
              (std::vector<float>{1, -2, 3}));
    EXPECT_EQ(std::vector<float>(w.begin() + t.at(mu).offset, w.begin() + t.at(mu).offset + 3),
              (std::vector<float>{0, 0, 0}));
}

TEST(Model, BadConfigsAreNamed) {
    test::TempDir dir;
    const Config c = small_config();
    Arenas a(c);
    write_model(dir.path(), c.model, small_extras(c), a.table, a.weights.data());
    const Json good = Json::parse(test::read_file(dir.file("config.json")));
    const auto with = [&](const std::function<void(Json&)>& edit) {
        Json j = good;
        edit(j);
        test::write_file(dir.file("config.json"), j.dump());
        const std::string what = mistake([&] { open_model(dir.path()); }, kExitData),
                          file = dir.file("config.json") + ": ";
        return what.rfind(file, 0) == 0 ? what.substr(file.size()) : what;
    };
    EXPECT_EQ(with([](Json&) {}), "");
    EXPECT_EQ(with([](Json& j) { j["format"] = "gpt2"; }), "format: \"gpt2\", expected \"bam-model\"");
    EXPECT_EQ(with([](Json& j) { j["version"] = 2; }), "version: 2, expected 1");
    EXPECT_EQ(with([](Json& j) { j.erase("model"); }), "model: missing");
    EXPECT_EQ(with([](Json& j) { j = Json::array(); }), "format: missing, expected \"bam-model\"");
    EXPECT_EQ(with([](Json& j) { j["model"]["dims"] = 1; }), "model.dims: unknown key; did you mean model.dim?");
    EXPECT_EQ(with([](Json& j) {
                  j["model"]["n_heads"] = 5;
                  j["model"].erase("n_kv_heads");
              }),
              "model.n_heads: 5, expected a divisor of dim 12");
    EXPECT_EQ(with([](Json& j) { j["model"].erase("ffn_hidden"); }),
              "model.ffn_hidden: missing (give it, or a preset)");
    EXPECT_EQ(with([](Json& j) { j["data"]["separator"]["id"] = "x"; }),
              "data.separator.id: \"x\", expected an integer >= 0 and <= 1073741824");
    EXPECT_EQ(with([](Json& j) { j.erase("data"), j.erase("seq_len"), j.erase("tokenizer"); }), "");
}

TEST(Model, NotAModelIsExplained) {
    test::TempDir dir;
    const auto find = [&](const std::string& p) { return mistake([&] { find_model(p); }, kExitData); };
    EXPECT_EQ(find(dir.file("x")), dir.file("x") + ": No such file or directory");
    test::write_file(dir.file("f"), "");
    EXPECT_EQ(find(dir.file("f")),
              dir.file("f") + ": not a directory, expected a model directory, a checkpoint or a run directory");
    EXPECT_EQ(find(dir.path()), dir.path() +
                                    ": neither config.json nor checkpoints/ in it, "
                                    "expected a model directory, a checkpoint or a run directory");
    fs::create_directories(dir.file("checkpoints/step_00000001"));
    EXPECT_EQ(find(dir.path()), dir.path() + ": no good checkpoint in it; skipped a checkpoint: " +
                                    dir.file("checkpoints/step_00000001/state.json: No such file or directory"));
}

// ---- checkpoints ---------------------------------------------------------------------------------------------------

TEST(Checkpoint, RoundTrips) {
    test::TempDir run;
    const Config c = small_config();
    write_step(run.path(), c, 3);
    write_step(run.path(), c, 123456789);
    EXPECT_EQ(names_in(run.file("checkpoints")), (std::vector<std::string>{"step_00000003", "step_123456789"}));
    EXPECT_EQ(names_in(run.file("checkpoints/step_00000003")),
              (std::vector<std::string>{"config.json", "model.safetensors", "optimizer.safetensors", "state.json"}));
    const CheckpointInfo newest = newest_good_checkpoint(run.path());
    EXPECT_EQ(newest.step, 123456789);
    EXPECT_EQ(find_model(run.path()), newest.path);
    EXPECT_EQ(find_model(run.file("checkpoints/step_00000003")), run.file("checkpoints/step_00000003"));

    Config saved;
    const TrainState s = read_state(newest.path, &saved);
    EXPECT_EQ(s.step, 123456789);
    EXPECT_EQ(s.rows_consumed, 246913578);
    EXPECT_EQ(s.tokens, 1728395046);
    EXPECT_EQ(s.skipped_steps, 3);
    EXPECT_EQ(s.data_fingerprint, 0x8123456789abcdefull);
    EXPECT_EQ(to_json(saved), to_json(c));
    EXPECT_EQ(saved.run.seed, 18446744073709551615ull);
    Arenas a(c, 123456789), b(c, 1);
    read_checkpoint(newest.path, b.data());
    EXPECT_TRUE(a == b);
}

TEST(Checkpoint, SameStepIsReplaced) {
    test::TempDir run;
    const Config c = small_config();
    write_step(run.path(), c, 5);
    test::write_file(run.file("checkpoints/step_00000005/model.safetensors"), "damaged");
    write_step(run.path(), c, 5);
    EXPECT_EQ(verify_checkpoint(run.file("checkpoints/step_00000005")), "");
    EXPECT_EQ(names_in(run.file("checkpoints")), std::vector<std::string>{"step_00000005"});
}

TEST(Checkpoint, EveryBitFlipAndTruncationIsFound) {
    test::TempDir run;
    const Config c = small_config();
    write_step(run.path(), c, 1);
    write_step(run.path(), c, 2);
    const std::string dir = run.file("checkpoints/step_00000002");
    for (const std::string name : {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"}) {
        const std::string path = dir + "/" + name, good = test::read_file(path);
        const auto damaged = [&](const std::string& content, const std::string& how) {
            fs::remove(path);
            test::write_file(path, content);
            const std::string wrong = verify_checkpoint(dir);
            EXPECT_NE(wrong, "") << name << " " << how;
            EXPECT_EQ(wrong.rfind(path + ": ", 0), 0u) << wrong;
            EXPECT_EQ(wrong.find('\n'), std::string::npos) << wrong;
        };
        for (uint64_t k = 0; k < 60; k++) {
            std::string bad = good;
            const size_t at = name == "state.json" ? size_t(k * good.size() / 60) : random_below(7, k, 0, good.size());
            bad[at] = char(bad[at] ^ (1 << random_below(7, k, 1, 8)));
            damaged(bad, "flip at " + std::to_string(at));
        }
        for (const size_t n : {size_t(0), size_t(1), good.size() / 2, good.size() - 2})
            damaged(good.substr(0, n), "cut to " + std::to_string(n));
        damaged(good + "x", "longer");
        // Skipped by name, and the one before it is used.
        std::string line;
        const CheckpointInfo info = newest_good_checkpoint(run.path(), [&](const std::string& l) { line += l; });
        EXPECT_EQ(info.step, 1);
        EXPECT_EQ(line.rfind("skipped a checkpoint: " + path, 0), 0u) << line;
        fs::remove(path);
        EXPECT_EQ(verify_checkpoint(dir), path + ": No such file or directory");
        test::write_file(path, good);
        EXPECT_EQ(verify_checkpoint(dir), "");
    }
    // A model can still be had from a checkpoint whose optimizer is lost.
    fs::remove(dir + "/optimizer.safetensors");
    EXPECT_EQ(find_model(run.path()), dir);
    EXPECT_EQ(newest_good_checkpoint(run.path()).step, 1);
}

TEST(Checkpoint, ForeignNamesAreNoCheckpoints) {
    test::TempDir run;
    EXPECT_TRUE(list_checkpoints(run.path()).empty());
    EXPECT_EQ(newest_good_checkpoint(run.path()).step, -1);
    const Config c = small_config();
    write_step(run.path(), c, 0);
    for (const char* name : {"step_tmp", "step_", "step_9", "step_0000000009", "step_99999999999999999999999", "x",
                             ".tmp-step_00000007-1"})
        fs::create_directories(run.file(std::string("checkpoints/") + name));
    test::write_file(run.file("checkpoints/step_00000008"), "a file");
    const std::vector<CheckpointInfo> all = list_checkpoints(run.path());
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].step, 0);
}

TEST(Checkpoint, StaleTemporariesGo) {
    test::TempDir run;
    const Config c = small_config();
    const pid_t dead = ::fork();
    if (dead == 0) ::_exit(0);
    ::waitpid(dead, nullptr, 0);
    const std::string base = run.file("checkpoints/.tmp-step_00000001-");
    for (const long pid : {long(dead), long(::getpid()), 1L}) {
        fs::create_directories(base + std::to_string(pid));
        test::write_file(base + std::to_string(pid) + "/model.safetensors", "half");
    }
    write_step(run.path(), c, 2);
    EXPECT_EQ(names_in(run.file("checkpoints")), (std::vector<std::string>{".tmp-step_00000001-1", "step_00000002"}));
}

std::vector<int64_t> steps_left(const std::vector<int64_t>& steps, int keep_last, int64_t keep_every) {
    test::TempDir run;
    for (int64_t s : steps) {
        char name[64];
        std::snprintf(name, sizeof name, "checkpoints/step_%08lld", static_cast<long long>(s));
        fs::create_directories(run.file(name));
        test::write_file(run.file(name) + "/state.json", "{}");
    }
    prune_checkpoints(run.path(), keep_last, keep_every);
    std::vector<int64_t> left;
    for (const CheckpointInfo& c : list_checkpoints(run.path())) left.push_back(c.step);
    EXPECT_EQ(names_in(run.file("checkpoints")).size(), left.size());
    return left;
}

TEST(Checkpoint, Prune) {
    using Steps = std::vector<int64_t>;
    EXPECT_EQ(steps_left({10, 20, 30, 40}, 2, 0), (Steps{30, 40}));
    EXPECT_EQ(steps_left({10, 20, 30, 40}, 1, 0), (Steps{40}));
    EXPECT_EQ(steps_left({10, 20, 30, 40}, 9, 0), (Steps{10, 20, 30, 40}));
    EXPECT_EQ(steps_left({10, 20, 30, 40}, 0, 0), (Steps{40}));               // the newest always stays
    EXPECT_EQ(steps_left({10, 20, 30, 40}, 3, 10), (Steps{10, 20, 30, 40}));  // all are major
    EXPECT_EQ(steps_left({10, 20, 30, 40, 45}, 1, 20), (Steps{20, 40, 45}));
    EXPECT_EQ(steps_left({0, 7}, 1, 5), (Steps{0, 7}));
    EXPECT_EQ(steps_left({5}, 1, 0), (Steps{5}));
    test::TempDir empty;
    prune_checkpoints(empty.path(), 3, 0);
}

// The newest good checkpoint loads and holds what its step wrote.
void expect_loadable(const std::string& run, const Config& c, int64_t at_least) {
    const CheckpointInfo info = newest_good_checkpoint(run, [](const std::string& line) { ADD_FAILURE() << line; });
    ASSERT_GE(info.step, at_least);
    Arenas found(c, -1), wanted(c, info.step);
    read_checkpoint(info.path, found.data());
    EXPECT_TRUE(found == wanted);
    EXPECT_EQ(read_state(info.path, nullptr).step, info.step);
}

TEST(Checkpoint, KilledWriterLeavesAGoodCheckpoint) {
    test::TempDir run;
    const Config c = small_config();
    write_step(run.path(), c, 1);
    int64_t step = 1;
    uint64_t patience = 20000;  // microseconds; grows until some writes are finished, on a slow disk too
    for (uint64_t k = 0; k < 20 || (step == 1 && k < 100); k++) {
        const pid_t child = ::fork();
        if (child == 0) {
            for (int64_t s = step + 1;; s++) {
                write_step(run.path(), c, s);
                prune_checkpoints(run.path(), 2, 0);
            }
        }
        if (step == 1) patience += 10000;
        ::usleep(useconds_t(random_below(5, k, 0, patience)));
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
        expect_loadable(run.path(), c, step);
        step = newest_good_checkpoint(run.path()).step;
    }
    EXPECT_GT(step, 1);
    write_step(run.path(), c, step + 1);
    for (const std::string& name : names_in(run.file("checkpoints"))) EXPECT_TRUE(name.starts_with("step_")) << name;
}

// The kernel ends the writer at a chosen byte of a chosen file: every prefix of the work is a crash that must be
// survived.
TEST(Checkpoint, WriterEndedAtAnyByteLeavesAGoodCheckpoint) {
    test::TempDir run;
    const Config c = small_config();
    write_step(run.path(), c, 1);
    const uint64_t largest = fs::file_size(run.file("checkpoints/step_00000001/optimizer.safetensors"));
    for (uint64_t k = 0; k < 12; k++) {
        const pid_t child = ::fork();
        if (child == 0) {
            const rlimit limit{k * largest / 12, k * largest / 12}, none{0, 0};
            ::setrlimit(RLIMIT_CORE, &none);
            ::setrlimit(RLIMIT_FSIZE, &limit);  // SIGXFSZ ends the process
            ::signal(SIGXFSZ, SIG_DFL);
            write_step(run.path(), c, 2);
            ::_exit(0);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status)) << k;
        EXPECT_EQ(list_checkpoints(run.path()).size(), 1u);
        expect_loadable(run.path(), c, 1);
    }
    write_step(run.path(), c, 2);
    EXPECT_EQ(names_in(run.file("checkpoints")).size(), 2u);
}

TEST(Checkpoint, FullDiskIsOneErrorAndNothingHalfWritten) {
    test::TempDir dir;
    const std::string run = dir.file("disk");
    fs::create_directory(run);
    if (::mount("tmpfs", run.c_str(), "tmpfs", 0, "size=128k")) GTEST_SKIP() << "cannot mount a small tmpfs";
    const Config c = small_config();
    int64_t step = 0;
    std::string what;
    while (what.empty() && step < 50) what = mistake([&] { write_step(run, c, ++step); }, kExitFailure);
    EXPECT_NE(what.find("cannot write: No space left on device"), std::string::npos) << what;
    EXPECT_NE(what.find(run + "/checkpoints/.tmp-step_"), std::string::npos) << what;
    EXPECT_GT(step, 2);
    EXPECT_EQ(list_checkpoints(run).size(), size_t(step - 1));
    EXPECT_EQ(names_in(run + "/checkpoints").size(), size_t(step - 1));
    expect_loadable(run, c, step - 1);
    ::umount(run.c_str());
}

TEST(Checkpoint, UnwritableDirectoryIsNamed) {
    test::TempDir dir;
    test::write_file(dir.file("run"), "a file");
    const Config c = small_config();
    const std::string what = mistake([&] { write_step(dir.file("run"), c, 1); }, kExitFailure);
    EXPECT_EQ(what.rfind(dir.file("run/checkpoints: cannot make the directory: "), 0), 0u) << what;
}

TEST(Checkpoint, AnotherModelsArenasAreRefused) {
    test::TempDir run;
    const Config c = small_config();
    write_step(run.path(), c, 1);
    Config other = c;
    other.model.n_layers = 3;
    Arenas a(other);
    const std::string what =
        mistake([&] { read_checkpoint(run.file("checkpoints/step_00000001"), a.data()); }, kExitData);
    EXPECT_NE(what.find("tensor layers.2."), std::string::npos) << what;
}

// ---- resuming ------------------------------------------------------------------------------------------------------

TEST(Resume, ConflictsAreNamed) {
    const Config saved = small_config();
    EXPECT_TRUE(resume_conflicts(saved, saved).empty());
    const auto one = [&](const std::function<void(Config&)>& edit) {
        Config wanted = saved;
        edit(wanted);
        const std::vector<std::string> c = resume_conflicts(saved, wanted);
        return c.empty() ? "" : c.size() == 1 ? c[0] : c[0] + " and " + std::to_string(c.size() - 1) + " more";
    };
    const char* none = "";
    EXPECT_EQ(one([](Config& c) { c.run.out = "x", c.run.device = "cpu", c.run.threads = 9, c.run.dtype = "auto"; }),
              none);
    EXPECT_EQ(one([](Config& c) {
                  c.train.micro_batch = 2, c.train.val_every = 1, c.train.sample_every = 1, c.train.keep_last = 9;
              }),
              none);
    EXPECT_EQ(
        one([](Config& c) { c.train.checkpoint_every = 1, c.train.keep_every = 4, c.train.log_priors_every = 2; }),
        none);
    EXPECT_EQ(one([](Config& c) { c.train.recompute = "block", c.model.init_from = "y", c.model.preset = "p"; }), none);
    EXPECT_EQ(one([](Config& c) { c.eval.suites = {"niah"}, c.eval.lengths = {5}; }), none);
    EXPECT_EQ(one([](Config& c) { c.model.dim = 24; }), "model.dim: 12 in the checkpoint, 24 now");
    EXPECT_EQ(one([](Config& c) { c.model.position.encoding = Encoding::alibi; }),
              "model.position.encoding: \"bam\" in the checkpoint, \"alibi\" now");
    EXPECT_EQ(one([](Config& c) { c.model.position.ssmax_order = SsmaxOrder::scale_scores; }),
              "model.position.ssmax_order: \"scale_bias\" in the checkpoint, \"scale_scores\" now");
    EXPECT_EQ(one([](Config& c) {
                  c.model.position.init_beta.values = {0, 1};
              }),
              "model.position.bam.init_beta: 0.0 in the checkpoint, [0.0,1.0] now");
    EXPECT_EQ(one([](Config& c) { c.data.train = {"b"}; }), "data.train: [\"a_*.bin\"] in the checkpoint, [\"b\"] now");
    EXPECT_EQ(one([](Config& c) { c.data.has_separator = false; }),
              "data.separator: {\"id\":2,\"position\":\"start\"} in the checkpoint, null now");
    EXPECT_EQ(one([](Config& c) { c.data.shuffle = false; }), "data.shuffle: true in the checkpoint, false now");
    EXPECT_EQ(one([](Config& c) { c.train.steps = 101; }), "train.steps: 100 in the checkpoint, 101 now");
    EXPECT_EQ(one([](Config& c) { c.train.tokens_per_step = 7; }),
              "train.tokens_per_step: 14 in the checkpoint, 7 now");
    EXPECT_EQ(one([](Config& c) { c.train.optimizer.lr = 1; }), "train.optimizer.lr: 0.001 in the checkpoint, 1.0 now");
    EXPECT_EQ(one([](Config& c) { c.train.schedule.name = "wsd"; }),
              "train.schedule.name: \"cosine\" in the checkpoint, \"wsd\" now");
    EXPECT_EQ(one([](Config& c) { c.run.seed = 1; }), "run.seed: 18446744073709551615 in the checkpoint, 1 now");
    EXPECT_EQ(one([](Config& c) { c.run.dtype = "bf16"; }), "run.dtype: \"fp32\" in the checkpoint, \"bf16\" now");
    EXPECT_EQ(one([](Config& c) { c.train.grad_clip = 2, c.train.seq_len = 14; }),
              "train.seq_len: 7 in the checkpoint, 14 now and 1 more");
}

TEST(Resume, OneProcessARunDirectory) {
    test::TempDir dir;
    const std::string run = dir.file("a/b");
    {
        const RunLock lock(run);
        EXPECT_EQ(mistake([&] { RunLock second(run); }, kExitFailure),
                  run + ": in use by process " + std::to_string(::getpid()) + ", expected one process a run directory");
    }
    {
        auto first = std::make_unique<RunLock>(run);
        std::thread release([&] { ::usleep(200'000), first.reset(); });
        const RunLock patient(run, 30);
        release.join();
    }
    const RunLock again(run);
    // A lock dies with its process, however that ends.
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const std::string other = dir.file("c");
    const pid_t child = ::fork();
    if (child == 0) {
        const RunLock lock(other);
        if (::write(ready[1], "x", 1) != 1) ::_exit(1);
        for (;;) ::pause();
    }
    char x;
    ASSERT_EQ(::read(ready[0], &x, 1), 1);
    EXPECT_EQ(mistake([&] { RunLock second(other); }, kExitFailure),
              other + ": in use by process " + std::to_string(child) + ", expected one process a run directory");
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const RunLock free(other);
    ::close(ready[0]), ::close(ready[1]);
}

}  // namespace
}  // namespace bam
