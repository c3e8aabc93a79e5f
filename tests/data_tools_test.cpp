// data info counts what a hand-made shard holds; data verify finds the planted fault by file and byte.
#include "data_tools.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "check.h"
#include "dataset.h"
#include "test_support.h"

namespace bam {
namespace {

using test::TempDir;
using test::write_shard;

nlohmann::json info(const std::vector<std::string>& patterns, int64_t separator = -1) {
    std::ostringstream out;
    data_info({patterns, true, separator}, out);
    return nlohmann::json::parse(out.str());
}

std::string verify(const std::vector<std::string>& patterns, int64_t vocab_size) {
    std::ostringstream out;
    try {
        data_verify(patterns, vocab_size, out);
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitData);
        return e.what();
    }
    return out.str();
}

void make_dataset(const std::string& dir) {
    const auto t = make_byte_tokenizer();
    DatasetWriter w(dir, *t, true, 10);
    for (const char* text : {"hello", "you", "there"}) {
        w.add(Split::train, t->encode(text), int64_t(strlen(text)));
        w.end_document(Split::train);
    }
    w.add(Split::val, t->encode("z"), 1);
    w.end_document(Split::val);
    w.finish();
}

TEST(DataInfo, CountsTokensIdsAndDocuments) {
    TempDir dir;
    write_shard(dir.file("a.bin"), {1, 9, 2, 2, 9, 40}, 2);
    write_shard(dir.file("b.bin"), {}, 2);
    write_shard(dir.file("c.bin"), {9, 70000, -1}, 4);
    nlohmann::json j = info({dir.file("*.bin")});
    EXPECT_EQ(j["files"][0], (nlohmann::json{{"path", dir.file("a.bin")},
                                             {"format", "uint16"},
                                             {"tokens", 6},
                                             {"max_id", 40},
                                             {"documents", nullptr},
                                             {"bytes", 1036}}));
    EXPECT_EQ(j["files"][1]["max_id"], nullptr);
    EXPECT_EQ(j["files"][2]["format"], "uint32");
    EXPECT_EQ(j["files"][2]["max_id"], 4294967295);
    EXPECT_EQ(j["total"],
              (nlohmann::json{{"tokens", 9}, {"max_id", 4294967295}, {"documents", nullptr}, {"bytes", 3096}}));
    j = info({dir.file("*.bin")}, 9);
    EXPECT_EQ(j["files"][0]["documents"], 2);
    EXPECT_EQ(j["files"][1]["documents"], 0);
    EXPECT_EQ(j["total"]["documents"], 3);
}

TEST(DataInfo, KnowsTheSeparatorOfADataSet) {
    TempDir dir;
    make_dataset(dir.file("set"));
    const nlohmann::json j = info({dir.file("set")});
    ASSERT_EQ(j["files"].size(), 3u);  // 16 training tokens in shards of 10, one for validation
    EXPECT_EQ(j["total"]["documents"], 4);
    EXPECT_EQ(j["total"]["tokens"], 18);
    EXPECT_EQ(j["files"][0]["documents"], 2);
    EXPECT_EQ(info({dir.file("set/val_*.bin")})["total"]["documents"], 1);
}

TEST(DataInfo, PrintsOneLineAFile) {
    TempDir dir;
    write_shard(dir.file("a.bin"), {1, 2, 3});
    std::ostringstream out;
    data_info({{dir.file("a.bin")}, false, -1}, out);
    const auto lines = test::lines_of(out.str());
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_NE(lines[1].find("uint16               3           3            -             1030"), std::string::npos)
        << out.str();
    for (const auto& l : lines) EXPECT_EQ(l.size(), lines[0].size());
}

TEST(DataVerify, FindsTheFirstBadIdByFileAndByte) {
    TempDir dir;
    std::vector<int32_t> many(3000000, 5);  // more than is read at once
    write_shard(dir.file("a.bin"), many);
    many[2500000] = 300;
    write_shard(dir.file("b.bin"), many);
    EXPECT_NE(verify({dir.file("a.bin")}, 6).find("good: 1 shard(s), 3000000 tokens"), std::string::npos);
    EXPECT_NE(verify({dir.file("a.bin")}, 5).find("a.bin: token id 5 at byte 1024"), std::string::npos);
    EXPECT_NE(verify({dir.file("*.bin")}, 300).find("b.bin: token id 300 at byte 5001024"), std::string::npos);
    EXPECT_NE(verify({dir.file("*.bin")}, 301).find("all ids below 301"), std::string::npos);
    EXPECT_NE(verify({dir.file("*.bin")}, 0).find("ids not checked"), std::string::npos);
}

TEST(DataVerify, ChecksADataSetAgainstItsOwnClaims) {
    TempDir dir;
    const std::string set = dir.file("set");
    make_dataset(set);
    EXPECT_NE(verify({set}, 0).find("good: 3 shard(s), 18 tokens"), std::string::npos);
    EXPECT_NE(verify({set}, 256).find("token id 256 at byte 1034"), std::string::npos);  // after "hello"

    write_shard(set + "/train_00001.bin", {1, 2});
    EXPECT_NE(verify({set}, 0).find("train_00001.bin: 2 tokens, expected the 6 of dataset.json"), std::string::npos);
    write_shard(set + "/train_00001.bin", {1, 2, 3, 4, 5, 257});
    EXPECT_NE(verify({set}, 0).find("train_00001.bin: token id 257 at byte 1034"), std::string::npos);
    std::filesystem::remove(set + "/train_00001.bin");
    EXPECT_NE(verify({set}, 0).find("train_00001.bin: cannot open: No such file"), std::string::npos);

    make_dataset(set);
    test::write_file(set + "/tokenizer.json",
                     R"({"format":"bam-tokenizer","version":1,"kind":"word","words":["a","b"]})");
    EXPECT_NE(verify({set}, 0).find("tokenizer"), std::string::npos);
    EXPECT_EQ(verify({set}, 0).find("good"), std::string::npos);
}

}  // namespace
}  // namespace bam
