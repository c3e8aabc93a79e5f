#include "eval/choice.h"

#include <algorithm>
#include <filesystem>
#include <memory>

#include "check.h"
#include "json.h"
#include "random.h"

namespace bam {

namespace {

// ---- lines to items -----------------------------------------------------------------------------------------------------

const Json& field(const Json& j, const char* name, const std::string& place) {
    if (!j.contains(name)) throw Error(kExitData, place + ": no field \"" + name + "\"");
    return j[name];
}

std::string text_field(const Json& j, const char* name, const std::string& place) {
    const Json& value = field(j, name, place);
    if (!value.is_string()) throw Error(kExitData, place + ": \"" + name + "\" is " + value.dump() + ", expected a string");
    return value;
}

std::vector<std::string> list_of(const Json& value, const std::string& name, const std::string& place) {
    if (!value.is_array() || value.size() < 2 || !std::all_of(value.begin(), value.end(), [](const Json& x) { return x.is_string(); }))
        throw Error(kExitData, place + ": \"" + name + "\" is " + value.dump() + ", expected a list of two strings or more");
    return value;
}

// The right choice: a number from 0, as a number or a string, or one of the labels.
int gold_field(const Json& j, const char* name, const std::vector<std::string>& labels, size_t n, const std::string& place) {
    const Json& value = field(j, name, place);
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    const auto label = std::find(labels.begin(), labels.end(), text);
    if (label != labels.end()) return int(label - labels.begin());
    for (size_t i = 0; labels.size() != n && i < n; ++i)
        if (text == std::to_string(i)) return int(i);
    throw Error(kExitData, place + ": \"" + name + "\" is " + value.dump() + ", expected one of the " + std::to_string(n) + " choices");
}

std::string strip(const std::string& text) {
    const auto space = [](unsigned char c) { return std::isspace(c); };
    const auto begin = std::find_if_not(text.begin(), text.end(), space);
    return {begin, std::find_if_not(text.rbegin(), std::make_reverse_iterator(begin), space).base()};
}

std::string replace_all(std::string text, const std::string& from, const std::string& to) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) text.replace(at, from.size(), to);
    return text;
}

// HellaSwag's WikiHow part has marks in brackets.
std::string clean_wikihow(const std::string& text) {
    std::string t = replace_all(strip(text), " [title]", ". ");
    for (size_t open = t.find('['); open != std::string::npos; open = t.find('[', open)) {
        const size_t close = t.find(']', open), line = t.find('\n', open);
        if (close == std::string::npos) break;
        if (line < close) ++open;  // a mark does not cross lines
        else t.erase(open, close + 1 - open);
    }
    return replace_all(t, "  ", " ");
}

// As Python's str.capitalize() does for ASCII.
std::string capitalized(std::string text) {
    for (char& c : text)
        if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = char(text[0] - 'a' + 'A');
    return text;
}

ChoiceItem parse_arc(const Json& j, const std::string& place) {
    const Json& choices = field(j, "choices", place);
    ChoiceItem item;
    item.context = "Question: " + text_field(j, "question", place) + "\nAnswer:";
    item.choices = list_of(field(choices, "text", place), "choices.text", place);
    const std::vector<std::string> labels = list_of(field(choices, "label", place), "choices.label", place);
    if (labels.size() != item.choices.size())
        throw Error(kExitData, place + ": " + std::to_string(item.choices.size()) + " choices and " + std::to_string(labels.size()) + " labels");
    item.gold = gold_field(j, "answerKey", labels, labels.size(), place);
    return item;
}

ChoiceItem parse_hellaswag(const Json& j, const std::string& place) {
    ChoiceItem item;
    item.context = clean_wikihow(text_field(j, "activity_label", place) + ": " + text_field(j, "ctx_a", place) + " " +
                                 capitalized(text_field(j, "ctx_b", place)));
    for (const std::string& e : list_of(field(j, "endings", place), "endings", place)) item.choices.push_back(clean_wikihow(e));
    item.gold = gold_field(j, "label", {}, item.choices.size(), place);
    return item;
}

