#include "eval/inspect.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "check.h"
#include "corpus.h"
#include "device.h"
#include "eval/eval.h"
#include "eval/passkey.h"
#include "eval/suite.h"
#include "random.h"

namespace bam {

// ---- the prior alone -----------------------------------------------------------------------------------------------------

namespace {

float value_of(const ParameterTable& t, const float* weights, const std::string& name, int head) {
    return weights[t.at(name).offset + head];
}

std::string layer_name(int layer) { return "layers." + std::to_string(layer) + "."; }

// What multiplies scores and bias of a query that sees n keys.
double scale_of(const PositionConfig& p, double seq_scale, int64_t n) { return p.ssmax ? seq_scale * std::log(double(n)) : 1.0; }

// Distances at which the running sum of masses reaches half and nine tenths.
void find_distances(const std::vector<double>& mass, int64_t* half, int64_t* most) {
    double sum = 0;
    *half = *most = -1;
    for (size_t d = 0; d < mass.size(); ++d) {
        sum += mass[d];
        if (*half < 0 && sum >= 0.5 - 1e-12) *half = int64_t(d);
        if (*most < 0 && sum >= 0.9 - 1e-12) *most = int64_t(d);
    }
    if (*half < 0) *half = int64_t(mass.size()) - 1;
    if (*most < 0) *most = int64_t(mass.size()) - 1;
}

void softmax(std::vector<double>& x) {
    const double top = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (double& v : x) sum += v = std::exp(v - top);
    for (double& v : x) v /= sum;
}

std::string shape_of(const PositionConfig& p, double beta) {
    if (p.encoding == Encoding::alibi) return "local";
    if (p.encoding != Encoding::bam) return "content only";
    return beta >= 1 ? "local" : beta > 0 ? "heavy-tailed" : "far-looking";
}

HeadPrior read_head(const ModelConfig& m, const ParameterTable& t, const float* weights, int layer, int head) {
    HeadPrior h;
    const std::string prior = m.position.bam_global ? "prior." : layer_name(layer) + "attention.prior.";
    const std::vector<PriorTheta> thetas = prior_thetas(m.position);
    for (size_t i = 0; i < thetas.size(); ++i) h.theta[i] = value_of(t, weights, prior + thetas[i].name, head);
    if (m.position.encoding == Encoding::alibi) h.slope = alibi_slope(head, m.n_heads);
    if (m.position.ssmax) h.seq_scale = value_of(t, weights, layer_name(layer) + "attention.seq_scale", head);
    h.shape = shape_of(m.position, h.theta[1]);
    return h;
}

double bias_at(const ModelConfig& m, const HeadPrior& h, int head, int64_t d) {
    return prior_at(m.position.encoding, h.theta, head, m.n_heads, double(d)).bias;
}

}  // namespace

HeadPrior head_prior(const ModelConfig& m, const ParameterTable& t, const float* weights, int layer, int head, int64_t length) {
    HeadPrior h = read_head(m, t, weights, layer, head);
    if (!has_prior(m.position.encoding)) return h;
    for (int64_t d = 0; d < length; d = d ? 2 * d : 1) h.bias.emplace_back(d, bias_at(m, h, head, d));
    const bool scaled = m.position.ssmax_order == SsmaxOrder::scale_bias;
    const double c = scaled ? scale_of(m.position, h.seq_scale, length) : 1.0;
    std::vector<double> mass(length);
    for (int64_t d = 0; d < length; ++d) mass[d] = c * bias_at(m, h, head, d);
    softmax(mass);
    find_distances(mass, &h.distance_50, &h.distance_90);
    return h;
}

// ---- attention of a prompt's last token ----------------------------------------------------------------------------------

namespace {

// The values of a (N, width) tensor of the compute dtype as floats.
std::vector<float> download_floats(Backend& device, Tensor t) {
    std::vector<float> values(t.numel());
    if (t.dtype == DType::f32) {
        device.download(values.data(), t);
        return values;
    }
    std::vector<bf16> low(t.numel());
    device.download(low.data(), t);
    std::transform(low.begin(), low.end(), values.begin(), [](bf16 x) { return to_float(x); });
    return values;
}

struct LayerKeys {
    std::vector<float> k;  // (T, K*D)
    std::vector<float> q;  // (H*D) of the last token
};

// Runs the prompt in chunks and keeps every layer's keys and the last token's queries.
std::vector<LayerKeys> read_prompt(Model& model, const std::vector<int>& ids, int chunk) {
    const ModelConfig& m = model.config();
    const int64_t T = int64_t(ids.size()), HD = int64_t(m.n_heads) * m.head_dim(), KD = int64_t(m.n_kv_heads) * m.head_dim();
    std::vector<LayerKeys> layers(m.n_layers);
    KvCache cache = model.make_cache(1, T);
    for (int64_t begin = 0; begin < T; begin += chunk) {
        Batch b;
        b.B = 1, b.T = int(std::min<int64_t>(chunk, T - begin));
        b.ids.assign(ids.begin() + begin, ids.begin() + begin + b.T);
        b.key_begin.assign(b.T, 0);
        b.offset = {int32_t(begin)};
        for (int t = 0; t < b.T; ++t) b.positions.push_back(int32_t(begin + t));
        model.reserve(1, b.T, Keep::all);
        model.forward(b, &cache);
        for (int l = 0; l < m.n_layers; ++l) {
            const std::vector<float> qkv = download_floats(model.device(), model.qkv(l));
            const int64_t width = HD + 2 * KD;
            for (int t = 0; t < b.T; ++t)
                layers[l].k.insert(layers[l].k.end(), qkv.begin() + t * width + HD, qkv.begin() + t * width + HD + KD);
            layers[l].q.assign(qkv.end() - width, qkv.end() - width + HD);
        }
    }
    return layers;
}

// Probabilities by distance from the last token.
std::vector<double> attention_of(const ModelConfig& m, const HeadPrior& h, int head, const LayerKeys& layer) {
    const int D = m.head_dim(), group = m.n_heads / m.n_kv_heads;
    const int64_t KD = int64_t(m.n_kv_heads) * D, n = int64_t(layer.k.size()) / KD;
    const double c = scale_of(m.position, h.seq_scale, n);
    const bool scale_bias = m.position.ssmax_order == SsmaxOrder::scale_bias;
    std::vector<double> p(n);
    for (int64_t d = 0; d < n; ++d) {
        const float* k = layer.k.data() + (n - 1 - d) * KD + int64_t(head / group) * D;
        const float* q = layer.q.data() + int64_t(head) * D;
        double score = 0;
        for (int i = 0; i < D; ++i) score += double(q[i]) * k[i];
        score /= std::sqrt(double(D));
        const double bias = has_prior(m.position.encoding) ? bias_at(m, h, head, d) : 0;
        p[d] = scale_bias ? c * (score + bias) : c * score + bias;
    }
    softmax(p);
    return p;
}

HeadAttention summarize(const std::vector<double>& p, const std::vector<TokenSpan>& spans) {
    HeadAttention a;
    const int64_t n = int64_t(p.size());
    for (double x : p)
        if (x > 0) a.entropy -= x * std::log(x);
    for (const TokenSpan& s : spans)
        for (int64_t i = s.first; i < s.second; ++i) a.span_mass += p[n - 1 - i];
    find_distances(p, &a.distance_50, &a.distance_90);
    for (int64_t from = 0; from < n;) {
        const int64_t to = std::min(n, from == 0 ? 1 : 2 * from);
        double mass = 0;
        for (int64_t d = from; d < to; ++d) mass += p[d];
        a.by_distance.push_back({from, to, mass});
        from = to;
    }
    return a;
}

}  // namespace

std::vector<std::vector<HeadAttention>> last_token_attention(Model& model, const std::vector<int>& ids,
                                                             const std::vector<TokenSpan>& spans, int chunk) {
    const ModelConfig& m = model.config();
    const std::vector<LayerKeys> layers = read_prompt(model, ids, chunk);
    HostCopy weights(model.device(), model.weights());
    std::vector<std::vector<HeadAttention>> result(m.n_layers);
    for (int l = 0; l < m.n_layers; ++l)
        for (int h = 0; h < m.n_heads; ++h) {
            const HeadPrior head = read_head(m, model.table(), weights.data(), l, h);
            result[l].push_back(summarize(attention_of(m, head, h, layers[l]), spans));
        }
    return result;
}

std::vector<TokenSpan> find_spans(const Tokenizer& tokenizer, const std::string& prompt, const std::string& text) {
    std::vector<TokenSpan> spans;
    const auto tokens = [&](size_t bytes) { return int64_t(tokenizer.encode(prompt.substr(0, bytes)).size()); };
    for (size_t at = prompt.find(text); at != std::string::npos; at = prompt.find(text, at + text.size())) {
        spans.emplace_back(tokens(at), tokens(at + text.size()));
        if (spans.back().first == spans.back().second) --spans.back().first;  // inside one token
    }
    if (spans.empty()) throw Error(kExitUsage, "span '" + text + "' is not in the prompt");
    return spans;
}

// ---- the command -------------------------------------------------------------------------------------------------------

namespace {

struct Prompt {
    std::vector<int> ids;
    std::vector<TokenSpan> spans;
};

bool blank(const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isspace(c); });
}

