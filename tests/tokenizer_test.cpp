// The byte tokenizer is the identity on bytes, and tokenizer files are read back or refused by name.
#include "tokenizer.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "check.h"

namespace bam {
namespace {

class TokenizerFile : public ::testing::Test {
protected:
    void SetUp() override {
        dir = std::filesystem::path(::testing::TempDir()) / ("bam_tokenizer_" + std::to_string(::getpid()));
        std::filesystem::create_directories(dir);
    }
    void TearDown() override { std::filesystem::remove_all(dir); }
    std::string write(const std::string& name, const std::string& content) {
        std::ofstream(dir / name, std::ios::binary) << content;
        return (dir / name).string();
    }
    std::string refusal(const std::string& path) {
        try {
            load_tokenizer(path);
        } catch (const Error& e) {
            EXPECT_EQ(e.code, kExitData);
            EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
            return e.what();
        }
        return "accepted";
    }
    std::filesystem::path dir;
};

TEST(ByteTokenizer, EveryByteIsItsOwnId) {
    const auto t = make_byte_tokenizer();
    std::string all;
    for (int i = 0; i < 256; i++) all += char(i);
    const std::vector<int> ids = t->encode(all);
    ASSERT_EQ(ids.size(), 256u);
    for (int i = 0; i < 256; i++) EXPECT_EQ(ids[i], i);
    EXPECT_EQ(t->decode(ids), all);
    EXPECT_EQ(t->encode("A\xc3\xa9\xff"), (std::vector<int>{65, 195, 169, 255}));
    EXPECT_TRUE(t->encode("").empty());
}

TEST(ByteTokenizer, SeparatorGivesNoTextAndForeignIdsAReplacement) {
    const auto t = make_byte_tokenizer();
    EXPECT_EQ(t->vocab_size(), 257);
    EXPECT_EQ(t->separator_id(), 256);
    EXPECT_TRUE(t->separator_at_end());
    EXPECT_EQ(t->decode({'a', 256, 'b'}), "ab");
    EXPECT_EQ(t->decode({'a', 257, -1}), "a\xef\xbf\xbd\xef\xbf\xbd");
    EXPECT_EQ(t->cut("any place"), 9u);
}

TEST_F(TokenizerFile, IsReadBackByFileDirectoryAndName) {
    const auto t = make_byte_tokenizer();
    const std::string file = write("tokenizer.json", t->serialize());
    for (const std::string& path : {file, dir.string(), std::string("byte")}) {
        const auto u = load_tokenizer(path);
        EXPECT_EQ(u->kind(), "byte");
        EXPECT_EQ(u->fingerprint(), t->fingerprint());
        EXPECT_EQ(u->serialize(), t->serialize());
    }
    // Layout does not count: equal tokenizers have equal fingerprints.
    const auto u = load_tokenizer(write("other.json", R"({"kind":"byte","version":1,"format":"bam-tokenizer"})"));
    EXPECT_EQ(u->fingerprint(), t->fingerprint());
}

TEST_F(TokenizerFile, IsRefusedWithItsNameAndWhatWasExpected) {
    EXPECT_NE(refusal((dir / "absent").string()).find("absent: no such file"), std::string::npos);
    EXPECT_NE(refusal(dir.string()).find("tokenizer.json: no such file"), std::string::npos);
    EXPECT_NE(refusal(write("a.json", "")).find("a.json: line 1, column 1: not JSON"), std::string::npos);
    EXPECT_NE(refusal(write("b.json", "[1]")).find("b.json: format is array, expected"), std::string::npos);
    EXPECT_NE(refusal(write("c.json", R"({"model":{"type":"BPE"}})")).find("format is missing"), std::string::npos);
    EXPECT_NE(refusal(write("d.json", R"({"format":3})")).find("format is 3"), std::string::npos);
    EXPECT_NE(refusal(write("e.json", R"({"format":"bam-tokenizer","version":2,"kind":"byte"})")).find("version is 2"),
              std::string::npos);
    EXPECT_NE(
        refusal(write("f.json", R"({"format":"bam-tokenizer","version":1,"kind":"bite"})")).find("kind is \"bite\""),
        std::string::npos);
    EXPECT_NE(refusal(write("g.json", R"({"format":"bam-tokenizer","version":1})")).find("kind is missing"),
              std::string::npos);
}

}  // namespace
}  // namespace bam