ChoiceItem parse_mmlu(const Json& j, bool cloze, const std::string& place) {
    static const std::vector<std::string> letters = {"A", "B", "C", "D"};
    const std::vector<std::string> texts = list_of(field(j, "choices", place), "choices", place);
    if (texts.size() != 4) throw Error(kExitData, place + ": " + std::to_string(texts.size()) + " choices, expected 4");
    const std::string subject = j.contains("subject") ? text_field(j, "subject", place) : "", question = strip(text_field(j, "question", place));
    ChoiceItem item;
    if (!subject.empty())
        item.context = std::string("The following are ") + (cloze ? "" : "multiple choice ") + "questions (with answers) about " +
                       replace_all(subject, "_", " ") + ".\n\n";
    item.context += (cloze ? "Question: " : "") + question + "\n";
    for (int i = 0; i < 4 && !cloze; ++i) item.context += letters[i] + ". " + texts[i] + "\n";
    item.context += "Answer:";
    item.choices = cloze ? texts : letters;
    const Json& answer = field(j, "answer", place);
    item.gold = gold_field(j, "answer", answer.is_string() && answer.get<std::string>().find_first_of("0123") == std::string::npos
                                            ? letters : std::vector<std::string>{}, 4, place);
    return item;
}

std::string task_of(const Json& j, const std::string& place) {
    if (j.contains("endings")) return "hellaswag";
    if (j.contains("choices") && j["choices"].is_object()) return "arc";
    if (j.contains("choices") && j["choices"].is_array()) return "mmlu";
    throw Error(kExitData, place + ": neither \"endings\" nor \"choices\", expected an item of ARC, HellaSwag or MMLU");
}

}  // namespace

ChoiceItem parse_choice(const std::string& line, const std::string& task, const std::string& place) {
    const Json j = parse_json<Json>(line, place, kExitData);
    if (!j.is_object()) throw Error(kExitData, place + ": " + j.type_name() + ", expected an object");
    const std::string name = task.empty() ? task_of(j, place) : task;
    const ChoiceItem item = name == "arc" ? parse_arc(j, place)
                            : name == "hellaswag" ? parse_hellaswag(j, place) : parse_mmlu(j, name == "mmlu_cloze", place);
    for (const std::string& choice : item.choices)
        if (choice.empty()) throw Error(kExitData, place + ": a choice is empty");
    return item;
}

EncodedPair encode_pair(const Tokenizer& tokenizer, const std::string& context, const std::string& continuation) {
    std::string head = context;
    while (!head.empty() && std::isspace(static_cast<unsigned char>(head.back()))) head.pop_back();
    return {tokenizer.encode(context + continuation), int64_t(tokenizer.encode(head).size())};
}