// The digits of both mentions in the statement; the prompt goes on to where the first digit is due.
Prompt passkey_prompt(const Tokenizer& tokenizer, int64_t length, uint64_t seed) {
    const PasskeyText text(tokenizer);
    const int64_t n = text.fillers(length), before = n / 2;
    int key = 0;
    for (uint64_t i = 0; key == 0 || (tokenizer.kind() == "word" && !is_held_out_key(key)); ++i)
        key = 10000 + int(random_below(seed, stream_of("inspect.key"), i, 90000));
    Prompt p;
    p.ids = text.prompt(key, n, before);
    const int64_t begin = int64_t(text.intro.size()) + before * int64_t(text.filler.size());
    const std::string statement = tokenizer.decode(text.statement(key));
    for (const TokenSpan& s : find_spans(tokenizer, statement, std::to_string(key))) p.spans.emplace_back(begin + s.first, begin + s.second);
    for (int id : text.answer(key)) {
        if (!blank(tokenizer.decode({id}))) break;
        p.ids.push_back(id);
    }
    return p;
}

Prompt make_prompt(const LoadedModel& m, const InspectCommand& c) {
    if (c.passkey > 0 && !c.prompt.empty()) throw Error(kExitUsage, "both --prompt and --passkey, expected one of them");
    if (!c.span.empty() && c.prompt.empty()) throw Error(kExitUsage, "--span marks a part of the prompt, expected --prompt");
    if (c.passkey > 0) return passkey_prompt(m.need_tokenizer(), c.passkey, c.seed);
    Prompt p;
    if (c.prompt.empty()) return p;
    p.ids = m.need_tokenizer().encode(c.prompt);
    if (!c.span.empty()) p.spans = find_spans(m.need_tokenizer(), c.prompt, c.span);
    return p;
}

