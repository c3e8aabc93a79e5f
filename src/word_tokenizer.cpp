#include "word_tokenizer.h"

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "check.h"

namespace bam {

namespace {

const char* const kSpecials[kWordSpecials] = {"<end>", "<unk>", "<join>"};

bool is_letter(unsigned char c) {
    return unsigned((c | 32) - 'a') < 26 || c >= 0x80;
}

bool is_word(const std::string& s) {
    for (unsigned char c : s)
        if (!is_letter(c)) return false;
    return !s.empty();
}

// The end of the word or single character that begins at i.
size_t piece_end(std::string_view text, size_t i) {
    if (!is_letter(text[i])) return i + 1;
    while (i < text.size() && is_letter(text[i])) i++;
    return i;
}

struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};

class WordTokenizer final : public Tokenizer {
public:
    // texts: the special tokens, then the others.
    explicit WordTokenizer(std::vector<std::string> texts) : texts_(std::move(texts)) {
        for (size_t i = kWordSpecials; i < texts_.size(); i++) ids_.emplace(texts_[i], int(i));
        space_ = find(" ");
    }

    std::string kind() const override { return "word"; }
    int vocab_size() const override { return int(texts_.size()); }
    int separator_id() const override { return kWordEnd; }
    bool separator_at_end() const override { return true; }

    std::vector<int> encode(std::string_view text) const override {
        std::vector<int> ids;
        bool line_start = true;  // only spaces since the text or line began
        for (size_t i = 0; i < text.size();) {
            size_t spaces = 0;
            while (i < text.size() && text[i] == ' ') i++, spaces++;
            if (i == text.size()) {
                ids.insert(ids.end(), spaces, space_);
                break;
            }
            const size_t end = piece_end(text, i);
            const int id = find(text.substr(i, end - i));
            const bool word = writes_space(id);
            if (word && !line_start && spaces == 0) ids.push_back(kWordJoin);
            ids.insert(ids.end(), word && !line_start && spaces > 0 ? spaces - 1 : spaces, space_);
            ids.push_back(id);
            line_start = text[i] == '\n' && id != kWordUnknown;
            i = end;
        }
        return ids;
    }

    std::string decode(const std::vector<int>& ids) const override {
        std::string text;
        bool line_start = true, joined = false;
        for (int id : ids) {
            const bool foreign = id < 0 || id >= vocab_size();
            if (id == kWordJoin) joined = true;
            if (id == kWordEnd || id == kWordJoin) continue;
            if (!foreign && writes_space(id) && !line_start && !joined) text += ' ';
            text += foreign ? "\xef\xbf\xbd" : texts_[size_t(id)];
            joined = false;
            if (id != space_) line_start = text.back() == '\n';
        }
        return text;
    }

    // After the last newline a text begins as at its start.
    size_t cut(std::string_view text) const override {
        if (find("\n") == kWordUnknown) return 0;
        const size_t newline = text.rfind('\n');
        return newline == std::string_view::npos ? 0 : newline + 1;
    }

    std::string serialize() const override {
        nlohmann::ordered_json j;
        j["format"] = "bam-tokenizer";
        j["version"] = 1;
        j["kind"] = "word";
        j["vocab_size"] = vocab_size();
        j["separator"] = {{"id", kWordEnd}, {"position", "end"}};
        j["words"] = texts_;
        return j.dump(1) + "\n";
    }

private:
    int find(std::string_view piece) const {
        const auto it = ids_.find(piece);
        return it == ids_.end() ? kWordUnknown : it->second;
    }
    bool writes_space(int id) const { return id == kWordUnknown || is_letter(texts_[size_t(id)][0]); }

    std::vector<std::string> texts_;  // by id
    std::unordered_map<std::string, int, Hash, std::equal_to<>> ids_;
    int space_ = kWordUnknown;
};

// What is wrong with the first entry that cannot be a token, or "".
std::string fault_of(const std::vector<std::string>& texts) {
    std::unordered_map<std::string, size_t> seen;
    for (size_t i = 0; i < texts.size(); i++) {
        const std::string& t = texts[i];
        const std::string entry = "words[" + std::to_string(i) + "] is \"" + t + "\", ";
        if (i >= kWordSpecials && t.size() != 1 && !is_word(t)) return entry + "expected letters or one character";
        if (!seen.emplace(t, i).second) return entry + "which is words[" + std::to_string(seen[t]) + "] too";
    }
    return seen.count(" ") ? "" : "words has no \" \"";
}

}  // namespace

std::unique_ptr<Tokenizer> make_word_tokenizer(const std::vector<std::string>& words, const std::string& origin) {
    std::vector<std::string> texts(kSpecials, kSpecials + kWordSpecials);
    texts.insert(texts.end(), words.begin(), words.end());
    const std::string fault = fault_of(texts);
    if (!fault.empty()) throw Error(kExitData, origin + ": " + fault);
    return std::make_unique<WordTokenizer>(std::move(texts));
}

std::unique_ptr<Tokenizer> parse_word_tokenizer(const nlohmann::json& j, const std::string& origin) {
    const nlohmann::json words = j.value("words", nlohmann::json());
    if (!words.is_array()) throw Error(kExitData, origin + ": words is " + words.dump() + ", expected a list");
    std::vector<std::string> texts;
    for (const nlohmann::json& w : words) {
        const size_t i = texts.size();
        const std::string entry = origin + ": words[" + std::to_string(i) + "] is " + w.dump() + ", expected ";
        if (!w.is_string()) throw Error(kExitData, entry + "a string");
        if (i < kWordSpecials && w != kSpecials[i]) throw Error(kExitData, entry + "\"" + kSpecials[i] + "\"");
        texts.push_back(w);
    }
    if (texts.size() < kWordSpecials)
        throw Error(kExitData, origin + ": words has " + std::to_string(texts.size()) + " entries, expected 3 or more");
    return make_word_tokenizer({texts.begin() + kWordSpecials, texts.end()}, origin);
}

}  // namespace bam
