#include "eval/niah.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <set>

#include "check.h"
#include "eval/words.h"
#include "random.h"

namespace bam {

const std::vector<NiahTask>& niah_tasks() {
    using enum Haystack;
    using enum NeedleKind;
    static const std::vector<NiahTask> tasks = {
        {"single_1", noise, words, numbers, 1, 1, 1},     {"single_2", essay, words, numbers, 1, 1, 1},
        {"single_3", essay, words, uuids, 1, 1, 1},       {"multikey_1", essay, words, numbers, 4, 1, 1},
        {"multikey_2", Haystack::needles, words, numbers, 1, 1, 1}, {"multikey_3", Haystack::needles, uuids, uuids, 1, 1, 1},
        {"multivalue", essay, words, numbers, 1, 4, 1},   {"multiquery", essay, words, numbers, 4, 1, 4},
    };
    return tasks;
}

namespace {

const char* kNoise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

const char* plural_of(NeedleKind kind) {
    return kind == NeedleKind::words ? "words" : kind == NeedleKind::numbers ? "numbers" : "uuids";
}

// The random draws of one item, in order.
class Draws {
public:
    Draws(uint64_t seed, const std::string& task, int item) : seed_(seed), stream_(stream_of("niah." + task) + mix64(uint64_t(item))) {}
    uint64_t below(uint64_t n) { return random_below(seed_, stream_, next_++, n); }

    // k different numbers below n, ascending.
    std::vector<int64_t> sample(int64_t n, int64_t k) {
        std::set<int64_t> chosen;
        while (int64_t(chosen.size()) < k) chosen.insert(int64_t(below(uint64_t(n))));
        return {chosen.begin(), chosen.end()};
    }
    template <typename T>
    void shuffle(std::vector<T>& x) {
        for (size_t i = x.size(); i > 1; --i) std::swap(x[i - 1], x[below(i)]);
    }

