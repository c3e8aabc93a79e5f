// The config's keys, their ranges, and the way from file, --set and --pe to a checked Config.
#include "config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "check.h"
#include "json.h"
#include "json_fields.h"

namespace bam {

namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMany = int64_t(1) << 53;  // steps, tokens
constexpr RealRange kAny = {-1e6, 1e6};
constexpr RealRange kPositive = {.low = 0, .low_open = true};
constexpr RealRange kNotNegative = {.low = 0};
constexpr RealRange kFraction = {0, 1};
constexpr RealRange kBeta = {.low = 0, .high = 1, .high_open = true};

const std::vector<std::string> kSuites = {"passkey", "niah", "perplexity", "choice"};

Names<std::string> words(const std::vector<std::string>& list) {
    Names<std::string> names;
    for (const std::string& w : list) names.push_back({w, w});
    return names;
}

// position.cpp alone lists the encodings.
Names<Encoding> encodings() {
    Names<Encoding> names;
    for (const std::string& v : variant_names()) {
        PositionConfig p;
        apply_variant(p, v);
        if (!p.ssmax) names.push_back({v, p.encoding});
    }
    return names;
}

// ---- the keys, in the order they are printed -----------------------------------------------------------------------

template <class Io>
void fields(Io& io, RunConfig& r) {
    io.text("name", r.name);
    io.text("out", r.out);
    io.unsigned64("seed", r.seed);
    io.choice("device", r.device, words({"auto", "cpu", "cuda"}));
    io.choice("dtype", r.dtype, words({"auto", "fp32", "bf16"}));
    io.integer("threads", r.threads, 0, 4096);
}

template <class Io>
void fields(Io& io, PositionConfig& p) {
    const Names<SsmaxOrder> orders = {{"scale_bias", SsmaxOrder::scale_bias},
                                      {"scale_scores", SsmaxOrder::scale_scores}};
    io.choice("encoding", p.encoding, encodings());
    io.flag("ssmax", p.ssmax);
    io.choice_or_null("ssmax_order", p.ssmax_order, orders, default_order(p.encoding));
    io.section("rope", [&](Io& s) {
        s.real("theta", p.rope_theta, kPositive);
        s.choice("layout", p.rope_layout,
                 Names<RopeLayout>{{"interleaved", RopeLayout::interleaved}, {"half", RopeLayout::half}});
    });
    io.section("sinusoidal", [&](Io& s) {
        s.real("theta", p.sinusoidal_theta, kPositive);
        s.choice("variant", p.sinusoidal_variant,
                 Names<SinusoidalVariant>{{"vaswani", SinusoidalVariant::vaswani}, {"bam", SinusoidalVariant::bam}});
    });
    io.section("bam", [&](Io& s) {
        bool no_word = false;
        s.choice("scope", p.bam_global, Names<bool>{{"layer", false}, {"global", true}});
        s.flag("train_alpha", p.train_alpha);
        s.flag("train_beta", p.train_beta);
        s.flag("train_mu", p.train_mu);
        s.numbers_or_word("init_alpha", p.init_alpha.values, p.init_alpha.slope, "slope");
        s.numbers_or_word("init_beta", p.init_beta.values, no_word, nullptr);
        s.numbers_or_word("init_mu", p.init_mu.values, no_word, nullptr);
    });
}

void apply_preset(FieldReader& io, ModelConfig& m) {
    if (m.preset.empty()) return;
    std::vector<std::string> names;
    for (const ModelConfig& p : presets()) {
        names.push_back(p.preset);
        if (p.preset != m.preset) continue;
        m.dim = p.dim, m.n_layers = p.n_layers, m.n_heads = p.n_heads, m.ffn_hidden = p.ffn_hidden;
        return;
    }
    std::string list;
    for (const std::string& n : names) list += " " + n;
    io.fail("preset", "\"" + m.preset + "\", expected one of" + list);
}

template <class Io>
void fields(Io& io, ModelConfig& m) {
    io.text_or_null("preset", m.preset);
    if constexpr (Io::reading) apply_preset(io, m);
    io.integer("dim", m.dim, 1, 1 << 20);
    io.integer("n_layers", m.n_layers, 1, 1 << 16);
    io.integer("n_heads", m.n_heads, 1, kMaxHeads);
    if constexpr (Io::reading) m.n_kv_heads = m.n_heads;
    io.integer("n_kv_heads", m.n_kv_heads, 1, kMaxHeads);
    io.integer("ffn_hidden", m.ffn_hidden, 1, 1 << 24);
    io.integer("vocab_size", m.vocab_size, 1, 1 << 30);
    io.real("norm_eps", m.norm_eps, {.low = 0, .high = 1, .low_open = true});
    io.choice("init", m.init, words({"pytorch", "gpt2"}));
    io.text_or_null("init_from", m.init_from);
    io.flag("tie_embeddings", m.tie_embeddings);
    io.section("position", [&](Io& s) { fields(s, m.position); });
}

template <class Io>
void fields(Io& io, DataConfig& d) {
    io.texts("train", d.train);
    io.texts("val", d.val);
    io.integer("val_tokens", d.val_tokens, 0, kMany);
    io.integer("val_gap", d.val_gap, 0, kMany);
    io.text_or_null("tokenizer", d.tokenizer);
    io.section_or_null("separator", d.has_separator, [&](Io& s) {
        if constexpr (Io::reading)
            if (!s.has("id")) s.fail("id", "missing");
        s.integer("id", d.separator_id, 0, 1 << 30);
        s.choice("position", d.separator_at_end, Names<bool>{{"end", true}, {"start", false}});
    });
    if constexpr (Io::reading) d.document_mask = d.has_separator;
    io.flag("document_mask", d.document_mask);
    io.choice("positions", d.positions_by_document, Names<bool>{{"document", true}, {"row", false}});
    io.flag("shuffle", d.shuffle);
}

template <class Io>
void fields(Io& io, OptimizerConfig& o) {
    io.choice("name", o.name, Names<OptimizerKind>{{"radam", OptimizerKind::radam}, {"adamw", OptimizerKind::adamw}});
    io.real("lr", o.lr, kNotNegative);
    io.reals("betas", {&o.beta1, &o.beta2}, kBeta);
    io.real("eps", o.eps, kPositive);
    io.real("weight_decay", o.weight_decay, kNotNegative);
    io.real_or_null("prior_lr", o.prior_lr, kNotNegative, -1);
}

template <class Io>
void fields(Io& io, ScheduleConfig& s) {
    io.choice("name", s.name, words({"cosine", "linear", "wsd", "constant"}));
    io.integer("warmup_steps", s.warmup_steps, 0, kMany);
    io.real("final_fraction", s.final_fraction, kFraction);
    io.real("decay_fraction", s.decay_fraction, kFraction);
}

template <class Io>
void fields(Io& io, TrainConfig& t) {
    io.integer("seq_len", t.seq_len, 1, 1 << 30);
    io.integer("tokens_per_step", t.tokens_per_step, 1, kMany);
    io.integer("micro_batch", t.micro_batch, 0, kMaxRows);
    io.integer("steps", t.steps, 1, kMany);
    io.section("optimizer", [&](Io& s) { fields(s, t.optimizer); });
    io.section("schedule", [&](Io& s) { fields(s, t.schedule); });
    io.real("grad_clip", t.grad_clip, kNotNegative);
    io.integer("val_every", t.val_every, 0, kMany);
    io.integer("sample_every", t.sample_every, 0, kMany);
    io.integer("checkpoint_every", t.checkpoint_every, 0, kMany);
    io.integer("keep_last", t.keep_last, 1, 1 << 30);
    io.integer("keep_every", t.keep_every, 0, kMany);
    io.integer("log_priors_every", t.log_priors_every, 0, kMany);
    io.choice("on_nonfinite", t.on_nonfinite, words({"stop", "skip"}));
    io.choice("recompute", t.recompute, words({"none", "attention", "block"}));
}

template <class Io>
void fields(Io& io, EvalConfig& e) {
    io.choices("suites", e.suites, kSuites);
    io.integers("lengths", e.lengths, 1, kMany);
}

template <class Io>
void fields(Io& io, Config& c) {
    io.section("run", [&](Io& s) { fields(s, c.run); });
    io.section("model", [&](Io& s) { fields(s, c.model); });
    io.section("data", [&](Io& s) { fields(s, c.data); });
    io.section("train", [&](Io& s) { fields(s, c.train); });
    io.section("eval", [&](Io& s) { fields(s, c.eval); });
}

// ---- what one key alone cannot tell --------------------------------------------------------------------------------

void check_model(const ModelConfig& m, const JsonSource& source, const std::string& at) {
    const auto need = [&](const char* key, int value) {
        if (value < 1) source.fail(at + key, "missing (give it, or a preset)");
    };
    need("dim", m.dim), need("n_layers", m.n_layers), need("n_heads", m.n_heads), need("ffn_hidden", m.ffn_hidden);
    if (m.vocab_size < 1) source.fail(at + "vocab_size", "missing");
    const auto number = [](int64_t n) { return std::to_string(n); };
    if (m.dim % m.n_heads)
        source.fail(at + "n_heads", number(m.n_heads) + ", expected a divisor of dim " + number(m.dim));
    if (m.n_heads % m.n_kv_heads)
        source.fail(at + "n_kv_heads", number(m.n_kv_heads) + ", expected a divisor of n_heads " + number(m.n_heads));
    const std::string head = number(m.n_heads) + " gives a head size of " + number(m.head_dim());
    if (m.head_dim() > 256) source.fail(at + "n_heads", head + ", expected dim / n_heads <= 256");
    if (m.position.encoding == Encoding::rope && m.head_dim() % 2)
        source.fail(at + "n_heads", head + ", expected an even one with the encoding rope");
}

void check_config(const Config& c, const JsonSource& source) {
    check_model(c.model, source, "model.");
    const TrainConfig& t = c.train;
    if (c.run.name.find('/') != std::string::npos || c.run.name[0] == '.')
        source.fail("run.name",
                    "\"" + c.run.name + "\", expected a directory name without / and not beginning with a dot");
    if (c.data.train.empty())
        source.fail("data.train", "missing: expected token shards, as a list of files or patterns");
    if (c.data.has_separator && c.data.separator_id >= c.model.vocab_size)
        source.fail("data.separator.id", std::to_string(c.data.separator_id) +
                                             ", expected less than model.vocab_size " +
                                             std::to_string(c.model.vocab_size));
    if (c.data.document_mask && !c.data.has_separator)
        source.fail("data.document_mask", "true, expected data.separator with it: documents end where it stands");
    if (t.tokens_per_step % t.seq_len)
        source.fail("train.tokens_per_step", std::to_string(t.tokens_per_step) +
                                                 ", expected a multiple of train.seq_len " + std::to_string(t.seq_len));
    if (t.schedule.warmup_steps > t.steps)
        source.fail("train.schedule.warmup_steps", std::to_string(t.schedule.warmup_steps) +
                                                       ", expected at most train.steps " + std::to_string(t.steps));
}

Config read_config(const Json& j, const JsonSource& source, const std::string& variant) {
    Config c;
    FieldReader io(source, "", j);
    fields(io, c);
    io.finish();
    PositionConfig& p = c.model.position;
    if (!variant.empty()) {
        const SsmaxOrder order = p.ssmax_order;
        apply_variant(p, variant);
        const Json::json_pointer key("/model/position/ssmax_order");
        if (j.contains(key) && !j[key].is_null()) p.ssmax_order = order;  // asked for by name
    }
    check_config(c, source);
    return c;
}

// ---- --set ---------------------------------------------------------------------------------------------------------

void add_paths(const Json& j, const std::string& at, std::vector<std::string>& paths) {
    for (const auto& [key, value] : j.items()) {
        const std::string path = at.empty() ? key : at + "." + key;
        paths.push_back(path);
        if (value.is_object()) add_paths(value, path, paths);
    }
}

// Every path that exists, sections too.
std::vector<std::string> all_paths() {
    Config c;
    c.data.has_separator = true;
    std::vector<std::string> paths;
    add_paths(to_json(c), "", paths);
    return paths;
}

std::string last_part(const std::string& path) {
    return path.substr(path.rfind('.') + 1);
}

// For a path somebody mistyped: one with the same last part, else the nearest.
std::string nearest_path(const std::string& path, const std::vector<std::string>& paths) {
    std::vector<std::string> same;
    for (const std::string& p : paths)
        if (last_part(p) == last_part(path)) same.push_back(p);
    if (!same.empty()) return nearest(path, same);
    if (path.find('.') != std::string::npos) return nearest(path, paths);
    std::vector<std::string> parts;
    for (const std::string& p : paths) parts.push_back(last_part(p));
    const std::string part = nearest(path, parts);
    return paths[std::find(parts.begin(), parts.end(), part) - parts.begin()];
}

Json parse_value(const std::string& text, const std::string& origin) {
    const bool json = Json::accept(text);
    return json ? parse_json<Json>(text, origin, kExitUsage) : Json(text);
}

void set_path(Json& root, const std::string& path, const Json& value, const JsonSource& source) {
    Json* at = &root;
    for (size_t begin = 0;;) {
        const size_t end = path.find('.', begin);
        if (at->is_null()) *at = Json::object();
        if (!at->is_object())
            source.fail(path.substr(0, begin ? begin - 1 : 0), at->dump() + ", expected an object {...}");
        at = &(*at)[path.substr(begin, end - begin)];
        if (end == std::string::npos) break;
        begin = end + 1;
    }
    *at = value;
}

// Dimensions the file states but its preset gives anyway (a resolved run.json has them all) must not outlive the
// preset.
void drop_preset_dimensions(Json& root) {
    if (!root.is_object() || !root.contains("model") || !root["model"].is_object()) return;
    Json& m = root["model"];
    for (const ModelConfig& p : presets()) {
        if (!m.contains("preset") || m["preset"] != p.preset) continue;
        const std::pair<const char*, int> dims[] = {{"dim", p.dim},
                                                    {"n_layers", p.n_layers},
                                                    {"n_heads", p.n_heads},
                                                    {"n_kv_heads", p.n_heads},
                                                    {"ffn_hidden", p.ffn_hidden}};
        for (const auto& [key, value] : dims)
            if (m.contains(key) && m[key] == value) m.erase(key);
        return;
    }
}

void apply_sets(Json& root, const std::vector<std::string>& sets, JsonSource& source) {
    const std::vector<std::string> paths = all_paths();
    for (const std::string& set : sets) {
        const size_t equals = set.find('=');
        if (equals == std::string::npos || equals == 0)
            throw Error(kExitUsage, "--set " + set + ": expected key=value, like train.steps=100");
        const std::string path = set.substr(0, equals), text = set.substr(equals + 1);
        if (std::find(paths.begin(), paths.end(), path) == paths.end())
            throw Error(kExitUsage,
                        "--set " + set + ": unknown key " + path + "; did you mean " + nearest_path(path, paths) + "?");
        if (path == "model.preset") drop_preset_dimensions(root);
        set_path(root, path, parse_value(text, "--set " + path), source);
        source.sets.emplace_back(path, text);
    }
}

ModelConfig preset(const char* name, int dim, int layers, int heads, int ffn) {
    ModelConfig m;
    m.preset = name;
    m.dim = dim, m.n_layers = layers, m.n_heads = m.n_kv_heads = heads, m.ffn_hidden = ffn;
    return m;
}

}  // namespace

