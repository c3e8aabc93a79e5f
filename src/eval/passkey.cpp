#include "eval/passkey.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "eval/generate.h"
#include "random.h"

namespace bam {

namespace {

const char* kIntro =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about the "
    "important information there.";
const char* kFiller = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
const char* kQuestion = "What is the pass key? The pass key is";

std::string statement_text(int key) {
    const std::string k = std::to_string(key);
    return "The pass key is " + k + ". Remember it. " + k + " is the pass key.";
}

void append(std::vector<int>& to, const std::vector<int>& more) { to.insert(to.end(), more.begin(), more.end()); }

// Key number `item` at a length: drawn again until it is allowed.
int draw_key(const PasskeyOptions& o, int low, int count, int64_t length, int item) {
    const uint64_t stream = stream_of("passkey.key." + std::to_string(length));
    for (uint64_t attempt = 0;; ++attempt) {
        const int key = low + int(random_below(o.seed, stream, uint64_t(item) + (attempt << 32), uint64_t(count)));
        if (!o.allowed || o.allowed(key)) return key;
    }
}

// Fillers (or characters) before the statement for sample i of S.
int64_t place(const PasskeyOptions& o, int64_t n, int64_t length, int i, int S) {
    switch (o.position) {
        case KeyPosition::equidistant: return S > 1 ? n * i / (S - 1) : 0;
        case KeyPosition::beginning: return 0;
        case KeyPosition::end: return n;
        case KeyPosition::random: break;
    }
    return int64_t(random_below(o.seed, stream_of("passkey.depth." + std::to_string(length)), uint64_t(i), uint64_t(n) + 1));
}

double depth_of(const PasskeyOptions& o, int64_t n, int64_t before, int i, int S) {
    if (o.position == KeyPosition::equidistant) return S > 1 ? double(i) / (S - 1) : 0;
    return n ? double(before) / double(n) : 0;
}

bool only_space(const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isspace(c); });
}

// Asks for the answer's tokens, the true ones before each being given.
Json ask(Reader& reader, const std::vector<int>& prompt, const std::vector<int>& answer, const Tokenizer& tokenizer) {
    std::vector<int> ids = prompt, said;
    append(ids, {answer.begin(), answer.end() - 1});
    int right = 0, scored = 0;
    double logprob = 0;
    reader.start(1, int64_t(ids.size()));
    reader.feed({{ids, int64_t(prompt.size()) - 1}}, [&](int, int64_t i, const float* logits) {
        const int target = answer[i + 1 - int64_t(prompt.size())];
        if (only_space(tokenizer.decode({target}))) return;  // fed, not scored
        said.push_back(argmax(logits, reader.vocab_size()));
        logprob += log_softmax_at(logits, reader.vocab_size(), target);
        ++scored;
        right += said.back() == target;
    });
    return {{"reached_tokens", prompt.size()}, {"said", tokenizer.decode(said)}, {"correct", right == scored},
            {"digits", scored}, {"digits_right", right}, {"logprob", logprob}};
}

double chance_of(const PasskeyOptions& o, int low, int count) {
    if (!o.allowed) return 1.0 / count;
    int n = 0;
    for (int key = low; key < low + count; ++key) n += o.allowed(key);
    return 1.0 / std::max(1, n);
}