    std::string needle_part(NeedleKind kind) {
        if (kind == NeedleKind::words)
            return adjectives()[below(adjectives().size())] + "-" + nouns()[below(nouns().size())];
        if (kind == NeedleKind::numbers) return std::to_string(1000000 + below(9000000));
        return uuid();
    }

private:
    std::string uuid() {  // version 4
        std::string hex;
        for (int i = 0; i < 32; ++i) {
            const uint64_t digit = i == 12 ? 4 : i == 16 ? 8 + below(4) : below(16);
            hex += "0123456789abcdef"[digit];
            if (i == 7 || i == 11 || i == 15 || i == 19) hex += '-';
        }
        return hex;
    }
    uint64_t seed_, stream_, next_ = 0;
};

std::string needle_text(NeedleKind values, const std::string& key, const std::string& value) {
    return std::string("One of the special magic ") + plural_of(values) + " for " + key + " is: " + value + ".";
}

std::string join(const std::vector<std::string>& parts, size_t begin, size_t end, const char* between) {
    std::string text;
    for (size_t i = begin; i < end; ++i) text += (i > begin ? between : "") + parts[i];
    return text;
}

// Needles between lines of noise or of other needles, each at a place of its own.
std::string hide_in_lines(std::vector<std::string> lines, const std::vector<std::string>& needles, Draws& draws) {
    const std::vector<int64_t> places = draws.sample(int64_t(lines.size()), int64_t(needles.size()));
    for (size_t i = 0; i < needles.size(); ++i)  // from the back, so that earlier places stay right
        lines.insert(lines.begin() + places[places.size() - 1 - i], needles[i]);
    return join(lines, 0, lines.size(), "\n");
}

// Needles behind sentences of the essay, at different ones of 40 evenly spaced depths.
std::string hide_in_essay(const std::vector<std::string>& words, int64_t n, const std::vector<std::string>& needles, Draws& draws) {
    std::vector<std::string> taken;
    for (int64_t i = 0; i < n; ++i) taken.push_back(words[size_t(i) % words.size()]);
    const std::vector<std::string> sentences = split_sentences(join(taken, 0, taken.size(), " "));
    std::vector<std::string> parts;
    size_t at = 0;
    const std::vector<int64_t> depths = draws.sample(40, int64_t(needles.size()));
    for (size_t i = 0; i < needles.size(); ++i) {
        const double percent = std::round(100.0 * double(depths[i]) / 39);
        const size_t place = size_t(double(sentences.size()) * (percent / 100));
        parts.push_back(join(sentences, at, place, " "));
        parts.push_back(needles[i]);
        at = place;
    }
    parts.push_back(join(sentences, at, sentences.size(), " "));
    return join(parts, 0, parts.size(), " ");
}

std::string question(const NiahTask& task, const std::string& context, const std::vector<std::string>& queries) {
    std::string query = queries[0];
    for (size_t i = 1; i < queries.size(); ++i) query += (i + 1 < queries.size() ? ", " : ", and ") + queries[i];
    const bool one = task.n_queries * task.n_values == 1;
    std::string kind = plural_of(task.values);
    if (one) kind.pop_back();
    const std::string is = one ? "is" : "are";
    return (one ? "A special magic " : "Some special magic ") + kind + " " + is +
           " hidden within the following text. Make sure to memorize it. I will quiz you about the " + kind + " afterwards.\n" +
           context + "\nWhat " + (one ? "is" : "are all") + " the special magic " + kind + " for " + query +
           " mentioned in the provided text? The special magic " + kind + " for " + query + " mentioned in the provided text " + is;
}

std::string lower(std::string text) {
    for (char& c : text)
        if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    return text;
}

}  // namespace

NiahPrompt niah_prompt(const NiahTask& task, const std::vector<std::string>& essay_words, int64_t n, uint64_t seed, int item) {
    Draws draws(seed, task.name, item);
    std::vector<std::string> keys, needles;
    std::vector<std::vector<std::string>> values;
    while (int(keys.size()) < task.n_keys) {
        const std::string key = draws.needle_part(task.keys);
        if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
        keys.push_back(key);
        values.emplace_back();
        for (int v = 0; v < task.n_values; ++v) {
            values.back().push_back(draws.needle_part(task.values));
            needles.push_back(needle_text(task.values, key, values.back().back()));
        }
    }
    draws.shuffle(needles);
    std::vector<int64_t> asked = draws.sample(task.n_keys, task.n_queries);
    draws.shuffle(asked);
    NiahPrompt p;
    std::vector<std::string> queries;
    for (int64_t i : asked) {
        queries.push_back(keys[i]);
        p.answers.insert(p.answers.end(), values[i].begin(), values[i].end());
    }
    std::string context;
    if (task.haystack == Haystack::essay) {
        context = hide_in_essay(essay_words, n, needles, draws);
    } else {
        std::vector<std::string> lines(size_t(n), kNoise);
        if (task.haystack == Haystack::needles)
            for (std::string& line : lines) {
                const std::string key = draws.needle_part(task.keys);
                line = needle_text(task.values, key, draws.needle_part(task.values));
            }
        context = hide_in_lines(std::move(lines), needles, draws);
    }
    p.text = question(task, context, queries);
    return p;
}

std::vector<std::string> split_words(const std::string& text) {
    const auto space = [](unsigned char c) { return std::isspace(c); };
    std::vector<std::string> words;
    for (auto at = std::find_if_not(text.begin(), text.end(), space); at != text.end();) {
        const auto end = std::find_if(at, text.end(), space);
        words.emplace_back(at, end);
        at = std::find_if_not(end, text.end(), space);
    }
    return words;
}

std::vector<std::string> split_sentences(const std::string& text) {
    std::vector<std::string> sentences;
    size_t begin = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] != ' ') continue;
        size_t last = i;
        while (last > begin && std::string("\"')]").find(text[last - 1]) != std::string::npos) --last;
        if (last == begin || std::string(".!?").find(text[last - 1]) == std::string::npos) continue;
        sentences.push_back(text.substr(begin, i - begin));
        begin = i + 1;
    }
    if (begin < text.size()) sentences.push_back(text.substr(begin));
    return sentences;
}

