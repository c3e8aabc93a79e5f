// Inputs, one document after the other, into a DatasetWriter.
#include "tokenize.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "check.h"
#include "loader.h"

namespace bam {

namespace fs = std::filesystem;

namespace {

enum class InputKind { text, lines };

struct Input {
    std::string path;  // "-": standard input
    InputKind kind;
};

Input check_input(const std::string& path) {
    if (path == "-") return {path, InputKind::text};
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) throw Error(kExitData, path + ": no such file");
    if (fs::is_directory(status)) throw Error(kExitData, path + ": a directory, expected a .txt or .jsonl file or -");
    std::string extension = fs::path(path).extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    if (extension == ".txt") return {path, InputKind::text};
    if (extension == ".jsonl") return {path, InputKind::lines};
    throw Error(kExitData, path + ": what it holds is not known from its name, expected .txt, .jsonl or -");
}

std::vector<Input> check_inputs(const std::vector<std::string>& paths) {
    if (paths.empty()) throw Error(kExitUsage, "no input, expected .txt or .jsonl files or - (standard input)");
    if (std::count(paths.begin(), paths.end(), "-") > 1)
        throw Error(kExitUsage, "-: standard input can be read only once");
    std::vector<Input> inputs;
    for (const std::string& p : paths) inputs.push_back(check_input(p));
    return inputs;
}

void with_stream(const Input& input, const std::function<void(std::istream&)>& act) {
    if (input.path == "-") return act(std::cin);
    std::ifstream in(input.path, std::ios::binary);
    if (!in) throw Error(kExitData, input.path + ": cannot be opened");
    act(in);
    if (in.bad()) throw Error(kExitFailure, input.path + ": cannot be read");
}

bool is_blank(const std::string& line) {
    return line.find_first_not_of(" \t\r") == std::string::npos;
}

int64_t count_documents(const std::vector<Input>& inputs) {
    int64_t n = 0;
    for (const Input& input : inputs) {
        if (input.kind == InputKind::text) {
            n++;
            continue;
        }
        if (!fs::is_regular_file(input.path)) {
            throw Error(kExitUsage,
                        input.path + ": not a regular file, and choosing validation documents reads inputs twice");
        }
        with_stream(input, [&](std::istream& in) {
            std::string line;
            while (std::getline(in, line)) n += !is_blank(line);
        });
    }
    return n;
}

// Which documents are for validation: a function of their number and the seed.
class Choice {
public:
    Choice(const TokenizeOptions& o, const std::vector<Input>& inputs) : seed_(o.seed) {
        if (o.val_documents < 0) refuse("val-documents is " + std::to_string(o.val_documents), "0 or more");
        if (!(o.val_fraction >= 0 && o.val_fraction < 1))
            refuse("val-fraction is " + std::to_string(o.val_fraction), "0 to below 1");
        if (o.val_documents > 0 && o.val_fraction > 0)
            refuse("val-documents and val-fraction are both given", "one of them");
        if (o.val_documents == 0 && o.val_fraction == 0) return;
        documents_ = count_documents(inputs);
        wanted_ = o.val_documents > 0 ? o.val_documents
                                      : std::max<int64_t>(1, std::llround(o.val_fraction * double(documents_)));
        if (wanted_ >= documents_) {
            refuse("validation takes " + std::to_string(wanted_) + " of " + std::to_string(documents_) + " document(s)",
                   "at least one left for training");
        }
    }

    Split of(int64_t document) const {
        if (wanted_ == 0) return Split::train;
        if (document >= documents_) throw Error(kExitData, "the inputs grew while they were read");
        return permute(document, documents_, seed_, 0) < wanted_ ? Split::val : Split::train;
    }

private:
    [[noreturn]] static void refuse(const std::string& found, const std::string& expected) {
        throw Error(kExitUsage, found + ", expected " + expected);
    }
    uint64_t seed_;
    int64_t documents_ = 0, wanted_ = 0;
};

// Encodes what may be encoded of text, leaving the rest in it; at the end everything.
void encode_some(DatasetWriter& out, Split part, const Tokenizer& tokenizer, std::string& text, bool at_end) {
    const size_t n = at_end ? text.size() : tokenizer.cut(text);
    if (n == 0) return;
    out.add(part, tokenizer.encode(std::string_view(text).substr(0, n)), int64_t(n));
    text.erase(0, n);
}

void add_text(DatasetWriter& out, Split part, const Tokenizer& tokenizer, std::istream& in) {
    std::string pending, chunk(1 << 20, '\0');
    while (in.read(chunk.data(), std::streamsize(chunk.size())), in.gcount() > 0) {
        pending.append(chunk, 0, size_t(in.gcount()));
        encode_some(out, part, tokenizer, pending, false);
    }
    encode_some(out, part, tokenizer, pending, true);
    out.end_document(part);
}

std::string text_of_line(const std::string& line, const std::string& place) {
    static const char* expected = ", expected an object with a string \"text\"";
    nlohmann::json j;
    try {
        j = nlohmann::json::parse(line);
    } catch (const nlohmann::json::parse_error& e) {
        throw Error(kExitData, place + ": not JSON at byte " + std::to_string(e.byte) + expected);
    } catch (const nlohmann::json::exception&) {  // a number that no double can hold
        throw Error(kExitData, place + ": not JSON" + expected);
    }
    if (!j.is_object()) throw Error(kExitData, place + ": " + j.type_name() + expected);
    const auto text = j.find("text");
    if (text == j.end()) throw Error(kExitData, place + ": no \"text\"" + expected);
    if (!text->is_string()) throw Error(kExitData, place + ": \"text\" is " + text->type_name() + expected);
    return std::move(text->get_ref<std::string&>());
}

// Thousands apart, as people read them.
std::string grouped(int64_t n) {
    std::string s = std::to_string(n);
    for (int64_t i = int64_t(s.size()) - 3; i > 0; i -= 3) s.insert(size_t(i), ",");
    return s;
}

}  // namespace

DatasetInfo tokenize(const TokenizeOptions& o) {
    const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(o.tokenizer);
    const std::vector<Input> inputs = check_inputs(o.inputs);
    const Choice choice(o, inputs);
    DatasetWriter out(o.out, *tokenizer, o.force, o.shard_tokens);
    int64_t document = 0;
    for (const Input& input : inputs) {
        with_stream(input, [&](std::istream& in) {
            if (input.kind == InputKind::text) return add_text(out, choice.of(document++), *tokenizer, in);
            std::string line;
            for (int64_t number = 1; std::getline(in, line); number++) {
                if (is_blank(line)) continue;
                const Split part = choice.of(document++);
                std::string text = text_of_line(line, input.path + ":" + std::to_string(number));
                encode_some(out, part, *tokenizer, text, true);
                out.end_document(part);
            }
        });
    }
    return out.finish();
}

void print_dataset(const DatasetInfo& d, std::ostream& out) {
    out << d.directory << ": " << d.tokenizer_kind << " tokenizer, " << grouped(d.vocab_size) << " ids";
    if (d.separator_id >= 0) out << ", separator " << d.separator_id << (d.separator_at_end ? " (end)" : " (start)");
    out << "\n";
    for (const auto& [name, p] : {std::pair("train", &d.train), std::pair("val", &d.val)}) {
        if (p->files.empty()) continue;
        out << "  " << name << ": " << grouped(p->tokens) << " tokens, " << grouped(p->documents) << " documents, "
            << grouped(p->text_bytes) << " bytes of text, " << grouped(int64_t(p->files.size())) << " shard(s)\n";
    }
}

}  // namespace bam
