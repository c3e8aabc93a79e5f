#include "model_files.h"

#include <unistd.h>

#include <bit>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "check.h"
#include "json.h"
#include "json_fields.h"
#include "safetensors.h"

namespace bam {

namespace {

using Json = nlohmann::ordered_json;

// ---- config.json ---------------------------------------------------------------------------------------------------

template <class Io>
void fields(Io& io, ModelExtras& e, std::string& fingerprint, bool& has_tokenizer) {
    DataConfig& d = e.data;
    io.integer("seq_len", e.seq_len, 0, 1 << 30);
    io.section("data", [&](Io& s) {
        s.section_or_null("separator", d.has_separator, [&](Io& sep) {
            sep.integer("id", d.separator_id, 0, 1 << 30);
            sep.choice("position", d.separator_at_end, Names<bool>{{"end", true}, {"start", false}});
        });
        if constexpr (Io::reading) d.document_mask = d.has_separator;
        s.flag("document_mask", d.document_mask);
        s.choice("positions", d.positions_by_document, Names<bool>{{"document", true}, {"row", false}});
    });
    io.section_or_null("tokenizer", has_tokenizer, [&](Io& s) {
        s.text_or_null("path", e.tokenizer);
        s.text("fingerprint", fingerprint);
    });
}

Json model_json(const ModelConfig& m, const ModelExtras& e) {
    Json j = {{"format", "bam-model"}, {"version", 1}, {"model", to_json(m)}}, extras;
    FieldWriter io(extras);
    ModelExtras copy = e;
    std::string fingerprint = hex_of(e.tokenizer_fingerprint);
    bool has_tokenizer = !e.tokenizer.empty() || e.tokenizer_fingerprint;
    fields(io, copy, fingerprint, has_tokenizer);
    j.update(extras);
    return j;
}

// ---- tensors -------------------------------------------------------------------------------------------------------

std::vector<int64_t> without_ones(const std::vector<int64_t>& shape) {
    std::vector<int64_t> s;
    for (int64_t d : shape)
        if (d != 1) s.push_back(d);
    return s;
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string t;
    for (int64_t d : shape) t += (t.empty() ? "" : ", ") + std::to_string(d);
    return "[" + t + "]";
}

// Index of the first value that is not finite, or -1. Blocks without one are passed quickly.
int64_t first_nonfinite(const float* x, int64_t n) {
    constexpr int64_t block = 4096;
    for (int64_t b = 0; b < n; b += block) {
        const int64_t end = std::min(n, b + block);
        int bad = 0;
        for (int64_t i = b; i < end; i++) bad |= (std::bit_cast<uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u;
        for (int64_t i = b; bad && i < end; i++)
            if (!std::isfinite(x[i])) return i;
    }
    return -1;
}

void read_tensor(const SafetensorsFile& f, const std::string& name, const Parameter& p, float* out) {
    const SafetensorsEntry& e = f.entry(name);
    if (without_ones(e.shape) != without_ones(p.shape))
        throw Error(kExitData, f.path() + ": tensor " + name + ": shape " + shape_text(e.shape) + ", expected " +
                                   shape_text(p.shape));
    f.copy_floats(name, out);
    const int64_t bad = first_nonfinite(out, p.numel());
    if (bad >= 0)
        throw Error(kExitData, f.path() + ": tensor " + name + ": element " + std::to_string(bad) + " is " +
                                   std::to_string(out[bad]) + ", expected finite values");
}

void refuse_unknown(const SafetensorsFile& f, const std::set<std::string>& known) {
    for (const auto& [name, e] : f.entries())
        if (!known.count(name)) throw Error(kExitData, f.path() + ": tensor " + name + " is not part of this model");
}

}  // namespace

ModelFiles open_model(const std::string& model_dir) {
    const std::string path = model_dir + "/" + kModelConfig;
    Json j = read_json_file(path, kExitData);
    const JsonSource source{.file = path, .code = kExitData};
    if (!j.is_object() || j.value("format", Json()) != "bam-model")
        source.fail("format",
                    (j.is_object() ? j.value("format", Json()).dump() : "missing") + ", expected \"bam-model\"");
    if (j.value("version", Json()) != 1) source.fail("version", j.value("version", Json()).dump() + ", expected 1");
    if (!j.contains("model")) source.fail("model", "missing");
    ModelFiles files{model_dir, parse_model(j["model"], path), {}};
    for (const char* taken : {"format", "version", "model"}) j.erase(taken);
    FieldReader io(source, "", j);
    std::string fingerprint;
    bool has_tokenizer = false;
    fields(io, files.extras, fingerprint, has_tokenizer);
    io.finish();
    files.extras.tokenizer_fingerprint = std::strtoull(fingerprint.c_str(), nullptr, 16);
    return files;
}

void read_weights(const std::string& model_dir, const ParameterTable& t, float* weights) {
    const SafetensorsFile f(model_dir + "/" + kModelWeights);
    std::set<std::string> known;
    for (const Parameter& p : t.all) {
        known.insert(p.name);
        if (p.name.ends_with("prior.theta_mu") && !f.has(p.name)) {
            const std::vector<float> mu = initial_thetas(open_model(model_dir).config.position.init_mu, int(p.numel()));
            std::copy(mu.begin(), mu.end(), weights + p.offset);
        } else {
            read_tensor(f, p.name, p, weights + p.offset);
        }
    }
    refuse_unknown(f, known);
}

std::map<std::string, uint64_t> write_model_files(const std::string& dir, const ModelConfig& m, const ModelExtras& e,
                                                  const ParameterTable& t, const float* weights) {
    std::vector<SafetensorsItem> items;
    for (const Parameter& p : t.all) items.push_back({p.name, "F32", p.shape, weights + p.offset});
    std::map<std::string, uint64_t> hashes;
    hashes[kModelWeights] = write_safetensors(dir + "/" + kModelWeights, items, {{"format", "pt"}});
    const std::string text = model_json(m, e).dump(1) + "\n";
    DurableFile config(dir + "/" + kModelConfig);
    config.write(text.data(), int64_t(text.size()));
    hashes[kModelConfig] = config.finish();
    return hashes;
}

void write_model(const std::string& dir, const ModelConfig& m, const ModelExtras& e, const ParameterTable& t,
                 const float* weights) {
    make_directories(dir);
    const TemporaryDirectory temporary(dir + "/.tmp-" + std::to_string(::getpid()));
    write_model_files(temporary.path, m, e, t, weights);
    for (const char* name : {kModelWeights, kModelConfig}) {  // weights without a config are no model yet
        std::error_code error;
        std::filesystem::rename(temporary.path + "/" + name, dir + "/" + name, error);
        if (error) throw Error(kExitFailure, dir + "/" + name + ": cannot write: " + error.message());
    }
    sync_directory(dir);
}

uint64_t write_moments(const std::string& path, const ParameterTable& t, const float* m, const float* v) {
    std::vector<SafetensorsItem> items;
    for (const auto& [prefix, arena] : {std::pair("m.", m), std::pair("v.", v)})
        for (const Parameter& p : t.all)
            if (p.offset < t.trained) items.push_back({prefix + p.name, "F32", p.shape, arena + p.offset});
    return write_safetensors(path, items);
}

void read_moments(const std::string& path, const ParameterTable& t, float* m, float* v) {
    const SafetensorsFile f(path);
    std::set<std::string> known;
    for (const auto& [prefix, arena] : {std::pair("m.", m), std::pair("v.", v)})
        for (const Parameter& p : t.all) {
            if (p.offset >= t.trained) continue;
            known.insert(prefix + p.name);
            read_tensor(f, prefix + p.name, p, arena + p.offset);
        }
    refuse_unknown(f, known);
}

}  // namespace bam
