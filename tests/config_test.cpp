// The config: what a user may write, what comes of it, and the one line a mistake gets.
#include "config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "check.h"
#include "json.h"
#include "test_support.h"

namespace bam {
namespace {

using Json = nlohmann::ordered_json;

const char* const kSmall = R"({"model": {"preset": "nano", "vocab_size": 257},
                               "data": {"train": ["a.bin"], "separator": {"id": 256, "position": "end"}}})";

// DESIGN §3, word for word.
const char* const kDesign = R"({
  "run":   { "name": "l12-bam_ssmax", "out": "runs", "seed": 42, "device": "auto", "dtype": "auto", "threads": 0 },
  "model": { "preset": "l12", "vocab_size": 32768, "init": "pytorch", "init_from": null, "tie_embeddings": false,
             "position": { "encoding": "bam", "ssmax": true, "ssmax_order": null,
                           "rope": { "theta": 500000, "layout": "interleaved" }, "sinusoidal": { "theta": 10000, "variant": "vaswani" },
                           "bam": { "scope": "layer", "train_alpha": true, "train_beta": true, "train_mu": false,
                                    "init_alpha": 0, "init_beta": 0, "init_mu": 0 } } },
  "data":  { "train": ["data/fineweb/train_*.bin"], "val": ["data/fineweb/val_*.bin"], "tokenizer": "data/fineweb/tokenizer.model",
             "separator": { "id": 2, "position": "end" }, "document_mask": true, "positions": "document", "shuffle": true },
  "train": { "seq_len": 512, "tokens_per_step": 589824, "micro_batch": 0, "steps": 20000,
             "optimizer": { "name": "radam", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "prior_lr": null },
             "schedule": { "name": "cosine", "warmup_steps": 0, "final_fraction": 0.1, "decay_fraction": 0.2 }, "grad_clip": 1.0,
             "val_every": 250, "sample_every": 0, "checkpoint_every": 500, "keep_last": 3, "keep_every": 0, "log_priors_every": 100,
             "on_nonfinite": "stop" },
  "eval":  { "suites": ["passkey", "perplexity"], "lengths": [512, 1024, 2048, 4096, 8192, 16384, 32768] } })";

Config load(const std::string& text, const std::vector<std::string>& sets = {}, const std::string& variant = "") {
    test::TempDir dir;
    test::write_file(dir.file("c.json"), text);
    return load_config(dir.file("c.json"), sets, variant);
}

// The message of the Error, behind the temporary directory's name; "" if there was none.
std::string mistake(const std::string& text, const std::vector<std::string>& sets = {},
                    const std::string& variant = "") {
    try {
        load(text, sets, variant);
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitUsage);
        const std::string what = e.what();
        EXPECT_EQ(what.find('\n'), std::string::npos) << what;
        const size_t file = what.find("c.json");
        return file == std::string::npos ? what : what.substr(file);
    }
    return "";
}

TEST(Config, DesignExampleIsReadAndGivesTheDefaults) {
    const Config c = load(kDesign);
    EXPECT_EQ(c.run.name, "l12-bam_ssmax");
    EXPECT_EQ(c.model.dim, 768);
    EXPECT_EQ(c.model.n_layers, 12);
    EXPECT_EQ(c.model.n_kv_heads, 16);
    EXPECT_EQ(c.model.ffn_hidden, 1536);
    EXPECT_EQ(c.train.rows_per_step(), 1152);
    EXPECT_LT(c.train.optimizer.prior_lr, 0);
    EXPECT_EQ(c.eval.lengths.size(), 7u);

    // What the example shows are the defaults.
    const Config d = load(R"({"run": {"name": "l12-bam_ssmax"}, "model": {"preset": "l12", "vocab_size": 32768},
        "data": {"train": ["data/fineweb/train_*.bin"], "val": ["data/fineweb/val_*.bin"],
                 "tokenizer": "data/fineweb/tokenizer.model", "separator": {"id": 2}},
        "eval": {"suites": ["passkey", "perplexity"], "lengths": [512, 1024, 2048, 4096, 8192, 16384, 32768]}})");
    EXPECT_EQ(to_json(c).dump(1), to_json(d).dump(1));

    // Every key of the example comes back, in its order.
    std::vector<std::string> order, found;
    const Json example = Json::parse(kDesign), resolved = to_json(c);
    for (const auto& [section, keys] : example.items()) {
        size_t last = 0;
        for (const auto& [key, value] : keys.items()) {
            size_t place = 0;
            while (place < resolved[section].size() && std::next(resolved[section].begin(), long(place)).key() != key)
                place++;
            ASSERT_LT(place, resolved[section].size()) << section << "." << key;
            EXPECT_TRUE(place > last || place == 0) << section << "." << key;
            last = place;
        }
    }
}

