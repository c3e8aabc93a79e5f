// Shards, rows and documents against a plain vector of the same tokens, and against examples worked by hand.
#include "loader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "check.h"
#include "refusal.h"
#include "test_support.h"

namespace bam {
namespace {

using test::refusal;
using test::TempDir;
using test::write_shard;

std::vector<int32_t> counting(int64_t n, int32_t first = 0) {
    std::vector<int32_t> v(static_cast<size_t>(n));
    std::iota(v.begin(), v.end(), first);
    return v;
}

void expect_refused(const std::vector<std::string>& patterns, const std::vector<std::string>& words) {
    const std::string line = refusal([&] { TokenStream s(patterns); });
    for (const std::string& w : words) EXPECT_NE(line.find(w), std::string::npos) << line << "\n  lacks: " << w;
}

std::string header(int32_t magic, int32_t version, int32_t tokens) {
    std::string h(1024, '\0');
    const int32_t words[3] = {magic, version, tokens};
    std::memcpy(h.data(), words, sizeof words);
    return h;
}

// ---- order
// ------------------------------------------------------------------------------------------------------------

TEST(Permute, IsABijectionForAnySizeSeedAndEpoch) {
    for (int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 97, 255, 256, 257, 1000, 4097}) {
        for (uint64_t seed : {0ull, 1ull, 42ull, ~0ull}) {
            for (uint64_t epoch : {0ull, 1ull, 1000ull}) {
                std::vector<int> seen(static_cast<size_t>(n));
                for (int64_t i = 0; i < n; i++) {
                    const int64_t j = permute(i, n, seed, epoch);
                    ASSERT_TRUE(j >= 0 && j < n) << "n " << n << " i " << i;
                    seen[size_t(j)]++;
                }
                ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), n)
                    << "n " << n << " seed " << seed << " epoch " << epoch;
            }
        }
    }
}

TEST(Permute, IsAPureFunctionWithEpochsAndSeedsThatDiffer) {
    const int64_t n = 1000;
    const auto order = [&](uint64_t seed, uint64_t epoch) {
        std::vector<int64_t> v;
        for (int64_t i = 0; i < n; i++) v.push_back(permute(i, n, seed, epoch));
        return v;
    };
    EXPECT_EQ(order(42, 3), order(42, 3));
    std::set<std::vector<int64_t>> orders;
    for (uint64_t seed = 0; seed < 10; seed++) {
        for (uint64_t epoch = 0; epoch < 10; epoch++) orders.insert(order(seed, epoch));
    }
    EXPECT_EQ(orders.size(), 100u);
    EXPECT_EQ(permute(5, int64_t(1) << 40, 7, 0), permute(5, int64_t(1) << 40, 7, 0));
    EXPECT_LT(permute((int64_t(1) << 40) - 1, int64_t(1) << 40, 7, 0), int64_t(1) << 40);
}

// Values of a Python twin of the function: a changed order would silently change every later run and break resuming.
TEST(Permute, StaysTheSameForEver) {
    std::vector<int64_t> v;
    for (int64_t i = 0; i < 10; i++) v.push_back(permute(i, 10, 42, 0));
    EXPECT_EQ(v, (std::vector<int64_t>{6, 3, 7, 5, 1, 0, 8, 4, 2, 9}));
    EXPECT_EQ(permute(123456789, 1000000000, 42, 3), 508638333);
}

TEST(Permute, SpreadsEveryPlaceOverEveryOther) {
    // chi-square of where place i goes over 4000 epochs, n - 1 = 12 degrees of freedom: above 45 once in 10^5.
    const int64_t n = 13, epochs = 4000;
    for (int64_t i = 0; i < n; i++) {
        std::vector<double> count(n);
        for (int64_t e = 0; e < epochs; e++) count[size_t(permute(i, n, 42, uint64_t(e)))]++;
        double chi = 0;
        for (double c : count) chi += (c - double(epochs) / n) * (c - double(epochs) / n) / (double(epochs) / n);
        EXPECT_LT(chi, 45) << "place " << i;
    }
    // Neighbours do not stay neighbours: 4096 of them are together about 2 times by chance.
    for (uint64_t epoch = 0; epoch < 5; epoch++) {
        int together = 0;
        for (int64_t i = 0; i + 1 < 4096; i++) {
            together += std::abs(permute(i, 4096, 1, epoch) - permute(i + 1, 4096, 1, epoch)) == 1;
        }
        EXPECT_LT(together, 15);
    }
    // All six orders of three occur.
    std::set<std::vector<int64_t>> orders;
    for (uint64_t e = 0; e < 200; e++) orders.insert({permute(0, 3, 9, e), permute(1, 3, 9, e), permute(2, 3, 9, e)});
    EXPECT_EQ(orders.size(), 6u);
}