Json head_json(const ModelConfig& m, const HeadPrior& h, int head) {
    Json j = {{"head", head}, {"class", h.shape}};
    if (m.position.encoding == Encoding::bam) j["theta_alpha"] = h.theta[0], j["theta_beta"] = h.theta[1], j["theta_mu"] = h.theta[2];
    if (m.position.encoding == Encoding::alibi) j["slope"] = h.slope;
    if (m.position.ssmax) j["seq_scale"] = h.seq_scale;
    if (h.bias.empty()) return j;
    for (const auto& [d, b] : h.bias) j["bias"].push_back({{"distance", d}, {"bias", b}});
    j["prior_distance_50"] = h.distance_50, j["prior_distance_90"] = h.distance_90;
    return j;
}

void add_attention(Json& j, const HeadAttention& a, bool marked) {
    j["entropy"] = a.entropy;
    if (marked) j["span_mass"] = a.span_mass;
    j["distance_50"] = a.distance_50, j["distance_90"] = a.distance_90;
    for (const HeadAttention::Bin& b : a.by_distance) j["mass_by_distance"].push_back({{"from", b.from}, {"to", b.to}, {"mass", b.mass}});
}

std::string table_of(const Json& result) {
    std::vector<std::vector<std::string>> rows(1);
    const auto column = [&](const Json& h, const char* key, const char* title, const char* how, std::vector<std::string>* row) {
        if (!h.contains(key)) return;
        if (rows.size() == 1) rows[0].push_back(title);
        row->push_back(h[key].is_string() ? h[key].get<std::string>() : format(how, h[key]));
    };
    for (const Json& l : result["layers"])
        for (const Json& h : l["heads"]) {
            std::vector<std::string> row = {l["layer"].dump(), h["head"].dump()};
            if (rows.size() == 1) rows[0] = {"layer", "head"};
            column(h, "theta_alpha", "alpha", "%.3f", &row), column(h, "theta_beta", "beta", "%.3f", &row);
            column(h, "theta_mu", "mu", "%.3f", &row), column(h, "slope", "slope", "%.4f", &row), column(h, "seq_scale", "s", "%.3f", &row);
            if (h.contains("bias"))
                for (const Json& b : h["bias"]) {
                    const int64_t d = b["distance"];
                    if (d > 1 && (std::bit_width(uint64_t(d)) & 1) == 0) continue;  // 0, 1, 4, 16, ...
                    if (rows.size() == 1) rows[0].push_back("b(" + std::to_string(d) + ")");
                    row.push_back(format("%.3g", b["bias"]));
                }
            column(h, "prior_distance_50", "50% in", "%.0f", &row), column(h, "prior_distance_90", "90% in", "%.0f", &row);
            column(h, "class", "class", "", &row), column(h, "entropy", "entropy", "%.3f", &row);
            column(h, "span_mass", "on span", "%.4f", &row), column(h, "distance_50", "looks 50%", "%.0f", &row);
            column(h, "distance_90", "90%", "%.0f", &row);
            rows.push_back(row);
        }
    return format_table(rows);
}

}  // namespace