TEST(Config, Presets) {
    struct Row {
        const char* name;
        int dim, layers, heads, D, ffn;
    };
    for (const Row& r : {Row{"l6", 512, 6, 16, 32, 1024},
                         {"l8", 768, 8, 16, 48, 1536},
                         {"l12", 768, 12, 16, 48, 1536},
                         {"l15", 1152, 15, 24, 48, 2304},
                         {"l18", 1536, 18, 32, 48, 3072},
                         {"l24", 2048, 24, 64, 32, 4096},
                         {"nano", 128, 4, 8, 16, 256}}) {
        const Config c = load(kSmall, {std::string("model.preset=") + r.name});
        EXPECT_EQ(c.model.preset, r.name);
        EXPECT_EQ(c.model.dim, r.dim) << r.name;
        EXPECT_EQ(c.model.n_layers, r.layers) << r.name;
        EXPECT_EQ(c.model.n_heads, r.heads) << r.name;
        EXPECT_EQ(c.model.n_kv_heads, r.heads) << r.name;
        EXPECT_EQ(c.model.head_dim(), r.D) << r.name;
        EXPECT_EQ(c.model.ffn_hidden, r.ffn) << r.name;
    }
    const Config c = load(kSmall, {"model.n_heads=4", "model.dim=64"});  // over the preset
    EXPECT_EQ(c.model.dim, 64);
    EXPECT_EQ(c.model.n_kv_heads, 4);
    EXPECT_EQ(c.model.ffn_hidden, 256);
    const Config d = load(R"({"model": {"dim": 36, "n_layers": 2, "n_heads": 3, "ffn_hidden": 72, "vocab_size": 51},
                              "data": {"train": "x.bin"}})");
    EXPECT_EQ(d.model.preset, "");
    EXPECT_EQ(d.model.n_kv_heads, 3);
    EXPECT_FALSE(d.data.has_separator);
    EXPECT_FALSE(d.data.document_mask);
    EXPECT_EQ(d.data.train, std::vector<std::string>{"x.bin"});
}

TEST(Config, PresetSetOverAResolvedConfigReplacesItsDimensions) {
    const std::string resolved = to_json(load(kSmall, {"model.n_kv_heads=4"})).dump();
    const Config c = load(resolved, {"model.preset=l6"});
    EXPECT_EQ(c.model.dim, 512);
    EXPECT_EQ(c.model.n_layers, 6);
    EXPECT_EQ(c.model.n_kv_heads, 4);  // was not the preset's, so it was asked for
}