// ---- the stream
// -------------------------------------------------------------------------------------------------------

TEST(TokenStream, ReadsOneStreamAcrossShardsOfAnySize) {
    const int T = 8;
    for (int width : {2, 4}) {
        TempDir dir;
        std::vector<int32_t> all;
        const int64_t sizes[] = {0, 1, T, 0, T + 1, 3, 0, 40, 0};
        for (size_t i = 0; i < std::size(sizes); i++) {
            const std::vector<int32_t> part = counting(sizes[i], int32_t(all.size()) + (width == 4 ? 70000 : 0));
            write_shard(dir.file("train_" + std::to_string(i) + ".bin"), part, width);
            all.insert(all.end(), part.begin(), part.end());
        }
        const TokenStream s({dir.file("train_*.bin")});
        ASSERT_EQ(s.size(), int64_t(all.size()));
        for (int64_t begin = 0; begin < s.size(); begin++) {
            for (int64_t count = 0; begin + count <= s.size(); count++) {
                std::vector<int32_t> got(size_t(count) + 1, -7);
                s.read(begin, count, got.data());
                s.will_need(begin, count);
                ASSERT_TRUE(std::equal(got.begin(), got.end() - 1, all.begin() + begin)) << begin << " + " << count;
                ASSERT_EQ(got.back(), -7);
            }
            // The place on disk holds that very token.
            const TokenPlace p = s.place(begin);
            const std::string bytes = test::read_file(p.path);
            int32_t id = 0;
            std::memcpy(&id, bytes.data() + p.byte_offset, size_t(width));
            ASSERT_EQ(id, all[size_t(begin)]);
        }
    }
}

TEST(TokenStream, MixesWidths) {
    TempDir dir;
    write_shard(dir.file("a.bin"), {1, 2, 3}, 2);
    write_shard(dir.file("b.bin"), {100000, 5}, 4);
    const TokenStream s({dir.file("*.bin")});
    std::vector<int32_t> got(5);
    s.read(0, 5, got.data());
    EXPECT_EQ(got, (std::vector<int32_t>{1, 2, 3, 100000, 5}));
    EXPECT_EQ(s.shards()[1].token(0), 100000);
}

TEST(TokenStream, FindsFilesByGlobListAndName) {
    TempDir dir;
    for (int i : {10, 2, 1})
        write_shard(dir.file("t_" + std::string(i < 10 ? "0" : "") + std::to_string(i) + ".bin"), {i});
    write_shard(dir.file("odd[1].bin"), {77});
    const auto tokens = [](const std::vector<std::string>& patterns) {
        const TokenStream s(patterns);
        std::vector<int32_t> v(static_cast<size_t>(s.size()));
        s.read(0, s.size(), v.data());
        return v;
    };
    EXPECT_EQ(tokens({dir.file("t_*.bin")}), (std::vector<int32_t>{1, 2, 10}));
    EXPECT_EQ(tokens({dir.file("t_10.bin"), dir.file("t_0?.bin")}), (std::vector<int32_t>{1, 2, 10}));
    EXPECT_EQ(tokens({dir.file("odd[1].bin")}), (std::vector<int32_t>{77}));  // a name that exists is no glob
    expect_refused({dir.file("t_*.bin"), dir.file("t_01.bin")}, {"t_01.bin", "twice"});
    expect_refused({dir.file("t_01.bin"), dir.path() + "/./t_01.bin"}, {"t_01.bin", "twice"});
    expect_refused({dir.file("x_*.bin")}, {"x_*.bin", "no file matches"});
    expect_refused({dir.file("x.bin")}, {"x.bin", "no such file"});
    expect_refused({dir.path()}, {dir.path(), "dataset.json"});
    EXPECT_NE(refusal([] { TokenStream s({}); }, kExitUsage), "accepted");
}

