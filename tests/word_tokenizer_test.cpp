#include "word_tokenizer.h"

#include <gtest/gtest.h>

#include <functional>

#include "check.h"
#include "random.h"
#include "test_support.h"

namespace bam {
namespace {

// Ids: <end> 0, <unk> 1, <join> 2, then these from 3.
const std::vector<std::string> kWords = {" ",   "\n", "0",        "1",   "2",
                                         "3",   "4",  "5",        "6",   "7",
                                         "8",   "9",  ".",        "?",   "-",
                                         "<",   ">",  "The",      "the", "pass",
                                         "key", "is", "Remember", "it",  "\xc3\xa9t\xc3\xa9"};
using Ids = std::vector<int>;

std::unique_ptr<Tokenizer> tokenizer() {
    return make_word_tokenizer(kWords, "here");
}

std::string error_of(const std::function<void()>& f, ExitCode code) {
    try {
        f();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, code);
        return e.what();
    }
    return "no error";
}

TEST(WordTokenizer, WritesTheIdsWorkedOutByHand) {
    const auto t = tokenizer();
    EXPECT_EQ(t->encode("The pass key is 54321."), (Ids{20, 22, 23, 24, 3, 10, 9, 8, 7, 6, 15}));
    EXPECT_EQ(t->encode(" 54321"), (Ids{3, 10, 9, 8, 7, 6}));
    EXPECT_EQ(t->encode("54321"), (Ids{10, 9, 8, 7, 6}));
    EXPECT_EQ(t->encode("Remember it. 54321 is the key."), (Ids{25, 26, 15, 3, 10, 9, 8, 7, 6, 24, 21, 23, 15}));
    EXPECT_EQ(t->encode("pass-key"), (Ids{22, 17, 2, 23}));
    EXPECT_EQ(t->encode("it\nit\n it  it "), (Ids{26, 4, 26, 4, 3, 26, 3, 26, 3}));
    EXPECT_EQ(t->encode("the \xc3\xa9t\xc3\xa9 is"), (Ids{21, 27, 24}));
    EXPECT_EQ(t->encode(""), Ids{});
    EXPECT_EQ(t->vocab_size(), 28);
    EXPECT_EQ(t->separator_id(), 0);
    EXPECT_TRUE(t->separator_at_end());
}

TEST(WordTokenizer, UnknownWordsAndCharactersAreOneTokenEach) {
    const auto t = tokenizer();
    EXPECT_EQ(t->encode("the zebra is"), (Ids{21, 1, 24}));
    EXPECT_EQ(t->decode({21, 1, 24}), "the <unk> is");
    EXPECT_EQ(t->encode("is!"), (Ids{24, 2, 1}));
    EXPECT_EQ(t->encode("keys"), (Ids{1}));              // not "key" and a rest
    EXPECT_EQ(t->encode("<end>"), (Ids{18, 2, 1, 19}));  // never the separator
}

TEST(WordTokenizer, DecodeSkipsSeparatorsAndMarksForeignIds) {
    const auto t = tokenizer();
    EXPECT_EQ(t->decode({20, 22, 0, 23, -1, 999}), "The pass key\xef\xbf\xbd\xef\xbf\xbd");
    EXPECT_EQ(t->decode({}), "");
    EXPECT_EQ(t->decode({2, 2, 20}), "The");
}

TEST(WordTokenizer, SentencesOneByOneEqualTheJoinedText) {
    const auto t = tokenizer();
    Ids ids;
    for (const char* s : {"The pass key is 12345.", "Remember it.", "The pass key is", " 12345"})
        for (int id : t->encode(s)) ids.push_back(id);
    EXPECT_EQ(ids, t->encode("The pass key is 12345. Remember it. The pass key is 12345"));
}

// Any string of vocabulary pieces and spaces, in any order, comes back.
TEST(WordTokenizer, RoundTripsEveryTextInItsVocabulary) {
    const auto t = tokenizer();
    for (uint64_t n = 0; n < 3000; n++) {
        std::string text;
        const auto letter = [](char c) { return isalpha(static_cast<unsigned char>(c)) || (c & 0x80); };
        for (uint64_t i = 0; i < 1 + n % 12; i++) {
            const std::string& piece = kWords[random_below(7, n, i, kWords.size())];
            if (!text.empty() && letter(text.back()) && letter(piece[0])) text += ' ';
            text += piece;
        }
        ASSERT_EQ(t->decode(t->encode(text)), text) << n;
    }
}

TEST(WordTokenizer, CutsWhereEncodingMayStartAnew) {
    const auto t = tokenizer();
    const std::string text = "The pass\nkey  is\n\n the key";
    EXPECT_EQ(t->cut(text), 18u);
    EXPECT_EQ(t->cut("The pass key"), 0u);
    Ids ids = t->encode(text.substr(0, 18));
    for (int id : t->encode(text.substr(18))) ids.push_back(id);
    EXPECT_EQ(ids, t->encode(text));
}

TEST(WordTokenizer, IsReadBackFromItsFile) {
    const auto t = tokenizer();
    const test::TempDir dir;
    test::write_file(dir.file("tokenizer.json"), t->serialize());
    const auto u = load_tokenizer(dir.path());
    EXPECT_EQ(u->kind(), "word");
    EXPECT_EQ(u->vocab_size(), t->vocab_size());
    EXPECT_EQ(u->fingerprint(), t->fingerprint());
    EXPECT_EQ(u->encode("The pass key is 12345.\n"), t->encode("The pass key is 12345.\n"));
    auto others = kWords;
    std::swap(others[18], others[19]);
    EXPECT_NE(make_word_tokenizer(others, "here")->fingerprint(), t->fingerprint());
}

TEST(WordTokenizer, RefusesBadFilesByName) {
    const test::TempDir dir;
    const std::string path = dir.file("bad.json");
    const auto load = [&](const std::string& words) {
        test::write_file(path, R"({"format":"bam-tokenizer","version":1,"kind":"word")" + words + "}");
        const std::string e = error_of([&] { load_tokenizer(path); }, kExitData);
        EXPECT_EQ(e.rfind(path + ": words", 0), 0u) << e;
        return e;
    };
    const auto has = [](const std::string& e, const std::string& part) { return e.find(part) != std::string::npos; };
    EXPECT_TRUE(has(load(""), "expected a list"));
    EXPECT_TRUE(has(load(R"(,"words":{})"), "expected a list"));
    EXPECT_TRUE(has(load(R"(,"words":["<end>"])"), "3 or more"));
    EXPECT_TRUE(has(load(R"(,"words":["<end>","<unk>"," "])"), "expected \"<join>\""));
    EXPECT_TRUE(has(load(R"(,"words":["<end>","<unk>","<join>"," ","a","a"])"), "words[5]"));
    EXPECT_TRUE(has(load(R"(,"words":["<end>","<unk>","<join>"," ","a b"])"), "\"a b\""));
    EXPECT_TRUE(has(load(R"(,"words":["<end>","<unk>","<join>"," ",""])"), "words[4]"));
    EXPECT_TRUE(has(load(R"(,"words":["<end>","<unk>","<join>"," ",7])"), "words[4] is 7"));
    EXPECT_TRUE(has(load(R"(,"words":["<end>","<unk>","<join>","a"])"), "no \" \""));
}

}  // namespace
}  // namespace bam