TEST(Config, ResolvedRoundTrips) {
    const std::vector<std::string> sets = {"run.name=a b",
                                           "run.out=/tmp/x",
                                           "run.seed=18446744073709551615",
                                           "run.device=cpu",
                                           "run.dtype=bf16",
                                           "run.threads=3",
                                           "model.dim=96",
                                           "model.n_layers=5",
                                           "model.n_heads=6",
                                           "model.n_kv_heads=3",
                                           "model.ffn_hidden=100",
                                           "model.vocab_size=300",
                                           "model.norm_eps=1e-6",
                                           "model.init=gpt2",
                                           "model.init_from=runs/y",
                                           "model.tie_embeddings=true",
                                           "model.position.encoding=rope",
                                           "model.position.ssmax=false",
                                           "model.position.ssmax_order=scale_scores",
                                           "model.position.rope.theta=10000.5",
                                           "model.position.rope.layout=half",
                                           "model.position.sinusoidal.theta=77",
                                           "model.position.sinusoidal.variant=bam",
                                           "model.position.bam.scope=global",
                                           "model.position.bam.train_alpha=false",
                                           "model.position.bam.train_beta=false",
                                           "model.position.bam.train_mu=true",
                                           "model.position.bam.init_alpha=slope",
                                           "model.position.bam.init_beta=[-0.5,1]",
                                           "model.position.bam.init_mu=0.1",
                                           "data.train=[\"a\",\"b\"]",
                                           "data.val=[\"c\"]",
                                           "data.val_tokens=1e6",
                                           "data.val_gap=12",
                                           "data.tokenizer=byte",
                                           "data.separator.id=7",
                                           "data.separator.position=start",
                                           "data.document_mask=false",
                                           "data.positions=row",
                                           "data.shuffle=false",
                                           "train.seq_len=29",
                                           "train.tokens_per_step=290",
                                           "train.micro_batch=3",
                                           "train.steps=77",
                                           "train.optimizer.name=adamw",
                                           "train.optimizer.lr=0.1234567890123456789",
                                           "train.optimizer.betas=[0,0.999]",
                                           "train.optimizer.eps=1e-9",
                                           "train.optimizer.weight_decay=0",
                                           "train.optimizer.prior_lr=0",
                                           "train.schedule.name=wsd",
                                           "train.schedule.warmup_steps=77",
                                           "train.schedule.final_fraction=1",
                                           "train.schedule.decay_fraction=0.3",
                                           "train.grad_clip=0",
                                           "train.val_every=1",
                                           "train.sample_every=2",
                                           "train.checkpoint_every=3",
                                           "train.keep_last=4",
                                           "train.keep_every=5",
                                           "train.log_priors_every=6",
                                           "train.on_nonfinite=skip",
                                           "train.recompute=block",
                                           "eval.suites=[\"niah\"]",
                                           "eval.lengths=[29,58]"};
    const Config a = load(kSmall, sets), plain = load(kSmall);
    const Json j = to_json(a), k = to_json(plain);
    EXPECT_EQ(j.dump(), to_json(parse_config(j, "run.json")).dump());
    EXPECT_EQ(k.dump(), to_json(parse_config(k, "run.json")).dump());
    EXPECT_EQ(j.dump(), to_json(parse_config(Json::parse(j.dump()), "run.json")).dump());  // through text

    // Every key was changed by the list above, so none is lost on the way.
    const Json f = j.flatten(), g = k.flatten();
    for (const auto& [path, value] : g.items())
        if (path != "/model/preset" && f.contains(path)) {
            EXPECT_NE(f[path], value) << path;
        }
    EXPECT_EQ(a.run.seed, 18446744073709551615ull);
    EXPECT_EQ(a.data.val_tokens, 1000000);
    EXPECT_EQ(a.train.optimizer.prior_lr, 0);
    EXPECT_EQ(a.model.position.init_beta.values, (std::vector<double>{-0.5, 1}));
    EXPECT_TRUE(a.model.position.init_alpha.slope);
    EXPECT_TRUE(a.model.position.bam_global);
    EXPECT_FALSE(a.data.separator_at_end);
    EXPECT_FALSE(a.data.positions_by_document);
}