double niah_score(const std::string& answer, const std::vector<std::string>& references) {
    const std::string said = lower(answer);
    double found = 0;
    for (const std::string& r : references) found += said.find(lower(r)) != std::string::npos;
    return found / double(references.size());
}

// ---- the suite ---------------------------------------------------------------------------------------------------------

namespace {

std::vector<std::string> read_essay(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    if (!in && text.empty()) throw Error(kExitData, path + ": cannot be read, expected a text file for the essay haystack");
    std::vector<std::string> words = split_words(text);
    if (words.empty()) throw Error(kExitData, path + ": holds no words, expected an essay");
    return words;
}

std::vector<NiahTask> chosen_tasks(const std::string& variant, bool have_essay) {
    std::vector<NiahTask> chosen;
    for (size_t at = 0; at < variant.size();) {
        const size_t end = std::min(variant.find(',', at), variant.size());
        const std::string name = variant.substr(at, end - at);
        const auto& all = niah_tasks();
        const auto task = std::find_if(all.begin(), all.end(), [&](const NiahTask& t) { return name == t.name; });
        if (task == all.end()) {
            std::string names;
            for (const NiahTask& t : all) names += (names.empty() ? "" : ", ") + std::string(t.name);
            throw Error(kExitUsage, "niah variant '" + name + "', expected some of " + names);
        }
        if (task->haystack == Haystack::essay && !have_essay)
            throw Error(kExitUsage, "niah " + name + " hides its needles in an essay, expected a text file with --haystack");
        chosen.push_back(*task);
        at = end + 1;
    }
    if (variant.empty())
        for (const NiahTask& t : niah_tasks())
            if (have_essay || t.haystack != Haystack::essay) chosen.push_back(t);
    return chosen;
}

struct NiahContext {
    const Tokenizer& tokenizer;
    Separator separator;
    std::vector<std::string> essay;
    uint64_t seed;
};

int64_t tokens_of(const NiahContext& c, const NiahTask& task, int64_t n, int item) {
    return int64_t(c.tokenizer.encode(niah_prompt(task, c.essay, n, c.seed, item).text).size()) + kNiahAnswerTokens;
}

int64_t least_haystack(const NiahTask& task) {
    return task.haystack == Haystack::essay ? 1 : std::max(task.n_keys * task.n_values, 1);
}

void require_room(const NiahContext& c, const NiahTask& task, int64_t length) {
    const int64_t needed = tokens_of(c, task, least_haystack(task), 0);
    if (needed > length)
        throw Error(kExitUsage, "niah " + std::string(task.name) + " at length " + std::to_string(length) + ": the prompt and " +
                                    std::to_string(kNiahAnswerTokens) + " tokens of answer take " + std::to_string(needed) +
                                    " with the smallest haystack, expected a length of at least that");
}

// The largest haystack whose first item fits.
int64_t fit_haystack(const NiahContext& c, const NiahTask& task, int64_t length) {
    int64_t low = least_haystack(task), high = 2 * low;
    while (tokens_of(c, task, high, 0) <= length) low = high, high *= 2;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (tokens_of(c, task, middle, 0) <= length ? low : high) = middle;
    }
    return low;
}

// An item whose random words take more tokens than the first's gets a little less haystack.
std::pair<NiahPrompt, std::vector<int>> fitting_prompt(const NiahContext& c, const NiahTask& task, int64_t n, int64_t length, int item) {
    for (;; n -= std::max<int64_t>(1, n / 64)) {
        NiahPrompt p = niah_prompt(task, c.essay, n, c.seed, item);
        std::vector<int> ids = c.tokenizer.encode(p.text);
        if (int64_t(ids.size()) + kNiahAnswerTokens <= length) return {std::move(p), std::move(ids)};
        if (n <= least_haystack(task))
            throw Error(kExitUsage, "niah " + std::string(task.name) + " at length " + std::to_string(length) + ": item " +
                                        std::to_string(item) + " does not fit, expected a larger length");
    }
}

