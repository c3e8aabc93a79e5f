#include "corpus.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "check.h"
#include "dataset.h"
#include "prose.h"
#include "random.h"

namespace bam {

namespace {

// The passkey task's sentences (DESIGN §8), and the grass cut into its own.
constexpr const char* kIntro =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the "
    "important information there.";
const std::vector<std::string> kGrass = {"The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
                                         "There and back again."};
constexpr const char* kKey = "The {pass} is {key}. Remember it. {key} is the {pass}.";
constexpr const char* kAsk = "What is the {pass}? The {pass} is {key}.";

// The same task in other words. No sentence begins with a digit, which takes a space token more inside a text than
// before it.
const std::vector<std::string> kIntros = {kIntro, "Read this text with care. I will ask for the {pass} at the end.",
                                          "Somewhere in this story there is a {pass}. Keep it in mind.",
                                          "This text hides the {pass}.", ""};
const std::vector<std::string> kStatements = {kKey,
                                              "The {pass} is {key}.",
                                              "Remember that the {pass} is {key}.",
                                              "Do not forget: {key} is the {pass}.",
                                              "Please keep in mind that the {pass} is {key}.",
                                              "The {pass} is {key}. Remember it."};
const std::vector<std::string> kAsks = {kAsk, "Which number is the {pass}? The {pass} is {key}.",
                                        "Tell me the {pass}. The {pass} is {key}."};

// Facts about people and things; `about` is the slot that tells two facts of a kind apart.
struct Fact {
    std::string about, statement, ask;
};
const std::vector<Fact> kFacts = {
    {"name", "{name} lives in {city}.", "Where does {name} live? {name} lives in {city}."},
    {"name", "{name} works as a {job}.", "What is the job of {name}? {name} works as a {job}."},
    {"name", "The favorite color of {name} is {color}.",
     "What is the favorite color of {name}? The favorite color of {name} is {color}."},
    {"name", "{name} owns a {pet}.", "Which animal does {name} own? {name} owns a {pet}."},
    {"name", "{name} likes to eat {food}.", "What does {name} like to eat? {name} likes to eat {food}."},
    {"name", "{name} was born in 19{two}.", "When was {name} born? {name} was born in 19{two}."},
};
const std::vector<Fact> kCodes = {
    {"thing", "The code of the {color} {thing} is {key}.",
     "What is the code of the {color} {thing}? The code of the {color} {thing} is {key}."},
    {"name", "The phone number of {name} is {key}.",
     "What is the phone number of {name}? The phone number of {name} is {key}."},
};

// A document before it is put together: the statements go anywhere among the filler.
struct Plan {
    std::string intro;
    std::vector<std::string> statements, filler, questions;
    bool mix_grass = false;  // filler of the passkey task among the prose
};

class Writer {
public:
    Writer(const Tokenizer& tokenizer, Draw& draw, bool held_out)
        : tokenizer_(tokenizer), draw_(draw), held_out_(held_out) {}

    // A document of at most `length` tokens with its separator. What it leaves of `room` tokens is nothing or enough
    // for another document.
    std::string document(int length, int room) {
        for (int tries = 0; tries < 8; tries++) {
            Plan plan;
            const int kind = draw_.below(100);
            if (kind < 35) {
                if (!plain_passkey(plan, length, room)) continue;
                return assemble(plan);
            }
            if (kind < 60)
                passkey_among_prose(plan);
            else if (kind < 75)
                passkey_in_other_words(plan);
            else if (kind < 85)
                facts(plan, kCodes, 3);
            else if (kind < 95)
                facts(plan, kFacts, 5);
            if (!add_filler(plan, length)) continue;
            return assemble(plan);
        }
        Plan plan;
        add_filler(plan, length);
        return assemble(plan);
    }