TEST(Config, SetTakesJsonOrText) {
    EXPECT_EQ(load(kSmall, {"run.name=7"}).run.name, "7");
    EXPECT_EQ(load(kSmall, {"run.name=\"x=y\""}).run.name, "x=y");
    EXPECT_EQ(load(kSmall, {"run.name=x=y"}).run.name, "x=y");
    EXPECT_EQ(load(kSmall, {"train.steps=1e4"}).train.steps, 10000);
    EXPECT_EQ(load(kSmall, {"train.steps=5", "train.steps=6"}).train.steps, 6);
    EXPECT_EQ(load(kSmall, {"data.tokenizer=null"}).data.tokenizer, "");
    EXPECT_EQ(load(kSmall, {"data.train=data/x_*.bin"}).data.train, std::vector<std::string>{"data/x_*.bin"});
    EXPECT_EQ(load(kSmall, {"data.separator=null"}).data.has_separator, false);
    EXPECT_EQ(load(kSmall, {"data.separator=null", "data.separator.id=3"}).data.separator_id, 3);
    EXPECT_EQ(load(kSmall, {"train.schedule={\"name\":\"constant\"}"}).train.schedule.name, "constant");
    EXPECT_EQ(load(kSmall, {"eval.lengths=[8]"}).eval.lengths, std::vector<int64_t>{8});
}

TEST(Config, VariantComesLastAndKeepsAnExplicitOrder) {
    const Config a = load(kSmall, {"model.position.encoding=rope"}, "alibi_ssmax");
    EXPECT_EQ(a.model.position.encoding, Encoding::alibi);
    EXPECT_TRUE(a.model.position.ssmax);
    EXPECT_EQ(a.model.position.ssmax_order, SsmaxOrder::scale_scores);
    EXPECT_EQ(load(kSmall, {}, "ggd_bam").model.position.ssmax_order, SsmaxOrder::scale_bias);
    EXPECT_FALSE(load(kSmall, {}, "rotary").model.position.ssmax);
    EXPECT_EQ(load(kSmall, {"model.position.ssmax_order=null"}, "alibi_ssmax").model.position.ssmax_order,
              SsmaxOrder::scale_scores);
    EXPECT_EQ(load(kSmall, {"model.position.ssmax_order=scale_bias"}, "alibi_ssmax").model.position.ssmax_order,
              SsmaxOrder::scale_bias);
    EXPECT_EQ(load(kSmall, {"model.position.encoding=alibi"}).model.position.ssmax_order, SsmaxOrder::scale_scores);
    const std::vector<std::string> odd = {"model.dim=36", "model.n_heads=4", "model.position.encoding=rope"};
    EXPECT_NE(mistake(kSmall, odd), "");
    EXPECT_EQ(mistake(kSmall, odd, "nope"), "");  // checked with the encoding that will be used
    EXPECT_NE(mistake(kSmall, {}, "bamm").find("bam_ssmax"), std::string::npos);
}