TEST(TokenStream, RefusesWhatIsNoShardByNameAndReason) {
    TempDir dir;
    const auto file = [&](const std::string& name, const std::string& content) {
        test::write_file(dir.file(name), content);
        return std::vector<std::string>{dir.file(name)};
    };
    expect_refused(file("empty.bin", ""), {"empty.bin: 0 bytes", "1024"});
    expect_refused(file("short.bin", header(20240520, 1, 0).substr(0, 1023)), {"short.bin: 1023 bytes", "1024"});
    expect_refused(file("text.bin", std::string(2000, 'a')), {"text.bin", "1633771873", "20240520", "20240801"});
    expect_refused(file("version.bin", header(20240520, 7, 0)), {"version.bin: version 7", "expected 1"});
    expect_refused(file("version4.bin", header(20240801, 1, 0)), {"version 1", "expected 7"});
    expect_refused(file("cut.bin", header(20240520, 1, 3) + "abcd"),
                   {"cut.bin: 1028 bytes", "expected 1030", "3 tokens"});
    expect_refused(file("long.bin", header(20240520, 1, 1) + "abcd"), {"long.bin: 1028 bytes", "expected 1026"});
    expect_refused(file("odd.bin", header(20240801, 7, 1) + "abcdef"), {"odd.bin: 1030 bytes", "expected 1028"});
    expect_refused(file("huge.bin", header(20240520, 1, 2147483647) + "ab"), {"huge.bin", "expected 4294968318"});
    expect_refused(file("negative.bin", header(20240520, 1, -1) + "ab"), {"negative.bin", "4294967295 tokens"});
    std::filesystem::create_directory(dir.file("dir.bin"));
    expect_refused({dir.file("d*.bin")}, {"dir.bin", "not a regular file"});
    ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);
    expect_refused({dir.file("fifo")}, {"fifo", "not a regular file"});
}

TEST(TokenStream, AllowsEmptyShardsButNoEmptyDataSet) {
    TempDir dir;
    write_shard(dir.file("a.bin"), {});
    write_shard(dir.file("b.bin"), {}, 4);
    expect_refused({dir.file("*.bin")}, {"*.bin", "no tokens in 2 shards"});
    write_shard(dir.file("c.bin"), {5});
    EXPECT_EQ(TokenStream({dir.file("*.bin")}).size(), 1);
}

// A sparse file: bytes far behind 2 GiB (and 2^32 tokens, where the header's count wraps) are read at their place.
TEST(TokenStream, ReadsShardsPastTwoGigabytes) {
    TempDir dir;
    for (const int64_t tokens : {int64_t(1200000000), (int64_t(1) << 31) + 11, (int64_t(1) << 32) + 5}) {
        const std::string path = dir.file("big.bin");
        test::write_file(path, header(20240520, 1, int32_t(uint32_t(tokens))));
        if (::truncate(path.c_str(), 1024 + tokens * 2) != 0) GTEST_SKIP() << "no large sparse files here";
        const uint16_t last[3] = {11, 12, 13};
        const int fd = ::open(path.c_str(), O_WRONLY);
        ASSERT_EQ(::pwrite(fd, last, sizeof last, 1024 + (tokens - 3) * 2), 6);
        ::close(fd);
        write_shard(dir.file("small.bin"), {21, 22});
        const TokenStream s({dir.file("*.bin")});
        ASSERT_EQ(s.size(), tokens + 2);
        std::vector<int32_t> got(6);
        s.read(tokens - 4, 6, got.data());
        EXPECT_EQ(got, (std::vector<int32_t>{0, 11, 12, 13, 21, 22}));
        EXPECT_EQ(s.place(tokens - 1).byte_offset, 1024 + (tokens - 1) * 2);
        EXPECT_EQ(s.place(tokens + 1).path, dir.file("small.bin"));
        s.will_need(tokens - 4, 6);
        const std::string line = refusal([&] { s.read_checked(tokens - 4, 6, 13, got.data()); });
        EXPECT_NE(line.find("big.bin: token id 13 at byte " + std::to_string(1024 + (tokens - 1) * 2)),
                  std::string::npos);
    }
}

TEST(TokenStream, FingerprintSeesNamesSizesAndEnds) {
    TempDir dir;
    const auto of = [&](const std::string& name, const std::vector<int32_t>& tokens) {
        TempDir d;
        write_shard(d.file(name), tokens);
        return TokenStream({d.file(name)}).fingerprint();
    };
    std::vector<int32_t> v = counting(60000);
    const uint64_t f = of("a.bin", v);
    EXPECT_EQ(of("a.bin", v), f);  // in another directory
    EXPECT_NE(of("b.bin", v), f);
    EXPECT_NE(of("a.bin", counting(60001)), f);
    v.back()++;
    EXPECT_NE(of("a.bin", v), f);
    v.back()--;
    v.front()++;
    EXPECT_NE(of("a.bin", v), f);
}