int64_t characters(const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

// ---- the suite ---------------------------------------------------------------------------------------------------------

namespace {

struct Question {
    ChoiceItem item;
    std::vector<ScoredRow> rows;  // one a choice
};

std::shared_ptr<Question> encode_question(const Tokenizer& tokenizer, ChoiceItem item, const std::string& place) {
    const auto q = std::make_shared<Question>();
    for (const std::string& choice : item.choices) {
        EncodedPair pair = encode_pair(tokenizer, item.context, " " + choice);
        if (pair.from < 1 || pair.from >= int64_t(pair.ids.size()))
            throw Error(kExitData, place + ": the tokenizer gives context or choice '" + choice + "' no token of its own");
        q->rows.push_back({std::move(pair.ids), pair.from});
    }
    q->item = std::move(item);
    return q;
}

Json answer(Reader& reader, const Question& q) {
    Json sums = Json::array();
    size_t best = 0, best_norm = 0;
    std::vector<double> sum, norm;
    for (const std::vector<double>& logprobs : reader.logprobs(q.rows)) {
        double total = 0;
        for (double x : logprobs) total += x;
        norm.push_back(total / double(characters(q.item.choices[sum.size()])));
        sum.push_back(total);
        sums.push_back(total);
        if (total > sum[best]) best = sum.size() - 1;
        if (norm.back() > norm[best_norm]) best_norm = norm.size() - 1;
    }
    return {{"logprobs", sums}, {"gold", q.item.gold}, {"acc", int(best) == q.item.gold}, {"acc_norm", int(best_norm) == q.item.gold}};
}

Json summarize_choice(const std::vector<Json>& lines) {
    Json results = Json::array();
    for (const auto& [file, group] : group_by(lines, "file")) {
        Mean acc, norm, chance;
        for (const Json& line : group) {
            acc.add(line.at("acc").get<bool>()), norm.add(line.at("acc_norm").get<bool>());
            chance.add(1.0 / double(line.at("logprobs").size()));
        }
        results.push_back({{"file", file}, {"samples", acc.n}, {"acc", acc.mean()}, {"acc_stderr", acc.stderr_()},
                           {"acc_norm", norm.mean()}, {"acc_norm_stderr", norm.stderr_()}, {"chance", chance.mean()}});
    }
    return results;
}

std::string choice_table(const Json& results) {
    std::vector<std::vector<std::string>> rows = {{"file", "items", "acc", "+-", "acc_norm", "+-", "chance"}};
    const auto error = [](const Json& e) { return e.is_null() ? std::string("-") : format("%.3f", e); };
    for (const Json& r : results)
        rows.push_back({r["file"], r["samples"].dump(), format("%.3f", r["acc"]), error(r["acc_stderr"]), format("%.3f", r["acc_norm"]),
                        error(r["acc_norm_stderr"]), format("%.3f", r["chance"])});
    return format_table(rows);
}

void add_file(Suite& s, const std::string& path, const std::string& task, int samples, const Tokenizer& tokenizer) {
    const std::string text = read_text_file(path, kExitData), name = std::filesystem::path(path).stem().string();
    int number = 0, items = 0;
    for (size_t at = 0; at < text.size() && (samples == 0 || items < samples);) {
        const size_t end = std::min(text.find('\n', at), text.size());
        const std::string line = text.substr(at, end - at), place = path + " line " + std::to_string(++number);
        at = end + 1;
        if (strip(line).empty()) continue;
        const auto q = encode_question(tokenizer, parse_choice(line, task, place), place);
        SuiteItem item;
        item.key = {{"file", name}, {"item", items++}};
        for (const ScoredRow& row : q->rows) item.tokens = std::max(item.tokens, int64_t(row.ids.size()));
        item.rows = int(q->rows.size());
        item.run = [q](Reader& reader) { return answer(reader, *q); };
        s.items.push_back(std::move(item));
    }
    if (items == 0) throw Error(kExitData, path + ": holds no items, expected one JSON object a line");
    s.options["files"].push_back({{"file", name}, {"hash", stream_of(text)}});
}

}  // namespace

Suite make_choice(const std::string& variant, const ChoiceOptions& o, const Tokenizer& tokenizer) {
    const std::vector<std::string> tasks = {"", "arc", "hellaswag", "mmlu", "mmlu_cloze"};
    if (std::find(tasks.begin(), tasks.end(), variant) == tasks.end())
        throw Error(kExitUsage, "choice variant '" + variant + "', expected arc, hellaswag, mmlu or mmlu_cloze");
    if (o.files.empty()) throw Error(kExitUsage, "choice needs item files, expected --items FILE (JSONL)");
    Suite s;
    s.name = "choice", s.variant = variant.empty() ? "auto" : variant, s.file = variant.empty() ? "choice" : "choice-" + variant;
    s.options = {{"samples", o.samples}, {"task", variant}, {"files", Json::array()}};
    for (const std::string& path : o.files) add_file(s, path, variant, o.samples, tokenizer);
    s.summarize = summarize_choice, s.table = choice_table;
    return s;
}

}  // namespace bam