TEST(Config, MistakesInTheFile) {
    const auto with = [](const std::string& section, const std::string& content) {
        Json j = Json::parse(kSmall);
        j[section].update(Json::parse(content));
        return j.dump();
    };
    EXPECT_EQ(mistake(R"({"modle": {}})"), "c.json: modle: unknown key; did you mean model?");
    EXPECT_EQ(mistake(with("train", R"({"optimizer": {"beta": [0.9, 0.95]}})")),
              "c.json: train.optimizer.beta: unknown key; did you mean train.optimizer.betas?");
    EXPECT_EQ(mistake(with("model", R"({"position": {"bam": {"inti_beta": 1}}})")),
              "c.json: model.position.bam.inti_beta: unknown key; did you mean model.position.bam.init_beta?");
    EXPECT_EQ(mistake(with("train", R"({"steps": "many"})")),
              "c.json: train.steps: \"many\", expected an integer >= 1");
    EXPECT_EQ(mistake(with("train", R"({"seq_len": 1.5})")),
              "c.json: train.seq_len: 1.5, expected an integer >= 1 and <= 1073741824");
    EXPECT_EQ(mistake(with("train", R"({"optimizer": {"betas": [0.9, 1]}})")),
              "c.json: train.optimizer.betas[1]: 1, expected a number >= 0 and < 1");
    EXPECT_EQ(mistake(with("train", R"({"optimizer": {"betas": 0.9}})")),
              "c.json: train.optimizer.betas: 0.9, expected a list of 2 numbers");
    EXPECT_EQ(mistake(with("train", R"({"on_nonfinite": "ignore"})")),
              "c.json: train.on_nonfinite: \"ignore\", expected one of stop, skip");
    EXPECT_EQ(mistake(with("train", R"({"schedule": []})")), "c.json: train.schedule: [], expected an object {...}");
    EXPECT_EQ(mistake(with("data", R"({"shuffle": 1})")), "c.json: data.shuffle: 1, expected true or false");
    EXPECT_EQ(mistake(with("data", R"({"train": [1]})")), "c.json: data.train: [1], expected a list of strings");
    EXPECT_EQ(mistake(with("data", R"({"separator": {"id": 257}})")),
              "c.json: data.separator.id: 257, expected less than model.vocab_size 257");
    EXPECT_EQ(mistake(with("data", R"({"separator": {}})")), "c.json: data.separator.id: missing");
    EXPECT_EQ(mistake(with("data", R"({"separator": null, "document_mask": true})")),
              "c.json: data.document_mask: true, expected data.separator with it: documents end where it stands");
    EXPECT_EQ(mistake(with("run", R"({"seed": -1})")), "c.json: run.seed: -1, expected an integer >= 0");
    EXPECT_EQ(mistake(with("run", R"({"name": "a/b"})")),
              "c.json: run.name: \"a/b\", expected a directory name without / and not beginning with a dot");
    EXPECT_EQ(mistake(with("run", R"({"name": ""})")), "c.json: run.name: \"\", expected a string that is not empty");
    EXPECT_EQ(mistake(with("model", R"({"preset": "l13"})")),
              "c.json: model.preset: \"l13\", expected one of l6 l8 l12 l15 l18 l24 nano");
    EXPECT_EQ(mistake(with("model", R"({"position": {"bam": {"init_beta": "slope"}}})")),
              "c.json: model.position.bam.init_beta: \"slope\", expected a number, [first, last]");
    EXPECT_EQ(mistake(with("model", R"({"position": {"bam": {"init_alpha": [1]}}})")),
              "c.json: model.position.bam.init_alpha: [1], expected a number, [first, last] or \"slope\"");
    EXPECT_EQ(mistake(with("eval", R"({"suites": ["passkeys"]})")),
              "c.json: eval.suites: \"passkeys\", expected one of passkey, niah, perplexity, choice");
    EXPECT_EQ(mistake(R"({"model": {"vocab_size": 3}})"), "c.json: model.dim: missing (give it, or a preset)");
    EXPECT_EQ(mistake(R"({"model": {"preset": "nano"}, "data": {"train": "a"}})"), "c.json: model.vocab_size: missing");
    EXPECT_EQ(mistake(R"({"model": {"preset": "nano", "vocab_size": 3}})"),
              "c.json: data.train: missing: expected token shards, as a list of files or patterns");
    EXPECT_EQ(mistake("[]"), "c.json: top level: [], expected an object {...}");
}

TEST(Config, MistakesInTheText) {
    EXPECT_EQ(mistake("{\n  \"run\": {},\n  // why not\n}").substr(0, 26), "c.json: line 3, column 3: ");
    EXPECT_EQ(mistake("").substr(0, 26), "c.json: line 1, column 1: ");
    EXPECT_EQ(mistake("{} {}").substr(0, 26), "c.json: line 1, column 4: ");
    EXPECT_EQ(mistake(R"({"run": {"seed": 1, "name": "x", "seed": 2}})"), "c.json: run.seed: given twice");
    EXPECT_EQ(mistake(R"({"run": {}, "data": {}, "run": {}})"), "c.json: run: given twice");
    EXPECT_EQ(mistake("{\"run\": " + std::string(1000000, '[') + std::string(1000000, ']') + "}"),
              "c.json: nested deeper than 64 levels");
    EXPECT_NE(mistake(R"({"train": {"grad_clip": 1e999}})").find("c.json"), std::string::npos);
    EXPECT_NE(mistake("{\"run\": {\"name\": \"\xff\"}}").find("not JSON"), std::string::npos);
    try {
        load_config("no/such/file.json", {}, "");
        FAIL();
    } catch (const Error& e) {
        EXPECT_STREQ(e.what(), "no/such/file.json: No such file or directory");
    }
    EXPECT_THROW(load_config(".", {}, ""), Error);
}