    int count(const std::string& text) const { return int(tokenizer_.encode(text).size()); }

private:
    // The task exactly as it is evaluated: whole fillers only.
    bool plain_passkey(Plan& plan, int length, int room) {
        const Bindings b = {{"pass", "pass key"}, {"key", key()}};
        plan.intro = kIntro;
        plan.statements = {fill_in(kKey, b, draw_)};
        plan.questions = {fill_in(kAsk, b, draw_)};
        std::string grass;
        for (const std::string& s : kGrass) grass += (grass.empty() ? "" : " ") + s;
        const int fixed = count_all(plan) + 1, filler = count(grass);
        int n = (length - fixed) / filler;
        const auto left = [&] { return room - fixed - n * filler; };
        if (left() > 0 && left() <= kShortestSentence) n--;
        if (length < fixed || n < 0) return false;
        plan.filler.assign(size_t(n), grass);
        return true;
    }

    void passkey_among_prose(Plan& plan) {
        const Bindings b = {{"pass", "pass key"}, {"key", key()}};
        plan.intro = draw_.one_in(4) ? "" : kIntro;
        plan.statements = {fill_in(kKey, b, draw_)};
        plan.questions = {fill_in(kAsk, b, draw_)};
        plan.mix_grass = draw_.one_in(2);
    }

    void passkey_in_other_words(Plan& plan) {
        const std::string pass = pick(words_of("pass"));
        const Bindings b = {{"pass", pass}, {"key", key()}};
        plan.intro = fill_in(pick(kIntros), b, draw_);
        plan.statements = {fill_in(pick(kStatements), b, draw_)};
        plan.questions = {fill_in(pick(kAsks), b, draw_)};
        const std::string other = pick(words_of("pass"));  // a distractor
        if (other != pass) plan.statements.push_back(fill_in(kStatements[1], {{"pass", other}, {"key", key()}}, draw_));
        plan.mix_grass = draw_.one_in(4);
    }

    // Up to `most` facts, some of one kind about different people or things, and questions about one or two of them.
    void facts(Plan& plan, const std::vector<Fact>& kinds, int most) {
        const int n = draw_.between(1, most);
        std::set<std::string> seen;
        for (int i = 0; i < n; i++) {
            const Fact& f = pick(kinds);
            Bindings b = {{"key", key()}, {"two", two_digits()}};
            for (const char* slot : {"name", "city", "job", "color", "pet", "food", "thing"})
                b[slot] = pick(words_of(slot));
            if (!seen.insert(f.statement + b[f.about]).second) continue;
            plan.statements.push_back(fill_in(f.statement, b, draw_));
            plan.questions.push_back(fill_in(f.ask, b, draw_));
        }
        for (size_t i = plan.questions.size(); i > 1; i--)
            std::swap(plan.questions[i - 1], plan.questions[size_t(draw_.below(int64_t(i)))]);
        plan.questions.resize(std::min(plan.questions.size(), size_t(draw_.between(1, 2))));
    }

    // Fills up to `length` tokens with the separator; false if the fixed parts do not leave room for whole sentences.
    bool add_filler(Plan& plan, int length) {
        int rest = length - count_all(plan) - 1;
        if (rest < 0 || (rest > 0 && rest < kShortestSentence)) return false;
        if (plan.mix_grass) {
            size_t next = size_t(draw_.below(int64_t(kGrass.size())));
            for (int n; n = count(kGrass[next]), rest - n >= kShortestSentence || rest == n;
                 next = (next + 1) % kGrass.size()) {
                plan.filler.push_back(kGrass[next]);
                rest -= n;
                if (draw_.one_in(12)) break;
            }
        }
        for (std::string& s : prose(rest, draw_)) plan.filler.push_back(std::move(s));
        return true;
    }

    // Intro, filler with each statement at a random place, questions.
    std::string assemble(const Plan& plan) {
        std::vector<std::string> body = plan.filler;
        std::vector<std::pair<int, const std::string*>> places;
        for (const std::string& s : plan.statements) places.push_back({draw_.between(0, int(body.size())), &s});
        std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
        for (const auto& [at, s] : places) body.insert(body.begin() + at, *s);
        body.insert(body.end(), plan.questions.begin(), plan.questions.end());
        std::string text = plan.intro;
        for (const std::string& s : body) text += (text.empty() ? "" : " ") + s;
        return text;
    }

    int count_all(const Plan& plan) const {
        int n = count(plan.intro);
        for (const auto* part : {&plan.statements, &plan.filler, &plan.questions})
            for (const std::string& s : *part) n += count(s);
        return n;
    }

