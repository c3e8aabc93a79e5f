#include "eval/loaded_model.h"

#include <xxhash.h>

#include <cstdio>
#include <filesystem>

#include "check.h"
#include "device.h"

namespace bam {

namespace fs = std::filesystem;

static std::string hex(uint64_t x) {
    char text[20];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
    return text;
}

// Where the model's tokenizer may be: as named, beside the model under that name, or in the model's directory.
static std::string find_tokenizer(const ModelFiles& files, const std::string& named) {
    std::error_code ignored;
    const std::string& known = files.extras.tokenizer;
    if (!named.empty()) return named;
    if (known == "byte" || (!known.empty() && fs::exists(known, ignored))) return known;
    for (const fs::path& p : {fs::path(files.path) / fs::path(known).filename(), fs::path(files.path) / "tokenizer.json",
                              fs::path(files.path) / "tokenizer.model"})
        if (fs::is_regular_file(p, ignored)) return p.string();
    return "";
}

static void open_tokenizer(LoadedModel& m, const std::string& named) {
    const ModelExtras& e = m.files.extras;
    const std::string path = find_tokenizer(m.files, named);
    if (path.empty()) {
        m.no_tokenizer = m.files.path + ": " +
                         (e.tokenizer.empty() ? "the model names no tokenizer" : "its tokenizer " + e.tokenizer + " is missing") +
                         ", expected one with --tokenizer";
        return;
    }
    m.tokenizer = load_tokenizer(path);
    const uint64_t is = m.tokenizer->fingerprint();
    if (e.tokenizer_fingerprint && e.tokenizer_fingerprint != is)
        throw Error(kExitData, path + ": tokenizer has hash " + hex(is) + ", the model was trained with " +
                                   hex(e.tokenizer_fingerprint));
    if (m.tokenizer->vocab_size() > m.files.config.vocab_size)
        throw Error(kExitData, path + ": tokenizer has " + std::to_string(m.tokenizer->vocab_size()) +
                                   " tokens, the model's vocab_size is " + std::to_string(m.files.config.vocab_size));
}

const Tokenizer& LoadedModel::need_tokenizer() const {
    if (!tokenizer) throw Error(kExitData, no_tokenizer);
    return *tokenizer;
}

SessionOptions LoadedModel::session_options(bool document_mask) const {
    SessionOptions s;
    s.document_mask = document_mask;
    s.data = files.extras.data;
    return s;
}

LoadedModel open_loaded(const std::string& path, const LoadOptions& options) {
    LoadedModel m;
    m.files = open_model(find_model(path));
    open_tokenizer(m, options.tokenizer);
    m.device = open_device(options.device, options.threads);
    m.dtype = choose_dtype(options.dtype, *m.device);
    return m;
}

void check_memory(const LoadedModel& m, int rows, int64_t capacity, const std::string& what) {
    require_memory(plan_session(m.files.config, *m.device, m.dtype, rows, capacity, SessionOptions().chunk), *m.device, what);
}

void load(LoadedModel& m) {
    m.model = std::make_unique<Model>(*m.device, m.files.config, m.dtype);
    m.model->fill_weights([&](float* weights) {
        read_weights(m.files.path, m.model->table(), weights);
        m.weights_hash = XXH64(weights, size_t(m.model->table().total) * sizeof(float), 0);
    });
}

}  // namespace bam