TEST(Config, MistakesInSets) {
    EXPECT_EQ(mistake(kSmall, {"trian.steps=3"}),
              "--set trian.steps=3: unknown key trian.steps; did you mean train.steps?");
    EXPECT_EQ(mistake(kSmall, {"steps=3"}), "--set steps=3: unknown key steps; did you mean train.steps?");
    EXPECT_EQ(mistake(kSmall, {"train.lr=3"}),
              "--set train.lr=3: unknown key train.lr; did you mean train.optimizer.lr?");
    EXPECT_EQ(mistake(kSmall, {"step=3"}), "--set step=3: unknown key step; did you mean train.steps?");
    EXPECT_EQ(mistake(kSmall, {"train.steps.x=3"}),
              "--set train.steps.x=3: unknown key train.steps.x; did you mean train.steps?");
    EXPECT_EQ(mistake(kSmall, {"train.steps"}), "--set train.steps: expected key=value, like train.steps=100");
    EXPECT_EQ(mistake(kSmall, {"=3"}), "--set =3: expected key=value, like train.steps=100");
    EXPECT_EQ(mistake(kSmall, {"train.steps=0"}), "--set train.steps=0: 0, expected an integer >= 1");
    EXPECT_EQ(mistake(kSmall, {"train.micro_batch=65536"}), "--set train.micro_batch=65536: 65536, expected an integer >= 0 and <= 65535");
    EXPECT_EQ(mistake(kSmall, {"train.steps=ten"}), "--set train.steps=ten: \"ten\", expected an integer >= 1");
    EXPECT_EQ(mistake(kSmall, {"train.steps="}), "--set train.steps=: \"\", expected an integer >= 1");
    EXPECT_EQ(mistake(kSmall, {"train.grad_clip=nan"}), "--set train.grad_clip=nan: \"nan\", expected a number >= 0");
    EXPECT_EQ(mistake(kSmall, {"train.optimizer={\"lr\":-1}"}),
              "--set train.optimizer={\"lr\":-1}: train.optimizer.lr: -1, expected a number >= 0");
    EXPECT_EQ(mistake(kSmall, {"train.optimizer={\"lr\":1,\"lr\":2}"}), "--set train.optimizer: lr: given twice");
    EXPECT_EQ(mistake(kSmall, {"run.dtype=fp16"}), "--set run.dtype=fp16: \"fp16\", expected one of auto, fp32, bf16");
}

TEST(Config, KeysThatMustFit) {
    EXPECT_EQ(mistake(kSmall, {"train.tokens_per_step=1000"}),
              "--set train.tokens_per_step=1000: 1000, expected a multiple of train.seq_len 512");
    EXPECT_EQ(mistake(kSmall, {"train.steps=10", "train.schedule.warmup_steps=11"}),
              "--set train.schedule.warmup_steps=11: 11, expected at most train.steps 10");
    EXPECT_EQ(mistake(kSmall, {"train.steps=10", "train.schedule.warmup_steps=10"}), "");
    EXPECT_EQ(mistake(kSmall, {"model.n_heads=3"}), "--set model.n_heads=3: 3, expected a divisor of dim 128");
    EXPECT_EQ(mistake(kSmall, {"model.n_kv_heads=3"}), "--set model.n_kv_heads=3: 3, expected a divisor of n_heads 8");
    EXPECT_EQ(mistake(kSmall, {"model.dim=1028", "model.n_heads=4"}),
              "--set model.n_heads=4: 4 gives a head size of 257, expected dim / n_heads <= 256");
    EXPECT_EQ(mistake(kSmall, {"model.dim=1024", "model.n_heads=4"}), "");
    EXPECT_EQ(mistake(kSmall, {"model.dim=36", "model.n_heads=4", "model.position.encoding=rope"}),
              "--set model.n_heads=4: 4 gives a head size of 9, expected an even one with the encoding rope");
    EXPECT_EQ(mistake(kSmall, {"model.dim=36", "model.n_heads=4"}), "");
}