Json summary_of_length(const Json& length, const std::vector<Json>& lines, double chance, bool by_digit) {
    Mean accuracy, digits, reached;
    Json by_depth = Json::array();
    for (const Json& line : lines) {
        accuracy.add(line.at("correct").get<bool>());
        reached.add(line.at("reached_tokens"));
        if (by_digit) digits.add(line.at("digits_right").get<double>() / line.at("digits").get<double>());
    }
    for (const auto& [depth, group] : group_by(lines, "depth")) {
        Json d = {{"depth", depth}, {"samples", group.size()}};
        int correct = 0;
        Mean right;
        for (const Json& line : group) {
            correct += line.at("correct").get<bool>();
            if (by_digit) right.add(line.at("digits_right").get<double>() / line.at("digits").get<double>());
        }
        d["correct"] = correct;
        if (by_digit) d["digit_accuracy"] = right.mean();
        by_depth.push_back(d);
    }
    Json r = {{"length", length}, {"reached_tokens", int64_t(reached.mean() + 0.5)}, {"samples", accuracy.n},
              {"accuracy", accuracy.mean()}, {"stderr", accuracy.stderr_()}};
    if (by_digit) r["digit_accuracy"] = digits.mean(), r["digit_stderr"] = digits.stderr_();
    r["chance"] = chance;
    if (by_digit) r["digit_chance"] = 0.1;
    r["by_depth"] = by_depth;
    return r;
}

std::string passkey_table(const Json& results, bool by_digit) {
    std::vector<std::vector<std::string>> rows = {{"length", "tokens", "samples", "accuracy", "+-"}};
    if (by_digit) rows[0].push_back("per digit");
    rows[0].push_back("chance");
    for (const Json& r : results) {
        rows.push_back({r["length"].dump(), r["reached_tokens"].dump(), r["samples"].dump(), format("%.3f", r["accuracy"]),
                        r["stderr"].is_null() ? "-" : format("%.3f", r["stderr"])});
        if (by_digit) rows.back().push_back(format("%.3f", r["digit_accuracy"]));
        rows.back().push_back(format("%.1g", r["chance"]));
    }
    return format_table(rows);
}

}  // namespace

// ---- prompts ----------------------------------------------------------------------------------------------------------

PasskeyText::PasskeyText(const Tokenizer& t)
    : tokenizer(t), intro(t.encode(kIntro)), filler(t.encode(kFiller)), question(t.encode(kQuestion)) {}

std::vector<int> PasskeyText::statement(int key) const { return tokenizer.encode(statement_text(key)); }

std::vector<int> PasskeyText::answer(int key) const { return tokenizer.encode(" " + std::to_string(key)); }

int64_t PasskeyText::fixed() const { return int64_t(intro.size() + statement(99999).size() + question.size()); }

int64_t PasskeyText::fillers(int64_t length) const {
    if (length < fixed())
        throw Error(kExitUsage, "passkey at length " + std::to_string(length) + ": the prompt takes " + std::to_string(fixed()) +
                                    " tokens without fillers, expected a length of at least that");
    return (length - fixed()) / int64_t(filler.size());
}

std::vector<int> PasskeyText::prompt(int key, int64_t n, int64_t before) const {
    std::vector<int> ids = intro;
    for (int64_t i = 0; i < before; ++i) append(ids, filler);
    append(ids, statement(key));
    for (int64_t i = before; i < n; ++i) append(ids, filler);
    append(ids, question);
    return ids;
}

std::string landmark_prompt(int key, int64_t garbage, int64_t before) {
    std::string endless;
    while (int64_t(endless.size()) < garbage) endless += std::string(endless.empty() ? "" : " ") + kFiller;
    return std::string(kIntro) + "\n" + endless.substr(0, before) + "\n" + statement_text(key) + "\n" +
           endless.substr(0, garbage - before) + "\n" + kQuestion;
}

std::string first_integer(const std::string& text) {
    const auto digit = [](unsigned char c) { return c >= '0' && c <= '9'; };
    const auto begin = std::find_if(text.begin(), text.end(), digit);
    return {begin, std::find_if_not(begin, text.end(), digit)};
}

KeyPosition parse_key_position(const std::string& name) {
    if (name == "equidistant") return KeyPosition::equidistant;
    if (name == "random") return KeyPosition::random;
    if (name == "beginning") return KeyPosition::beginning;
    if (name == "end") return KeyPosition::end;
    throw Error(kExitUsage, "key position '" + name + "', expected equidistant, random, beginning or end");
}

// ---- the suite ---------------------------------------------------------------------------------------------------------