const std::vector<ModelConfig>& presets() {
    static const std::vector<ModelConfig> list = {preset("l6", 512, 6, 16, 1024),    preset("l8", 768, 8, 16, 1536),
                                                  preset("l12", 768, 12, 16, 1536),  preset("l15", 1152, 15, 24, 2304),
                                                  preset("l18", 1536, 18, 32, 3072), preset("l24", 2048, 24, 64, 4096),
                                                  preset("nano", 128, 4, 8, 256)};
    return list;
}

Config load_config(const std::string& path, const std::vector<std::string>& sets, const std::string& variant) {
    JsonSource source{.file = path};
    Json j = read_json_file(path, kExitUsage);
    apply_sets(j, sets, source);
    return read_config(j, source, variant);
}

Config parse_config(const Json& j, const std::string& origin) {
    return read_config(j, JsonSource{.file = origin}, "");
}

Json to_json(const Config& c) {
    Json j;
    FieldWriter io(j);
    Config copy = c;
    fields(io, copy);
    return j;
}

// Only what a model needs to be used: no preset, no initialisation, no other encoding's options.
Json to_json(const ModelConfig& m) {
    Json all, out;
    FieldWriter io(all);
    ModelConfig copy = m;
    fields(io, copy);
    for (const char* key :
         {"dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden", "vocab_size", "norm_eps", "tie_embeddings"})
        out[key] = all[key];
    const Json& p = all["position"];
    const std::string encoding = p["encoding"];
    Json& position = out["position"];
    position["encoding"] = encoding;
    position["ssmax"] = p["ssmax"];
    if (m.position.ssmax) position["ssmax_order"] = p["ssmax_order"];
    if (!p.contains(encoding)) return out;
    for (const auto& [key, value] : p[encoding].items())
        if (!key.starts_with("init_")) position[encoding][key] = value;
    return out;
}

ModelConfig parse_model(const Json& j, const std::string& origin) {
    const JsonSource source{.file = origin, .code = kExitData};
    ModelConfig m;
    FieldReader io(source, "model", j);
    fields(io, m);
    io.finish();
    for (const char* key : {"encoding", "ssmax"})
        if (!j.contains("position") || !j["position"].contains(key)) io.fail(std::string("position.") + key, "missing");
    check_model(m, source, "model.");
    return m;
}

// Levenshtein distance with swapped neighbours counted as one edit.
static int edit_distance(const std::string& a, const std::string& b) {
    std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); i++)
        for (size_t j = 0; j <= b.size(); j++) {
            if (!i || !j) {
                d[i][j] = int(i + j);
                continue;
            }
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[a.size()][b.size()];
}

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
    std::string best;
    int least = std::numeric_limits<int>::max();
    for (const std::string& c : candidates)
        if (const int d = edit_distance(word, c); d < least) best = c, least = d;
    return best;
}

}  // namespace bam