// ---- rows
// -------------------------------------------------------------------------------------------------------------

std::shared_ptr<const TokenStream> stream_of_sizes(const TempDir& dir, const std::vector<int64_t>& sizes) {
    int32_t next = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
        write_shard(dir.file(std::to_string(100 + i) + ".bin"), counting(sizes[i], next), 2);
        next += int32_t(sizes[i]);
    }
    return std::make_shared<TokenStream>(std::vector<std::string>{dir.file("*.bin")});
}

TEST(RowLoader, AnEpochCoversEveryRowOnceAndDropsOnlyTheLastPartialOne) {
    for (int T : {1, 2, 7, 29}) {
        for (int64_t n : {T + 1, T + 2, 2 * T, 2 * T + 1, 97, 1000}) {
            if (n < T + 1) continue;
            TempDir dir;
            const auto stream = stream_of_sizes(dir, {0, n / 3, 1 % (n / 3 + 1), 0, n - n / 3 - 1 % (n / 3 + 1)});
            ASSERT_EQ(stream->size(), n);
            for (bool shuffle : {false, true}) {
                const RowLoader rows(stream, 0, n, T, shuffle, 42);
                ASSERT_EQ(rows.rows_per_epoch(), (n - 1) / T);
                ASSERT_EQ(rows.dropped_tokens(), (n - 1) % T);
                for (int64_t epoch : {0, 1, 5}) {
                    std::set<int64_t> starts;
                    for (int64_t i = 0; i < rows.rows_per_epoch(); i++) {
                        const int64_t start = rows.row_start(epoch * rows.rows_per_epoch() + i);
                        if (!shuffle) {
                            ASSERT_EQ(start, i * T);
                        }
                        std::vector<int32_t> row(size_t(T) + 1);
                        rows.read_row(epoch * rows.rows_per_epoch() + i, int(n), row.data());
                        ASSERT_EQ(row, counting(T + 1, int32_t(start)));  // the stream counts
                        starts.insert(start);
                    }
                    ASSERT_EQ(int64_t(starts.size()), rows.rows_per_epoch());
                    ASSERT_EQ(*starts.begin(), 0);
                    ASSERT_EQ(*starts.rbegin(), (rows.rows_per_epoch() - 1) * T);
                }
            }
        }
    }
}

TEST(RowLoader, RowNIsTheSameHoweverItIsReached) {
    TempDir dir;
    const auto stream = stream_of_sizes(dir, {50, 0, 13, 200});
    const int T = 5;
    const RowLoader once(stream, 0, stream->size(), T, true, 7);
    std::map<int64_t, std::vector<int32_t>> rows;
    const int64_t total = 3 * once.rows_per_epoch();
    for (int64_t n = 0; n < total; n++) {
        rows[n].resize(size_t(T) + 1);
        once.read_row(n, 1000, rows[n].data());
    }
    // Micro-batches of b rows by a fresh loader, read backwards: the same rows; epochs in other orders.
    for (int64_t b : {1, 2, 3, 8}) {
        const RowLoader again(stream, 0, stream->size(), T, true, 7);
        for (int64_t first = (total - 1) / b * b; first >= 0; first -= b) {
            again.will_need(first, std::min(b, total - first));
            for (int64_t n = first; n < std::min(first + b, total); n++) {
                std::vector<int32_t> row(size_t(T) + 1);
                again.read_row(n, 1000, row.data());
                ASSERT_EQ(row, rows[n]);
            }
        }
    }
    const int64_t E = once.rows_per_epoch();
    int same = 0;
    for (int64_t i = 0; i < E; i++) same += rows[i] == rows[E + i];
    EXPECT_LT(same, E / 4);
}

TEST(RowLoader, UsesOnlyItsPartOfTheStream) {
    TempDir dir;
    const auto stream = stream_of_sizes(dir, {10, 90});
    const RowLoader rows(stream, 13, 100, 4, true, 1);  // 87 tokens: 21 rows, 2 left
    EXPECT_EQ(rows.rows_per_epoch(), 21);
    EXPECT_EQ(rows.dropped_tokens(), 2);
    for (int64_t n = 0; n < 42; n++) {
        const int64_t start = rows.row_start(n);
        EXPECT_TRUE(start >= 13 && start + 5 <= 98 && (start - 13) % 4 == 0);
    }
}

