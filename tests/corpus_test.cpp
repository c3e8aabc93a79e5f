// Documents to measure, exact passkey sentences, held-out keys, the same bytes again, and a data set that commands
// read.
#include "corpus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "check.h"
#include "dataset.h"
#include "loader.h"
#include "prose.h"
#include "test_support.h"

namespace bam {
namespace {

// DESIGN §8, word for word.
const std::string kIntro =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the "
    "important information there.";
const std::string kFiller = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
std::string key_sentence(const std::string& k) {
    return "The pass key is " + k + ". Remember it. " + k + " is the pass key.";
}
const std::string kQuestion = "What is the pass key? The pass key is";

std::vector<std::string> numbers_in(const std::string& text) {
    std::vector<std::string> numbers = {""};
    for (char c : text) {
        if (isdigit(c)) {
            numbers.back() += c;
        } else if (!numbers.back().empty()) {
            numbers.emplace_back();
        }
    }
    if (numbers.back().empty()) numbers.pop_back();
    return numbers;
}

TEST(CorpusTokenizer, KnowsThePasskeyTaskAndEveryDigit) {
    const auto t = make_corpus_tokenizer();
    EXPECT_EQ(t->vocab_size(), 325);  // configs/demo.json says so
    // Lengths counted by hand: a word, a digit, a sign each; the space before digits.
    const std::vector<std::pair<std::string, size_t>> lengths = {
        {kIntro, 29}, {kFiller, 24}, {key_sentence("54321"), 25}, {kQuestion, 10}, {" 54321", 6}};
    for (const auto& [text, n] : lengths) {
        const std::vector<int> ids = t->encode(text);
        EXPECT_EQ(ids.size(), n) << text;
        EXPECT_EQ(std::count(ids.begin(), ids.end(), 1), 0) << text;  // <unk>
        EXPECT_EQ(t->decode(ids), text);
    }
    const std::vector<int> answer = t->encode(" 54321");
    for (size_t i = 1; i < 6; i++) EXPECT_EQ(t->decode({answer[i]}), std::string(1, "54321"[i - 1]));
}

// The prompt as the evaluation builds it, piece by piece, is found token for token in training documents.
TEST(Corpus, HoldsThePromptOfTheEvaluation) {
    const auto t = make_corpus_tokenizer();
    std::set<std::string> places;
    for (int64_t row = 0; row < 300; row++) {
        for (const std::string& text : corpus_row(*t, 5, false, row, 128)) {
            if (text.rfind(kIntro, 0) != 0 || text.find(kFiller) == std::string::npos) continue;
            const std::string k = numbers_in(text).at(0);
            for (int n = 0; n <= 2; n++) {
                for (int before = 0; before <= n; before++) {
                    std::vector<int> prompt;
                    const auto add = [&](const std::string& s) {
                        for (int id : t->encode(s)) prompt.push_back(id);
                    };
                    add(kIntro);
                    for (int i = 0; i < before; i++) add(kFiller);
                    add(key_sentence(k));
                    for (int i = before; i < n; i++) add(kFiller);
                    add(kQuestion);
                    add(" " + k);
                    add(".");
                    if (prompt == t->encode(text)) places.insert(std::to_string(before) + "/" + std::to_string(n));
                }
            }
        }
    }
    EXPECT_EQ(places, (std::set<std::string>{"0/1", "1/1", "0/2", "1/2", "2/2"}));
}

TEST(Corpus, RowsAreWholeDocumentsOfTheirVocabulary) {
    const auto t = make_corpus_tokenizer();
    for (int T : {32, 33, 34, 35, 71, 72, 73, 74, 75, 76, 77, 128, 331}) {
        std::set<size_t> lengths;
        for (int64_t row = 0; row < 200; row++) {
            size_t tokens = 0;
            for (const std::string& text : corpus_row(*t, 3, row % 2, row, T)) {
                const std::vector<int> ids = t->encode(text);
                EXPECT_GE(ids.size(), 3u);
                EXPECT_EQ(std::count_if(ids.begin(), ids.end(), [](int id) { return id < 3; }), 0) << text;
                EXPECT_EQ(t->decode(ids), text);
                lengths.insert(ids.size() + 1);
                tokens += ids.size() + 1;
            }
            ASSERT_EQ(tokens, size_t(T)) << "row " << row;
        }
        EXPECT_TRUE(lengths.count(size_t(T)) || T == 128) << T;
        EXPECT_GT(lengths.size(), std::min<size_t>(size_t(T) / 2, 60));
    }
}

TEST(Corpus, EveryAnswerStandsInItsDocument) {
    const auto t = make_corpus_tokenizer();
    int asked = 0;
    for (int64_t row = 0; row < 500; row++) {
        for (const std::string& text : corpus_row(*t, 9, false, row, 128)) {
            for (size_t q = text.find('?'); q != std::string::npos; q = text.find('?', q + 1)) {
                const std::string answer = text.substr(q + 2, text.find('.', q) - q - 2);
                const std::string value = answer.substr(answer.rfind(' ') + 1);
                EXPECT_LT(text.find(value), q) << text;
                asked++;
            }
        }
    }
    EXPECT_GT(asked, 400);
}

TEST(Corpus, KeysAreUniformAndHeldOutOnesNeverInTraining) {
    int held_out = 0;
    for (int k = 10000; k <= 99999; k++) held_out += is_held_out_key(k);
    EXPECT_NEAR(held_out, 9000, 4 * 90);  // binomial: sigma 90
    EXPECT_EQ(is_held_out_key(10000), is_held_out_key(10000));

    const auto t = make_corpus_tokenizer();
    std::map<std::pair<size_t, char>, int> digits;
    std::set<std::string> keys;
    for (int64_t row = 0; row < 2000; row++) {
        for (bool validation : {false, true}) {
            for (const std::string& text : corpus_row(*t, 1, validation, row, 128)) {
                std::set<std::string> own;
                for (const std::string& n : numbers_in(text)) {
                    if (n.size() != 5) continue;
                    ASSERT_EQ(is_held_out_key(std::stoi(n)), validation) << text;
                    own.insert(n);
                }
                if (validation) continue;
                for (const std::string& n : own) {
                    keys.insert(n);
                    for (size_t i = 0; i < 5; i++) digits[{i, n[i]}]++;
                }
            }
        }
    }
    ASSERT_GT(keys.size(), 1700u);  // hardly a repetition
    for (size_t i = 0; i < 5; i++) {
        int sum = 0;
        for (char c = '0'; c <= '9'; c++) sum += digits[{i, c}];
        for (char c = i ? '0' : '1'; c <= '9'; c++)
            EXPECT_NEAR((digits[{i, c}]), sum / (i ? 10.0 : 9.0), 5 * std::sqrt(sum / 10.0)) << i << c;
    }
}

TEST(Prose, SentencesHaveTheLengthAskedFor) {
    const auto t = make_prose_tokenizer({});
    Draw draw(1, 2);
    for (int n = kShortestSentence; n <= kLongestSentence; n++) {
        std::set<std::string> seen;
        for (int i = 0; i < 100; i++) {
            const std::string s = prose_sentence(n, draw);
            ASSERT_EQ(t->encode(s).size(), size_t(n)) << s;
            EXPECT_TRUE(isupper(s[0]) && s.back() == '.') << s;
            EXPECT_EQ(s.find('{'), std::string::npos) << s;
            seen.insert(s);
        }
        EXPECT_GT(seen.size(), 50u) << n;
    }
    for (int n = 3; n < 200; n++) {
        int sum = 0;
        for (const std::string& s : prose(n, draw)) sum += int(t->encode(s).size());
        EXPECT_EQ(sum, n);
    }
    EXPECT_TRUE(prose(0, draw).empty());
}

TEST(Corpus, WritesADataSetThatIsReadBack) {
    const test::TempDir dir;
    CorpusOptions o;
    o.out = dir.file("a");
    o.tokens = 64 * 100 - 3;  // rounded up
    o.val_tokens = 64 * 10;
    o.seq_len = 64;
    testing::internal::CaptureStdout();
    make_corpus(o);
    EXPECT_NE(testing::internal::GetCapturedStdout().find("6400 tokens"), std::string::npos);

    const DatasetInfo d = read_dataset(o.out);
    EXPECT_EQ(d.train.tokens, 6400);
    EXPECT_EQ(d.val.tokens, 640);
    EXPECT_EQ(d.source, "bam make-corpus --tokens 6397 --val-tokens 640 --seq-len 64 --seed 1");
    EXPECT_EQ(d.tokenizer_kind, "word");
    const auto t = load_tokenizer(o.out);
    EXPECT_EQ(t->fingerprint(), make_corpus_tokenizer()->fingerprint());
    const TokenStream stream({o.out + "/train_*.bin"});
    ASSERT_EQ(stream.size(), 6400);
    std::vector<int32_t> ids(64);
    for (int64_t row = 0; row < 100; row++) {
        std::vector<int32_t> expected;
        for (const std::string& text : corpus_row(*t, 1, false, row, 64)) {
            for (int id : t->encode(text)) expected.push_back(id);
            expected.push_back(t->separator_id());
        }
        stream.read(row * 64, 64, ids.data());
        ASSERT_EQ(ids, expected) << row;
    }
}

TEST(Corpus, SameOptionsSameBytesAnotherSeedOthers) {
    const test::TempDir dir;
    const auto make = [&](const std::string& name, uint64_t seed) {
        CorpusOptions o;
        o.out = dir.file(name);
        o.tokens = 12800;
        o.val_tokens = 1280;
        o.seed = seed;
        testing::internal::CaptureStdout();
        make_corpus(o);
        testing::internal::GetCapturedStdout();
        std::string all;
        const DatasetInfo d = read_dataset(o.out);
        for (const auto* part : {&d.train, &d.val}) all += test::read_file(o.out + "/" + part->files.at(0).name);
        return all;
    };
    const std::string a = make("a", 1);
    EXPECT_EQ(a, make("b", 1));
    EXPECT_NE(a, make("c", 2));
}

TEST(Corpus, RefusesWhatCannotBe) {
    const test::TempDir dir;
    const auto refusal = [&](int64_t tokens, int64_t val, int T) -> std::string {
        CorpusOptions o;
        o.out = dir.file("x");
        o.tokens = tokens;
        o.val_tokens = val;
        o.seq_len = T;
        try {
            make_corpus(o);
        } catch (const Error& e) {
            EXPECT_EQ(e.code, kExitUsage);
            return e.what();
        }
        return "accepted";
    };
    EXPECT_NE(refusal(1000, 0, 31).find("--seq-len is 31, expected 32"), std::string::npos);
    EXPECT_NE(refusal(0, 0, 64).find("--tokens is 0"), std::string::npos);
    EXPECT_NE(refusal(10, -1, 64).find("--val-tokens is -1"), std::string::npos);
}

}  // namespace
}  // namespace bam