nlohmann::ordered_json inspect(LoadedModel& m, const InspectCommand& c) {
    const Prompt prompt = make_prompt(m, c);
    const ModelConfig& config = m.files.config;
    const int64_t n = int64_t(prompt.ids.size());
    const int64_t length = c.length ? c.length : n ? n : m.files.extras.seq_len ? m.files.extras.seq_len : 512;
    check_memory(m, 1, std::max<int64_t>(1, n), "inspecting a prompt of " + std::to_string(n) + " tokens");
    load(m);
    std::vector<std::vector<HeadAttention>> attention;
    if (n) attention = last_token_attention(*m.model, prompt.ids, prompt.spans);
    HostCopy weights(*m.device, m.model->weights());
    Json result = {{"format", "bam-inspect"}, {"version", 1},
                   {"model", {{"path", m.files.path}, {"encoding", variant_of(config.position)}, {"dtype", name_of(m.dtype)}}},
                   {"length", length}};
    if (n) {
        Json spans = Json::array();
        for (const TokenSpan& s : prompt.spans) spans.push_back({s.first, s.second});
        result["prompt"] = {{"tokens", n}, {"spans", spans}};
    }
    for (int l = 0; l < config.n_layers; ++l) {
        Json heads = Json::array();
        for (int h = 0; h < config.n_heads; ++h) {
            heads.push_back(head_json(config, head_prior(config, m.model->table(), weights.data(), l, h, length), h));
            if (n) add_attention(heads.back(), attention[l][h], !prompt.spans.empty());
        }
        result["layers"].push_back({{"layer", l}, {"heads", heads}});
    }
    return result;
}

int inspect_command(const InspectCommand& c) {
    LoadedModel m = open_loaded(c.model, c.load);
    const Json result = inspect(m, c);
    std::string out = c.out;
    const bool of_run = std::filesystem::absolute(m.files.path).parent_path().filename() == "checkpoints";
    if (out.empty() && of_run && result.contains("prompt")) out = default_eval_directory(c.model) + "/inspect.json";
    if (!out.empty()) {
        const std::filesystem::path folder = std::filesystem::path(out).parent_path();
        if (!folder.empty()) std::filesystem::create_directories(folder);
        write_file_atomically(out, result.dump(1) + "\n");
    }
    if (c.json) {
        std::printf("%s\n", result.dump(1).c_str());
        return kExitDone;
    }
    std::printf("%s, %s, prior over %lld tokens\n", m.files.path.c_str(), variant_of(m.files.config.position).c_str(),
                static_cast<long long>(result["length"].get<int64_t>()));
    std::printf("%s", table_of(result).c_str());
    if (!out.empty()) std::printf("-> %s\n", out.c_str());
    return kExitDone;
}

}  // namespace bam