TEST(RowLoader, RefusesTooFewTokensAndSaysHowManyThereAre) {
    TempDir dir;
    const auto stream = stream_of_sizes(dir, {3, 5});
    const std::string line = refusal([&] { RowLoader r(stream, 0, 8, 8, false, 0); });
    EXPECT_NE(line.find("8 tokens in the 2 shard(s), expected at least 9"), std::string::npos) << line;
    EXPECT_EQ(RowLoader(stream, 0, 8, 7, false, 0).rows_per_epoch(), 1);
    EXPECT_NE(refusal([&] { RowLoader r(stream, 8, 8, 1, false, 0); }).find("0 tokens"), std::string::npos);
    EXPECT_NE(refusal([&] { RowLoader r(stream, 0, 8, 2147483647, false, 0); }).find("2147483648"), std::string::npos);
}

TEST(RowLoader, NamesFileAndByteOfAnIdOutsideTheVocabulary) {
    for (int width : {2, 4}) {
        TempDir dir;
        write_shard(dir.file("a.bin"), counting(10), width);
        write_shard(dir.file("b.bin"), {1, 2, 3, 50, 4, 5, 6, 7, 8, 9}, width);
        const auto stream = std::make_shared<TokenStream>(std::vector<std::string>{dir.file("*.bin")});
        const RowLoader rows(stream, 0, stream->size(), 9, false, 0);
        std::vector<int32_t> row(10);
        rows.read_row(0, 50, row.data());
        rows.read_row(1, 51, row.data());
        const std::string line = refusal([&] { rows.read_row(1, 50, row.data()); });
        EXPECT_NE(line.find("b.bin: token id 50 at byte " + std::to_string(1024 + 3 * width)), std::string::npos)
            << line;
        EXPECT_NE(line.find("vocabulary's 50"), std::string::npos) << line;
    }
    // Ids of 2^31 and more do not pass as negative numbers.
    TempDir dir;
    write_shard(dir.file("a.bin"), {0, -1, 0}, 4);
    const TokenStream s({dir.file("a.bin")});
    std::vector<int32_t> row(3);
    const std::string line = refusal([&] { s.read_checked(0, 3, 100, row.data()); });
    EXPECT_NE(line.find("token id 4294967295 at byte 1028"), std::string::npos) << line;
}

// ---- training and validation
// ------------------------------------------------------------------------------------------

TEST(OpenData, TakesValidationFromItsFilesOrTheStartOfTheStream) {
    TempDir dir;
    write_shard(dir.file("train_0.bin"), counting(60));
    write_shard(dir.file("train_1.bin"), counting(40, 60));
    write_shard(dir.file("val_0.bin"), counting(7));
    DataConfig c;
    c.train = {dir.file("train_*.bin")};
    DataSet d = open_data(c);
    EXPECT_EQ(d.val, nullptr);
    EXPECT_EQ(d.train_begin, 0);
    EXPECT_EQ(d.train_end, 100);

    c.val_tokens = 30;
    c.val_gap = 11;
    d = open_data(c);
    EXPECT_EQ(d.val, d.train);
    EXPECT_EQ(d.val_begin, 0);
    EXPECT_EQ(d.val_end, 30);
    EXPECT_EQ(d.train_begin, 41);
    EXPECT_EQ(d.train_end, 100);

    c.val = {dir.file("val_*.bin")};
    d = open_data(c);
    EXPECT_EQ(d.val->size(), 7);
    EXPECT_EQ(d.val_end, 7);
    EXPECT_EQ(d.train_begin, 0);
    EXPECT_EQ(d.val_text_bytes, 0);

    c.val.clear();
    c.val_gap = 70;  // nothing left to train on
    EXPECT_NE(
        refusal([&] { open_data(c); }).find("100 tokens, expected more than data.val_tokens 30 + data.val_gap 70"),
        std::string::npos);
    c.val_gap = INT64_MAX;
    EXPECT_NE(refusal([&] { open_data(c); }), "accepted");
    c.val_tokens = 1;
    c.val_gap = 0;
    EXPECT_NE(refusal([&] { open_data(c); }).find("expected at least 2"), std::string::npos);
    c.train = {dir.file("absent*")};
    EXPECT_NE(refusal([&] { open_data(c); }).find("absent*"), std::string::npos);
}