static const char* name_of(KeyPosition p) {
    constexpr const char* names[] = {"equidistant", "random", "beginning", "end"};
    return names[int(p)];
}

static Suite make_paper(const PasskeyOptions& o, const Tokenizer& tokenizer) {
    Suite s;
    const int S = o.samples ? o.samples : 20;
    const auto text = std::make_shared<PasskeyText>(tokenizer);
    s.options = {{"samples", S}, {"seed", o.seed}, {"position", name_of(o.position)}, {"chosen_keys", bool(o.allowed)}};
    for (int64_t length : o.lengths) {
        const int64_t n = text->fillers(length);
        for (int i = 0; i < S; ++i) {
            const int64_t before = place(o, n, length, i, S);
            const int key = draw_key(o, 10000, 90000, length, i);
            SuiteItem item;
            item.key = {{"length", length}, {"depth", depth_of(o, n, before, i, S)}, {"item", i}};
            item.tokens = length + int64_t(text->answer(key).size());
            item.run = [text, key, n, before](Reader& reader) {
                Json r = {{"passkey", key}};
                r.update(ask(reader, text->prompt(key, n, before), text->answer(key), text->tokenizer));
                return r;
            };
            s.items.push_back(std::move(item));
        }
    }
    s.summarize = [chance = chance_of(o, 10000, 90000)](const std::vector<Json>& lines) {
        Json results = Json::array();
        for (const auto& [length, group] : group_by(lines, "length")) results.push_back(summary_of_length(length, group, chance, true));
        return results;
    };
    s.table = [](const Json& results) { return passkey_table(results, true); };
    return s;
}

static Suite make_landmark(const PasskeyOptions& o, const Tokenizer& tokenizer) {
    constexpr int kAnswerTokens = 10;
    Suite s;
    const int S = o.samples ? o.samples : 50;
    PasskeyOptions random = o;
    random.position = KeyPosition::random, random.allowed = {};
    s.options = {{"samples", S}, {"seed", o.seed}};
    for (int64_t garbage : o.lengths) {
        for (int i = 0; i < S; ++i) {
            const int64_t before = place(random, garbage, garbage, i, S);
            const int key = draw_key(random, 1, 50000, garbage, i);
            SuiteItem item;
            item.key = {{"length", garbage}, {"depth", depth_of(random, garbage, before, i, S)}, {"item", i}};
            item.tokens = int64_t(tokenizer.encode(landmark_prompt(key, garbage, before)).size()) + kAnswerTokens;
            item.run = [&tokenizer, key, garbage, before](Reader& reader) -> Json {
                const std::vector<int> prompt = tokenizer.encode(landmark_prompt(key, garbage, before));
                SampleOptions greedy;
                greedy.max_tokens = kAnswerTokens;
                const std::string said = generate(reader, tokenizer, {}, {prompt}, greedy)[0].text;
                return {{"passkey", key}, {"reached_tokens", prompt.size()}, {"said", said},
                        {"correct", first_integer(said) == std::to_string(key)}};
            };
            s.items.push_back(std::move(item));
        }
    }
    s.summarize = [](const std::vector<Json>& lines) {
        Json results = Json::array();
        for (const auto& [length, group] : group_by(lines, "length"))
            results.push_back(summary_of_length(length, group, 1.0 / 50000, false));
        return results;
    };
    s.table = [](const Json& results) { return passkey_table(results, false); };
    return s;
}

Suite make_passkey(const std::string& variant, const PasskeyOptions& o, const Tokenizer& tokenizer) {
    if (variant != "paper" && variant != "landmark")
        throw Error(kExitUsage, "passkey variant '" + variant + "', expected paper or landmark");
    Suite s = variant == "paper" ? make_paper(o, tokenizer) : make_landmark(o, tokenizer);
    s.name = "passkey", s.variant = variant, s.file = variant == "paper" ? "passkey" : "passkey-landmark";
    if (o.position != KeyPosition::equidistant) s.file += std::string("-") + name_of(o.position);
    return s;
}

}  // namespace bam
