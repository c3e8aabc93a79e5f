// Proof and results of a comparison. See compare.h.
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "compare.h"
#include "durable_file.h"
#include "json.h"
#include "loader.h"
#include "parameters.h"
#include "trainer.h"

namespace bam {

using json = nlohmann::ordered_json;

namespace {

// Names of trained parameters with their sizes; "layers.0." ... are one name with a count.
std::map<std::string, int64_t> parameter_names(const ParameterTable& t) {
    std::map<std::string, int64_t> names;
    for (const Parameter& p : t.all) {
        if (p.group == ParameterGroup::frozen) continue;
        std::string name = p.name;
        if (name.starts_with("layers.")) name = "layers.*" + name.substr(name.find('.', 7));
        names[name] += p.numel();
    }
    return names;
}

std::string shared_weights_hash(const Config& c, const std::set<std::string>& shared) {
    const ParameterTable t = make_parameter_table(c.model);
    std::vector<float> weights(t.total);
    init_weights(t, c.model, c.run.seed, weights.data());
    uint64_t hash = 0;
    for (const Parameter& p : t.all)
        if (shared.count(p.name)) hash = XXH64(weights.data() + p.offset, size_t(p.numel()) * 4, hash);
    return hex_of(hash);
}

std::string rows_hash(const Config& c) {
    const DataSet data = open_data(c.data);
    const RowLoader loader(data.train, data.train_begin, data.train_end, c.train.seq_len, c.data.shuffle, c.run.seed);
    std::vector<int32_t> row(c.train.seq_len + 1);
    XXH64_state_t* state = XXH64_createState();
    XXH64_reset(state, 0);
    const int64_t n = c.train.steps * c.train.rows_per_step();
    for (int64_t i = 0; i < n; ++i) {
        loader.read_row(i, c.model.vocab_size, row.data());
        XXH64_update(state, row.data(), row.size() * 4);
    }
    const uint64_t hash = XXH64_digest(state);
    XXH64_freeState(state);
    return hex_of(hash);
}

// Keys that differ between two resolved configs, as "a.b": [first, other].
json config_difference(const json& a, const json& b) {
    json d = json::object();
    const json flat_a = a.flatten(), flat_b = b.flatten();
    for (const auto* side : {&flat_a, &flat_b})
        for (const auto& [key, value] : side->items()) {
            const json left = flat_a.contains(key) ? flat_a[key] : json(), right = flat_b.contains(key) ? flat_b[key] : json();
            if (left != right) d[key] = {left, right};
        }
    return d;
}

struct Spread {
    double mean = NAN, sd = NAN;
    int n = 0;
};

Spread spread(const std::vector<double>& x) {
    Spread s;
    s.n = int(x.size());
    if (x.empty()) return s;
    s.mean = 0;
    for (double v : x) s.mean += v / s.n;
    double sum = 0;
    for (double v : x) sum += (v - s.mean) * (v - s.mean);
    s.sd = s.n > 1 ? std::sqrt(sum / (s.n - 1)) : NAN;
    return s;
}

json to_json(const Spread& s) {
    auto number = [](double x) { return std::isfinite(x) ? json(x) : json(nullptr); };
    return {{"mean", number(s.mean)}, {"sd", number(s.sd)}, {"n", s.n}};
}

// Metric name -> values over the seeds. Metrics with a length are "ppl@512", "passkey@512", "digits@512".
using Values = std::map<std::string, std::vector<double>>;

void add_training(const std::string& run, Values& values) {
    std::ifstream file(run + "/metrics.jsonl");
    double loss = NAN;
    std::vector<double> rates;
    for (std::string line; std::getline(file, line);) {
        const json j = json::parse(line, nullptr, false);
        if (j.is_discarded()) continue;
        const std::string event = j.value("event", "");
        if (event == "val" && j["loss"].is_number()) loss = j["loss"];
        if (event == "step" && j["tok_per_s"].is_number()) rates.push_back(j["tok_per_s"]);
    }
    if (std::isfinite(loss)) values["val_loss"].push_back(loss);
    if (rates.empty()) return;
    std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
    values["tok_per_s"].push_back(rates[rates.size() / 2]);
}

void add_suite(const std::string& run, const char* suite, const std::map<std::string, std::string>& fields, Values& values) {
    std::ifstream file(run + "/eval/" + suite + ".json");
    const json j = file ? json::parse(file, nullptr, false) : json();
    if (!j.is_object() || !j.contains("results")) return;
    for (const json& r : j["results"])
        for (const auto& [field, metric] : fields)
            if (r.contains(field) && r[field].is_number() && r.value("variant", "windows") == "windows")
                values[metric + "@" + r["length"].dump()].push_back(r[field]);
}

std::string cell(const json& variant, const std::string& metric, const char* format) {
    if (!variant["metrics"].contains(metric) || variant["metrics"][metric]["mean"].is_null()) return "-";
    const json& m = variant["metrics"][metric];
    char text[64];
    std::snprintf(text, sizeof text, format, m["mean"].get<double>());
    std::string s = text;
    if (m["sd"].is_number()) {
        std::snprintf(text, sizeof text, format, m["sd"].get<double>());
        s += std::string("±") + text;
    }
    return s;
}

// Columns of text, the first flush left, the others flush right; "±" counts as one character.
std::string columns(const std::vector<std::vector<std::string>>& rows) {
    auto width = [](const std::string& s) { return std::count_if(s.begin(), s.end(), [](char c) { return (c & 0xc0) != 0x80; }); };
    std::vector<long> widths;
    for (const auto& row : rows)
        for (size_t i = 0; i < row.size(); ++i) {
            if (i >= widths.size()) widths.push_back(0);
            widths[i] = std::max<long>(widths[i], width(row[i]));
        }
    std::string text;
    for (const auto& row : rows) {
        for (size_t i = 0; i < row.size(); ++i) {
            const std::string pad(widths[i] - width(row[i]), ' ');
            text += i == 0 ? row[i] + pad : "  " + pad + row[i];
        }
        text += "\n";
    }
    return text;
}

// Lengths that some variant has for a metric, ascending.
std::vector<int64_t> lengths_of(const json& results, const std::string& metric) {
    std::set<int64_t> lengths;
    for (const json& v : results["variants"])
        for (const auto& [name, m] : v["metrics"].items())
            if (name.starts_with(metric + "@")) lengths.insert(std::stoll(name.substr(metric.size() + 1)));
    return {lengths.begin(), lengths.end()};
}

}  // namespace

json compare_proof(const std::vector<ComparePart>& parts) {
    std::map<std::string, int> counts;
    for (const ComparePart& p : parts)
        for (const auto& [name, n] : parameter_names(make_parameter_table(p.config.model))) ++counts[name];
    std::set<std::string> shared = {};
    for (const Parameter& q : make_parameter_table(parts.front().config.model).all) shared.insert(q.name);
    for (const ComparePart& p : parts) {
        const ParameterTable t = make_parameter_table(p.config.model);
        std::erase_if(shared, [&](const std::string& name) { return !t.find(name); });
    }
    json proof = {{"parts", json::array()}, {"seeds", json::object()}};
    const json first = bam::to_json(parts.front().config);
    for (const ComparePart& p : parts) {
        const ParameterTable t = make_parameter_table(p.config.model);
        json own = json::object();
        for (const auto& [name, n] : parameter_names(t))
            if (counts[name] < int(parts.size())) own[name] = n;
        proof["parts"].push_back({{"name", p.config.run.name},
                                  {"variant", p.variant},
                                  {"seed", p.seed},
                                  {"trained", t.trained},
                                  {"own_parameters", own},
                                  {"config_difference", config_difference(first, bam::to_json(p.config))}});
        const json hashes = {{"shared_weights_xxh64", shared_weights_hash(p.config, shared)}, {"rows_xxh64", rows_hash(p.config)}};
        json& seen = proof["seeds"][std::to_string(p.seed)];
        if (seen.is_null()) seen = hashes;
        if (seen != hashes)
            throw Error(kExitFailure, p.config.run.name + ": initial weights or token rows differ from the other variants'");
    }
    return proof;
}

json compare_results(const std::vector<ComparePart>& parts) {
    std::vector<std::string> order;
    std::map<std::string, Values> by_variant;
    for (const ComparePart& p : parts) {
        if (!by_variant.count(p.variant)) order.push_back(p.variant);
        Values& v = by_variant[p.variant];
        const std::string run = run_directory(p.config);
        add_training(run, v);
        add_suite(run, "perplexity", {{"perplexity", "ppl"}}, v);
        add_suite(run, "passkey", {{"accuracy", "passkey"}, {"digit_accuracy", "digits"}}, v);
    }
    const Config& c = parts.front().config;
    json results = {{"format", "bam-compare"},
                    {"version", 1},
                    {"trained_length", c.train.seq_len},
                    {"tokens", c.train.steps * c.train.tokens_per_step},
                    {"variants", json::array()}};
    for (const std::string& name : order) {
        json metrics = json::object();
        for (const auto& [metric, values] : by_variant[name]) metrics[metric] = to_json(spread(values));
        results["variants"].push_back({{"name", name}, {"metrics", metrics}});
    }
    return results;
}

std::string results_table(const json& results) {
    const int64_t T = results["trained_length"];
    auto times = [&](int64_t n) {
        char text[32];
        std::snprintf(text, sizeof text, "%g×", double(n) / double(T));
        return std::string(text);
    };
    auto part = [&](const std::string& title, const std::string& metric, const char* format) {
        const std::vector<int64_t> lengths = lengths_of(results, metric);
        if (lengths.empty()) return std::string();
        std::vector<std::vector<std::string>> rows = {{title}};
        for (int64_t n : lengths) rows[0].push_back(times(n));
        for (const json& v : results["variants"]) {
            rows.push_back({v["name"].get<std::string>()});
            for (int64_t n : lengths) rows.back().push_back(cell(v, metric + "@" + std::to_string(n), format));
        }
        return "\n" + columns(rows);
    };
    std::vector<std::vector<std::string>> rows = {{"variant", "validation loss", "tok/s"}};
    for (const json& v : results["variants"])
        rows.push_back({v["name"].get<std::string>(), cell(v, "val_loss", "%.4f"), cell(v, "tok_per_s", "%.0f")});
    return "trained at " + std::to_string(T) + " tokens (1×)\n" + columns(rows) + part("perplexity", "ppl", "%.2f") +
           part("passkey", "passkey", "%.2f") + part("passkey, per digit", "digits", "%.2f");
}

std::string results_csv(const json& results) {
    std::string csv = "variant,metric,length,mean,sd,n\n";
    for (const json& v : results["variants"])
        for (const auto& [metric, m] : v["metrics"].items()) {
            const size_t at = metric.find('@');
            csv += v["name"].get<std::string>() + "," + metric.substr(0, at) + "," +
                   (at == std::string::npos ? "" : metric.substr(at + 1)) + "," + (m["mean"].is_null() ? "" : m["mean"].dump()) + "," +
                   (m["sd"].is_number() ? m["sd"].dump() : "") + "," + m["n"].dump() + "\n";
        }
    return csv;
}

}  // namespace bam