TEST(OpenData, ReadsDirectoriesWithADatasetJson) {
    TempDir dir;
    const auto t = make_byte_tokenizer();
    {
        DatasetWriter w(dir.file("set"), *t, false, 10);
        for (int i = 0; i < 12; i++) {
            w.add(i % 4 == 0 ? Split::val : Split::train, t->encode("doc " + std::to_string(i)), 4 + (i > 9 ? 2 : 1));
            w.end_document(i % 4 == 0 ? Split::val : Split::train);
        }
        w.finish();
    }
    DataConfig c;
    c.train = {dir.file("set")};
    c.val = {dir.file("set")};
    const DataSet d = open_data(c);
    EXPECT_EQ(d.train->size(), 9 * 6 + 2);  // "doc 1" and its separator; "doc 10", "doc 11" have a byte more
    EXPECT_EQ(d.val->size(), 3 * 6);
    EXPECT_EQ(d.val_text_bytes, 15);
    EXPECT_EQ(TokenStream({dir.file("set")}).size(), d.train->size() + d.val->size());
    c.val = {dir.file("set/val_*.bin")};
    EXPECT_EQ(open_data(c).val_text_bytes, 15);
    c.val = {dir.file("set/val_00000.bin")};  // a part of it: not known
    EXPECT_EQ(open_data(c).val_text_bytes, 0);
}

// ---- documents
// --------------------------------------------------------------------------------------------------------

struct Documents {
    std::vector<int32_t> key_begin, positions;
};

Documents documents_of(const std::vector<int32_t>& ids, const DataConfig& d) {
    Documents r;
    r.key_begin.resize(ids.size());
    r.positions.resize(ids.size());
    find_documents(ids.data(), int(ids.size()), d, r.key_begin.data(), r.positions.data());
    return r;
}

TEST(FindDocuments, SeparatorAtTheEndBelongsToTheDocumentItEnds) {
    DataConfig d;
    d.has_separator = true;
    d.separator_id = 9;
    //                                 a  a  |  b  |  |  c  c
    const Documents r = documents_of({1, 2, 9, 3, 9, 9, 4, 5}, d);
    EXPECT_EQ(r.key_begin, (std::vector<int32_t>{0, 0, 0, 3, 3, 5, 6, 6}));
    EXPECT_EQ(r.positions, (std::vector<int32_t>{0, 1, 2, 0, 1, 0, 0, 1}));
    EXPECT_EQ(documents_of({9, 9}, d).key_begin, (std::vector<int32_t>{0, 1}));
    EXPECT_EQ(documents_of({9}, d).key_begin, (std::vector<int32_t>{0}));
}

TEST(FindDocuments, SeparatorAtTheStartBeginsItsDocument) {
    DataConfig d;
    d.has_separator = true;
    d.separator_id = 9;
    d.separator_at_end = false;
    //                                 a  a  |b b  |  |c c
    const Documents r = documents_of({1, 2, 9, 3, 9, 9, 4, 5}, d);
    EXPECT_EQ(r.key_begin, (std::vector<int32_t>{0, 0, 2, 2, 4, 5, 5, 5}));
    EXPECT_EQ(r.positions, (std::vector<int32_t>{0, 1, 0, 1, 0, 0, 1, 2}));
    EXPECT_EQ(documents_of({9, 1, 1}, d).key_begin, (std::vector<int32_t>{0, 0, 0}));
}

TEST(FindDocuments, PositionsByRowAndMaskOff) {
    DataConfig d;
    d.has_separator = true;
    d.separator_id = 9;
    d.positions_by_document = false;
    EXPECT_EQ(documents_of({1, 9, 2, 3}, d).key_begin, (std::vector<int32_t>{0, 0, 2, 2}));
    EXPECT_EQ(documents_of({1, 9, 2, 3}, d).positions, (std::vector<int32_t>{0, 1, 2, 3}));
    d.positions_by_document = true;
    d.document_mask = false;
    EXPECT_EQ(documents_of({1, 9, 2, 3}, d).key_begin, (std::vector<int32_t>{0, 0, 0, 0}));
    EXPECT_EQ(documents_of({1, 9, 2, 3}, d).positions, (std::vector<int32_t>{0, 1, 2, 3}));
    d.document_mask = true;
    d.has_separator = false;
    EXPECT_EQ(documents_of({1, 0, 2, 3}, d).key_begin, (std::vector<int32_t>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace bam