    std::string key() {
        for (;;) {
            const int k = draw_.between(10000, 99999);
            if (is_held_out_key(k) == held_out_) return std::to_string(k);
        }
    }
    std::string two_digits() { return std::to_string(draw_.below(10)) + std::to_string(draw_.below(10)); }

    template <class T>
    const T& pick(const std::vector<T>& list) {
        return list[size_t(draw_.below(int64_t(list.size())))];
    }

    const Tokenizer& tokenizer_;
    Draw& draw_;
    bool held_out_;
};

}  // namespace

bool is_held_out_key(int key) {
    return mix64(uint64_t(key) + 0x7a55be75) % 10 == 0;
}

std::unique_ptr<Tokenizer> make_corpus_tokenizer() {
    std::vector<std::string> texts = kGrass;
    texts.insert(texts.end(), {kIntro, kKey, kAsk});
    for (const auto* list : {&kIntros, &kStatements, &kAsks}) texts.insert(texts.end(), list->begin(), list->end());
    for (const auto* list : {&kFacts, &kCodes})
        for (const Fact& f : *list) texts.insert(texts.end(), {f.statement, f.ask});
    return make_prose_tokenizer(texts);
}

std::vector<std::string> corpus_row(const Tokenizer& tokenizer, uint64_t seed, bool held_out, int64_t row,
                                    int seq_len) {
    Draw draw(seed, mix64(stream_of(held_out ? "corpus/val" : "corpus/train") + uint64_t(row)));
    Writer writer(tokenizer, draw, held_out);
    std::vector<std::string> documents;
    for (int room = seq_len; room > 0;) {
        int length = room;
        if (draw.one_in(2)) length = draw.between(kShortestSentence + 1, room);
        if (room - length <= kShortestSentence) length = room;
        documents.push_back(writer.document(length, room));
        room -= writer.count(documents.back()) + 1;
    }
    return documents;
}

namespace {

// Rows of one split, numbered from 0.
void write_rows(DatasetWriter& out, const Tokenizer& tokenizer, const CorpusOptions& o, Split split, int64_t tokens) {
    const int64_t rows = (tokens + o.seq_len - 1) / o.seq_len;
    for (int64_t row = 0; row < rows; row++) {
        for (const std::string& text : corpus_row(tokenizer, o.seed, split == Split::val, row, o.seq_len)) {
            out.add(split, tokenizer.encode(text), int64_t(text.size()));
            out.end_document(split);
        }
    }
}

}  // namespace

void make_corpus(const CorpusOptions& o) {
    if (o.seq_len < kShortestRow)
        throw Error(kExitUsage, "--seq-len is " + std::to_string(o.seq_len) + ", expected " +
                                    std::to_string(kShortestRow) +
                                    " or more: a pass key and its question need that many tokens");
    if (o.tokens < 1) throw Error(kExitUsage, "--tokens is " + std::to_string(o.tokens) + ", expected 1 or more");
    if (o.val_tokens < 0)
        throw Error(kExitUsage, "--val-tokens is " + std::to_string(o.val_tokens) + ", expected 0 or more");
    const auto tokenizer = make_corpus_tokenizer();
    DatasetWriter out(o.out, *tokenizer, o.force);
    write_rows(out, *tokenizer, o, Split::train, o.tokens);
    write_rows(out, *tokenizer, o, Split::val, o.val_tokens);
    const DatasetInfo d = out.finish("bam make-corpus --tokens " + std::to_string(o.tokens) + " --val-tokens " +
                                     std::to_string(o.val_tokens) + " --seq-len " + std::to_string(o.seq_len) +
                                     " --seed " + std::to_string(o.seed));
    std::printf(
        "%s: %lld tokens in %lld documents for training, %lld in %lld for validation; at most %d tokens a document, "
        "vocabulary %d\n\nthe first row:\n",
        o.out.c_str(), (long long)d.train.tokens, (long long)d.train.documents, (long long)d.val.tokens,
        (long long)d.val.documents, o.seq_len, d.vocab_size);
    for (const std::string& text : corpus_row(*tokenizer, o.seed, false, 0, o.seq_len))
        std::printf("  %s\n", text.c_str());
}

}  // namespace bam
