#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 says it of std::regex under sanitizers
#include "eval/niah.h"

#include <gtest/gtest.h>

#include <chrono>
#include <regex>
#include <set>

#include "check.h"
#include "eval/words.h"
#include "stand_in.h"
#include "test_support.h"

namespace bam {
namespace {

using test::StandIn;

const std::string kNoise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

const NiahTask& task_named(const std::string& name) {
    for (const NiahTask& t : niah_tasks())
        if (t.name == name) return t;
    throw std::runtime_error(name);
}

std::vector<std::string> essay() {
    std::string text;
    for (int i = 0; i < 300; ++i) text += "Sentence number " + std::to_string(i) + " says \"so\".  It\tis short! ";
    return split_words(text);
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
    return n;
}

// The text of RULER's template for one needle, filled in by hand; only the drawn words are taken from the prompt.
TEST(Niah, SingleNoisePromptIsPinned) {
    const NiahPrompt p = niah_prompt(task_named("single_1"), {}, 3, 42, 0);
    std::smatch m;
    ASSERT_TRUE(std::regex_search(p.text, m, std::regex("numbers for ([a-z]+-[a-z]+) is: (\\d{7})\\.")));
    const std::string key = m[1], value = m[2], needle = "One of the special magic numbers for " + key + " is: " + value + ".";
    EXPECT_EQ(p.answers, std::vector<std::string>{value});
    const std::string head = "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
                             "about the number afterwards.\n";
    const std::string tail = "\nWhat is the special magic number for " + key + " mentioned in the provided text? The special magic "
                             "number for " + key + " mentioned in the provided text is";
    std::set<std::string> possible;
    for (int place = 0; place < 3; ++place) {
        std::string lines;
        for (int i = 0; i < 3; ++i) lines += (i ? "\n" : "") + std::string(i == place ? needle + "\n" : "") + kNoise;
        possible.insert(head + lines + tail);
    }
    EXPECT_TRUE(possible.count(p.text)) << p.text;
    EXPECT_EQ(niah_prompt(task_named("single_1"), {}, 3, 42, 0).text, p.text);
    EXPECT_NE(niah_prompt(task_named("single_1"), {}, 3, 42, 1).text, p.text);
    EXPECT_NE(niah_prompt(task_named("single_1"), {}, 3, 43, 0).text, p.text);
}

TEST(Niah, SeveralNeedlesPromptIsPinned) {
    const NiahPrompt p = niah_prompt(task_named("multiquery"), essay(), 200, 42, 3);
    EXPECT_TRUE(p.text.starts_with("Some special magic numbers are hidden within the following text. Make sure to memorize it. I will "
                                   "quiz you about the numbers afterwards.\nSentence number 0 says \"so\". It is short! "));
    std::smatch m;
    ASSERT_TRUE(std::regex_search(p.text, m, std::regex("\nWhat are all the special magic numbers for ([^,]+), ([^,]+), ([^,]+), and "
                                                        "(\\S+) mentioned in the provided text\\? The special magic numbers for "
                                                        "(.*) mentioned in the provided text are$")));
    EXPECT_EQ(m[5].str(), m[1].str() + ", " + m[2].str() + ", " + m[3].str() + ", and " + m[4].str());
    ASSERT_EQ(p.answers.size(), 4u);
    for (int i = 0; i < 4; ++i) {
        const std::string needle = "One of the special magic numbers for " + m[i + 1].str() + " is: " + p.answers[size_t(i)] + ".";
        EXPECT_EQ(count(p.text, needle), 1u) << needle;
        const size_t at = p.text.find(needle);  // behind a sentence, and the essay goes on behind it
        EXPECT_EQ(p.text[at - 1], ' ');
        EXPECT_EQ(p.text[at + needle.size()], ' ');
    }
    const NiahPrompt values = niah_prompt(task_named("multivalue"), essay(), 200, 42, 0);
    ASSERT_EQ(values.answers.size(), 4u);
    EXPECT_EQ(std::set<std::string>(values.answers.begin(), values.answers.end()).size(), 4u);
    EXPECT_EQ(count(values.text, "One of the special magic numbers for "), 4u);
    EXPECT_TRUE(values.text.ends_with(" mentioned in the provided text are"));
}

TEST(Niah, TasksDifferAsInRuler) {
    const std::regex uuid("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}");
    const NiahPrompt keys = niah_prompt(task_named("multikey_3"), {}, 7, 1, 0);
    EXPECT_TRUE(std::regex_match(keys.answers[0], uuid));
    EXPECT_EQ(count(keys.text, "One of the special magic uuids for "), 8u);
    EXPECT_EQ(count(keys.text, kNoise), 0u);
    EXPECT_TRUE(keys.text.starts_with("A special magic uuid is hidden"));
    EXPECT_TRUE(std::regex_match(niah_prompt(task_named("single_3"), essay(), 50, 1, 0).answers[0], uuid));
    const NiahPrompt distracted = niah_prompt(task_named("multikey_1"), essay(), 100, 1, 0);
    EXPECT_EQ(count(distracted.text, "One of the special magic numbers for "), 4u);
    EXPECT_EQ(distracted.answers.size(), 1u);
    EXPECT_EQ(count(niah_prompt(task_named("multikey_2"), {}, 9, 1, 0).text, "One of the special magic numbers for "), 10u);
    EXPECT_EQ(niah_tasks().size(), 8u);
}

TEST(Niah, TextIsSplitAtSentences) {
    EXPECT_EQ(split_words(" a\tb\n\n c "), (std::vector<std::string>{"a", "b", "c"}));
    EXPECT_EQ(split_sentences("One. Two 3.5 more! \"Is it?\" (Yes.) no end"),
              (std::vector<std::string>{"One.", "Two 3.5 more!", "\"Is it?\"", "(Yes.)", "no end"}));
    EXPECT_EQ(split_sentences("\" a."), (std::vector<std::string>{"\" a."}));
}

TEST(Niah, ScoreIsTheShareOfReferencesFound) {
    EXPECT_EQ(niah_score("they are 123 and 45.", {"123", "45", "6", "7"}), 0.5);
    EXPECT_EQ(niah_score("AB-CD", {"ab-cd"}), 1.0);
    EXPECT_EQ(niah_score("", {"1"}), 0.0);
}

TEST(Niah, WordsAreDistinct) {
    for (const auto* list : {&adjectives(), &nouns()}) {
        EXPECT_GT(list->size(), 150u);
        EXPECT_EQ(std::set<std::string>(list->begin(), list->end()).size(), list->size());
        for (const std::string& w : *list) EXPECT_TRUE(std::regex_match(w, std::regex("[a-z]+"))) << w;
    }
}

// Reads the question, finds the needles of its keys and says their values; `most` limits how many.
StandIn finder(size_t most) {
    auto answer = std::make_shared<std::string>();
    auto prompt = std::make_shared<size_t>(0);
    return StandIn(257, [=](const std::vector<int>& ids, std::vector<float>& logits) {
        const std::string text(ids.begin(), ids.end());
        if (text.ends_with("provided text is") || text.ends_with("provided text are")) {
            *answer = "", *prompt = text.size();
            const std::string asked = text.substr(text.rfind("for "));
            const std::regex needle("One of the special magic [a-z]+ for (\\S+) is: (\\S+)\\.");
            size_t found = 0;
            for (std::sregex_iterator m(text.begin(), text.end(), needle), end; m != end; ++m)
                if (asked.find((*m)[1].str() + " ") != std::string::npos || asked.find((*m)[1].str() + ",") != std::string::npos)
                    if (found++ < most) *answer += " " + (*m)[2].str();
        }
        const size_t at = ids.size() - *prompt;
        logits[at < answer->size() ? size_t((*answer)[at]) : 256] = 9;
    });
}

Json results_of(const Suite& s, Reader& reader) {
    const test::Outcome r = test::run(s, reader);
    for (const Json& line : r.lines)
        EXPECT_LE(line["reached_tokens"].get<int64_t>() + kNiahAnswerTokens, line["length"].get<int64_t>());
    return r.results;
}

TEST(Niah, OracleScoresAllAndUniformNothing) {
    const test::TempDir dir;
    std::string text;
    for (int i = 0; i < 400; ++i) text += "This is sentence " + std::to_string(i) + ". ";
    test::write_file(dir.file("essay.txt"), text);
    const auto tokenizer = make_byte_tokenizer();
    NiahOptions o;
    o.lengths = {1200, 2500};
    o.samples = 3;
    o.essay_file = dir.file("essay.txt");
    const Suite s = make_niah("", o, *tokenizer, {256, true});
    EXPECT_EQ(s.items.size(), 8u * 2 * 3);
    StandIn oracle = finder(4);
    const Json results = results_of(s, oracle);
    EXPECT_EQ(results.size(), 16u);
    for (const Json& r : results) {
        EXPECT_EQ(r["accuracy"], 1.0) << r;
        EXPECT_GT(r["reached_tokens"].get<int>(), r["length"].get<int>() - kNiahAnswerTokens - 120) << r;
    }
    StandIn half = finder(2);
    for (const Json& r : results_of(make_niah("multivalue,multiquery", o, *tokenizer, {256, true}), half)) EXPECT_EQ(r["accuracy"], 0.5);
    StandIn uniform = test::uniform(257);
    for (const Json& r : results_of(make_niah("single_1", o, *tokenizer, {256, true}), uniform)) EXPECT_EQ(r["accuracy"], 0.0);
    o.essay_file = "";
    EXPECT_EQ(make_niah("", o, *tokenizer, {256, true}).variant, "single_1,multikey_2,multikey_3");
}

TEST(Niah, WrongUseIsAnErrorAtOnce) {
    const auto begun = std::chrono::steady_clock::now();
    const auto tokenizer = make_byte_tokenizer();
    NiahOptions o;
    o.lengths = {200};
    EXPECT_THROW(make_niah("single_1", o, *tokenizer, {}), Error);
    o.lengths = {100000, 200};
    try {
        make_niah("multikey_3", o, *tokenizer, {});
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitUsage);
        EXPECT_NE(std::string(e.what()).find("niah multikey_3 at length 200: the prompt and 128 tokens of answer take "), std::string::npos)
            << e.what();
    }
    o.lengths = {2000};
    EXPECT_THROW(make_niah("single_9", o, *tokenizer, {}), Error);
    EXPECT_THROW(make_niah("single_2", o, *tokenizer, {}), Error);
    o.essay_file = "/nonexistent/essay.txt";
    EXPECT_THROW(make_niah("single_2", o, *tokenizer, {}), Error);
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(), 1.0);
}

// A tokenizer whose vocabulary lacks the needle's words.
TEST(Niah, NeedlesMustBeSpellable) {
    struct Lossy : Tokenizer {
        std::unique_ptr<Tokenizer> bytes = make_byte_tokenizer();
        std::string kind() const override { return "lossy"; }
        int vocab_size() const override { return 257; }
        std::vector<int> encode(std::string_view text) const override {
            std::vector<int> ids = bytes->encode(text);
            for (int& id : ids)
                if (id == '-') id = '?';
            return ids;
        }
        std::string decode(const std::vector<int>& ids) const override { return bytes->decode(ids); }
        int separator_id() const override { return 256; }
        bool separator_at_end() const override { return true; }
        std::string serialize() const override { return ""; }
    } lossy;
    NiahOptions o;
    o.lengths = {2000};
    try {
        make_niah("single_1", o, lossy, {});
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitData);
    }
}

}  // namespace
}  // namespace bam
