// The byte tokenizer, and the one place where a tokenizer file's kind is looked up.
#include "tokenizer.h"

#include <xxhash.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "check.h"
#include "json.h"
#include "word_tokenizer.h"

namespace bam {

namespace {

constexpr int kByteSeparator = 256;

class ByteTokenizer : public Tokenizer {
public:
    std::string kind() const override { return "byte"; }
    int vocab_size() const override { return 257; }

    std::vector<int> encode(std::string_view text) const override {
        std::vector<int> ids(text.size());
        for (size_t i = 0; i < text.size(); i++) ids[i] = static_cast<unsigned char>(text[i]);
        return ids;
    }

    std::string decode(const std::vector<int>& ids) const override {
        std::string text;
        for (int id : ids) {
            if (id >= 0 && id < 256) {
                text += char(id);
            } else if (id != kByteSeparator) {
                text += "\xef\xbf\xbd";
            }
        }
        return text;
    }

    size_t cut(std::string_view text) const override { return text.size(); }
    int separator_id() const override { return kByteSeparator; }
    bool separator_at_end() const override { return true; }

    std::string serialize() const override {
        return "{\"format\": \"bam-tokenizer\", \"version\": 1, \"kind\": \"byte\", \"vocab_size\": 257,\n"
               " \"separator\": {\"id\": 256, \"position\": \"end\"}}\n";
    }
};

std::string quoted(const nlohmann::json& j, const char* key) {
    return j.contains(key) ? j[key].dump() : "missing";
}

// A further kind that lives in JSON is one more line at the end.
std::unique_ptr<Tokenizer> make_tokenizer(const nlohmann::json& j, const std::string& path) {
    if (!j.is_object() || j.value("format", nlohmann::json()) != "bam-tokenizer") {
        throw Error(kExitData, path + ": format is " +
                                   (j.is_object() ? quoted(j, "format") : std::string(j.type_name())) +
                                   ", expected a JSON object with \"format\": \"bam-tokenizer\"");
    }
    if (j.value("version", nlohmann::json()) != 1) {
        throw Error(kExitData, path + ": version is " + quoted(j, "version") + ", expected 1");
    }
    const nlohmann::json kind = j.value("kind", nlohmann::json());
    if (kind == "byte") return make_byte_tokenizer();
    if (kind == "word") return parse_word_tokenizer(j, path);
    throw Error(kExitData, path + ": kind is " + quoted(j, "kind") + ", expected \"byte\" or \"word\"");
}

}  // namespace

uint64_t Tokenizer::fingerprint() const {
    const std::string file = serialize();
    return XXH64(file.data(), file.size(), 0);
}

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
    return std::make_unique<ByteTokenizer>();
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
    if (path == "byte") return make_byte_tokenizer();
    std::error_code ignored;
    std::string file = path;
    if (std::filesystem::is_directory(path, ignored)) file = (std::filesystem::path(path) / "tokenizer.json").string();
    if (!std::filesystem::is_regular_file(file, ignored)) {
        throw Error(kExitData,
                    file + ": no such file, expected a tokenizer file, a directory with tokenizer.json, or \"byte\"");
    }
    return make_tokenizer(read_json_file(file, kExitData), file);
}

}  // namespace bam