// A tokenizer that lacks the needles' words would make the question unanswerable.
void require_spelling(const NiahContext& c, const NiahTask& task) {
    const NiahPrompt p = niah_prompt(task, c.essay, least_haystack(task), c.seed, 0);
    const std::string back = c.tokenizer.decode(c.tokenizer.encode(p.text));
    const size_t at = p.text.find("One of the special magic");
    const std::string needle = p.text.substr(at, p.text.find('.', at) - at);
    if (back.find(needle) == std::string::npos)
        throw Error(kExitData, "niah " + std::string(task.name) + ": the tokenizer cannot write '" + needle +
                                   "', expected one for general text");
}

Json run_item(Reader& reader, const NiahContext& c, const NiahTask& task, int64_t n, int64_t length, int item) {
    const auto [prompt, ids] = fitting_prompt(c, task, n, length, item);
    SampleOptions greedy;
    greedy.max_tokens = kNiahAnswerTokens;
    const Generated g = generate(reader, c.tokenizer, c.separator, {ids}, greedy)[0];
    return {{"reached_tokens", ids.size()}, {"references", prompt.answers}, {"said", g.text}, {"score", niah_score(g.text, prompt.answers)}};
}

Json summarize_niah(const std::vector<Json>& lines) {
    Json results = Json::array();
    for (const auto& [task, of_task] : group_by(lines, "task"))
        for (const auto& [length, group] : group_by(of_task, "length")) {
            Mean score, reached;
            for (const Json& line : group) score.add(line.at("score")), reached.add(line.at("reached_tokens"));
            results.push_back({{"task", task}, {"length", length}, {"reached_tokens", int64_t(reached.mean() + 0.5)},
                               {"samples", score.n}, {"accuracy", score.mean()}, {"stderr", score.stderr_()}, {"chance", 0.0}});
        }
    return results;
}

std::string niah_table(const Json& results) {
    std::vector<std::vector<std::string>> rows = {{"task", "length", "tokens", "samples", "score", "+-"}};
    for (const Json& r : results)
        rows.push_back({r["task"], r["length"].dump(), r["reached_tokens"].dump(), r["samples"].dump(), format("%.3f", r["accuracy"]),
                        r["stderr"].is_null() ? "-" : format("%.3f", r["stderr"])});
    return format_table(rows);
}

}  // namespace

Suite make_niah(const std::string& variant, const NiahOptions& o, const Tokenizer& tokenizer, const Separator& separator) {
    const std::vector<NiahTask> tasks = chosen_tasks(variant, !o.essay_file.empty());
    const auto context = std::make_shared<NiahContext>(NiahContext{tokenizer, separator, {}, o.seed});
    if (!o.essay_file.empty()) context->essay = read_essay(o.essay_file);
    const int samples = o.samples ? o.samples : 20;
    Suite s;
    s.name = "niah", s.file = "niah";
    for (const NiahTask& task : tasks) s.variant += (s.variant.empty() ? "" : ",") + std::string(task.name);
    s.options = {{"seed", o.seed}, {"samples", samples}, {"essay", stream_of(join(context->essay, 0, context->essay.size(), " "))}};
    for (const NiahTask& task : tasks) {
        require_spelling(*context, task);
        for (int64_t length : o.lengths) require_room(*context, task, length);
    }
    for (const NiahTask& task : tasks)
        for (int64_t length : o.lengths) {
            const int64_t n = fit_haystack(*context, task, length);
            for (int i = 0; i < samples; ++i) {
                SuiteItem item;
                item.key = {{"task", task.name}, {"length", length}, {"item", i}};
                item.tokens = length;
                item.run = [context, task, n, length, i](Reader& reader) { return run_item(reader, *context, task, n, length, i); };
                s.items.push_back(std::move(item));
            }
        }
    s.summarize = summarize_niah, s.table = niah_table;
    return s;
}

}  // namespace bam