TEST(Config, ModelSectionHasTheGoldensForm) {
    const Config c = load(kSmall, {"model.position.bam.init_beta=[-0.5,1]"}, "bam_ssmax");
    EXPECT_EQ(
        to_json(c.model).dump(),
        R"({"dim":128,"n_layers":4,"n_heads":8,"n_kv_heads":8,"ffn_hidden":256,"vocab_size":257,)"
        R"("norm_eps":1e-05,"tie_embeddings":false,"position":{"encoding":"bam","ssmax":true,"ssmax_order":"scale_bias",)"
        R"("bam":{"scope":"layer","train_alpha":true,"train_beta":true,"train_mu":false}}})");
    for (const std::string& v : variant_names()) {
        const ModelConfig m = load(kSmall, {}, v).model;
        const Json j = to_json(m);
        EXPECT_EQ(j["position"].contains("ssmax_order"), m.position.ssmax);
        const ModelConfig back = parse_model(j, "config.json");
        EXPECT_EQ(variant_of(back.position), v);
        EXPECT_EQ(to_json(back).dump(), j.dump());
    }
    Json j = to_json(c.model);
    j["position"].erase("ssmax");
    try {
        parse_model(j, "d/config.json");
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitData);
        EXPECT_STREQ(e.what(), "d/config.json: model.position.ssmax: missing");
    }
}

TEST(Config, GoldensAreRead) {
    const std::string dir = test::goldens_dir();
    if (dir.empty()) GTEST_SKIP() << "no goldens";
    for (const char* name : {"alibi", "bam_ssmax", "nope", "rope_ssmax", "sinusoidal"}) {
        const Json j = read_json_file(dir + "/" + name + "/config.json", kExitData);
        const ModelConfig m = parse_model(j["model"], name);
        EXPECT_EQ(variant_of(m.position), name);
        Json ours = to_json(m), theirs = j["model"];
        ours["position"].erase("ssmax_order");  // theirs leave it to the default
        EXPECT_EQ(ours.dump(), theirs.dump());
    }
}

TEST(Config, Nearest) {
    EXPECT_EQ(nearest("sedd", {"seed", "steps"}), "seed");
    EXPECT_EQ(nearest("ab", {"cd", "ba"}), "ba");  // swapped neighbours are one edit
    EXPECT_EQ(nearest("", {"abc", "a"}), "a");
    EXPECT_EQ(nearest("x", {}), "");
}

// What is in configs/ loads; its data need not be there.
TEST(Config, ShippedConfigs) {
    const auto read = [](const std::string& name) { return load_config("configs/" + name + ".json", {}, ""); };
    for (const char* preset : {"l6", "l8", "l12", "l15", "l18", "l24"}) {
        const Config c = read(std::string("paper-") + preset);
        EXPECT_EQ(c.model.preset, preset);
        EXPECT_EQ(c.model.vocab_size, 32768);
        EXPECT_EQ(c.train.tokens_per_step, 589824);
        EXPECT_EQ(c.train.steps, 20000);
        EXPECT_EQ(c.train.seq_len, 512);
        EXPECT_FALSE(c.data.positions_by_document);
        EXPECT_TRUE(c.data.document_mask);
        EXPECT_EQ(c.data.val_tokens, 3932160);
        EXPECT_EQ(c.data.val_gap, 1000000);
        EXPECT_EQ(c.model.position.sinusoidal_variant, SinusoidalVariant::bam);
        EXPECT_EQ(c.model.position.init_beta.values, std::vector<double>{0});
        EXPECT_EQ(c.run.dtype, "bf16");
    }
    const Config nano = read("text-nano");
    EXPECT_EQ(nano.model.dim, 128);
    EXPECT_EQ(nano.data.separator_id, 256);
    const Config gpt2 = read("gpt2-shards-124M");
    EXPECT_EQ(gpt2.model.vocab_size, 50257);
    EXPECT_FALSE(gpt2.data.separator_at_end);
    EXPECT_EQ(gpt2.train.rows_per_step(), 512);
}

}  // namespace
}  // namespace bam
