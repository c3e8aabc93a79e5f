// safetensors files: bytes laid by hand are read, bad ones are refused by name, and ours are what the format says.
#include "safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "check.h"
#include "durable_file.h"
#include "random.h"
#include "tensor.h"
#include "test_support.h"

namespace bam {
namespace {

using Json = nlohmann::json;

std::string file_of(const std::string& header, const std::string& data) {
    const uint64_t n = header.size();
    return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

template <class T>
std::string bytes_of(const std::vector<T>& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
}

std::string mistake(const std::string& content) {
    test::TempDir dir;
    test::write_file(dir.file("x.st"), content);
    try {
        SafetensorsFile f(dir.file("x.st"));
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitData);
        const std::string what = e.what();
        EXPECT_EQ(what.rfind(dir.file("x.st") + ": ", 0), 0u) << what;
        return what.substr(dir.file("x.st").size() + 2);
    }
    return "";
}

TEST(Safetensors, ReadsBytesLaidByHand) {
    test::TempDir dir;
    // An odd header length, so that nothing behind it is aligned.
    const std::string header =
        R"({"__metadata__":{"k":"v"},"b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]},)"
        R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0,4],"data_offsets":[14,14]},)"
        R"("s":{"dtype":"I64","shape":[],"data_offsets":[14,22]},"i":{"dtype":"I32","shape":[2],"data_offsets":[22,30]} })";
    const std::string data = bytes_of<float>({1.5f, -2}) + bytes_of<uint16_t>({0x3f80, 0xc000, 0x7fc0}) +
                             bytes_of<int64_t>({-7}) + bytes_of<int32_t>({3, -4});
    ASSERT_EQ(header.size() % 2, 1u);
    test::write_file(dir.file("x"), file_of(header, data));
    const SafetensorsFile f(dir.file("x"));
    EXPECT_EQ(f.entries().size(), 5u);
    EXPECT_EQ(f.metadata().at("k"), "v");
    EXPECT_EQ(f.floats("a"), (std::vector<float>{1.5f, -2}));
    const std::vector<float> b = f.floats("b");
    EXPECT_EQ(b[0], 1.0f);
    EXPECT_EQ(b[1], -2.0f);
    EXPECT_TRUE(std::isnan(b[2]));
    EXPECT_TRUE(f.floats("e").empty());
    EXPECT_EQ(f.ints("s"), std::vector<int32_t>{-7});
    EXPECT_EQ(f.ints("i"), (std::vector<int32_t>{3, -4}));
    EXPECT_EQ(f.entry("a").shape, (std::vector<int64_t>{1, 2}));
    EXPECT_FALSE(f.has("c"));
    EXPECT_THROW(f.entry("c"), Error);
    EXPECT_THROW(f.floats("i"), Error);
    EXPECT_THROW(f.ints("a"), Error);
    EXPECT_EQ(mistake(file_of("{}", "")), "");
}

TEST(Safetensors, RefusesBadFiles) {
    const auto one = [](const std::string& entry, size_t bytes) {
        return mistake(file_of("{\"t\":" + entry + "}", std::string(bytes, 'x')));
    };
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 8), "");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 7),
              "tensor t: data_offsets [0, 8], expected ascending ones within 7 bytes");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", 8),
              "tensor t: data_offsets [8, 0], expected ascending ones within 8 bytes");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 9),
              "9 bytes of data, expected 8 for its tensors");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2],"data_offsets":[1,9]})", 9),
              "tensor t: begins at byte 1 of the data, expected 0: a gap");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", 8),
              "tensor t: 8 bytes, expected F32 of shape [3]");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]})", 8),
              "tensor t: 8 bytes, expected F32 of shape [4294967296, 4294967296]");
    EXPECT_EQ(one(R"({"dtype":"F33","shape":[2],"data_offsets":[0,8]})", 8),
              "tensor t: dtype is \"F33\", expected one like F32 or BF16");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", 8),
              "tensor t: shape is [-2], expected a list of integers >= 0");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", 8),
              "tensor t: shape is [2.0], expected a list of integers >= 0");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", 8),
              "tensor t: shape is 2, expected a list of integers >= 0");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})", 8), "tensor t: 1 data_offsets, expected 2");
    EXPECT_EQ(one(R"({"dtype":"F32","shape":[2]})", 8), "tensor t: data_offsets is missing");
    EXPECT_EQ(one("7", 8), "tensor t: dtype is missing");
    EXPECT_EQ(
        mistake(file_of(
            R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
            "1234567")),
        "tensor b: begins at byte 3 of the data, expected 4: it overlaps another");
    EXPECT_EQ(
        mistake(file_of(
            R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
            "")),
        "header: a: given twice");
    EXPECT_EQ(mistake(file_of(R"({"__metadata__":{"a":1}})", "")), "__metadata__: a: expected a string");
    EXPECT_EQ(mistake(file_of("[]", "")), "header: expected a JSON object");
    EXPECT_EQ(mistake(file_of("nonsense", "")).substr(0, 36), "header: line 1, column 2: not JSON: ");
    EXPECT_EQ(mistake(""), "0 bytes, expected a safetensors file of at least 8");
    EXPECT_EQ(mistake("1234567"), "7 bytes, expected a safetensors file of at least 8");
    EXPECT_EQ(mistake(std::string(8, '\xff')),
              "header of 18446744073709551615 bytes, expected at most 0: truncated, or not a safetensors file");
    EXPECT_EQ(mistake(file_of("{}", "").substr(0, 9)),
              "header of 2 bytes, expected at most 1: truncated, or not a safetensors file");
    EXPECT_THROW(SafetensorsFile("/no/such/file"), Error);
    EXPECT_THROW(SafetensorsFile("."), Error);
    EXPECT_THROW(SafetensorsFile("/dev/null"), Error);
}

TEST(Safetensors, WritesWhatTheFormatSays) {
    test::TempDir dir;
    const std::string path = dir.file("w.safetensors");
    const std::vector<float> a = {1, 2, 3, 4, 5, 6};
    const std::vector<uint16_t> b = {7};
    const uint64_t hash =
        write_safetensors(path, {{"z", "F32", {2, 3}, a.data()}, {"b\"\n", "BF16", {1}, b.data()}}, {{"k", "v"}});
    const std::string content = test::read_file(path);
    uint64_t n = 0;
    std::memcpy(&n, content.data(), 8);
    EXPECT_EQ((8 + n) % 64, 0u);
    const Json header = Json::parse(content.substr(8, n));
    EXPECT_EQ(content[8], '{');
    EXPECT_EQ(header["__metadata__"]["k"], "v");
    EXPECT_EQ(header["z"], Json::parse(R"({"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})"));
    EXPECT_EQ(header["b\"\n"], Json::parse(R"({"dtype":"BF16","shape":[1],"data_offsets":[24,26]})"));
    EXPECT_EQ(content.substr(8 + n), bytes_of(a) + bytes_of(b));
    EXPECT_EQ(hash, XXH64(content.data(), content.size(), 0));
    EXPECT_EQ(hash, hash_file(path));
    const SafetensorsFile f(path);
    EXPECT_EQ(f.floats("z"), a);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(f.data("z")) % 64, 0u);
}

// Every header byte of a small file, and random bytes of it, replaced: it opens or is refused, and never crashes.
TEST(Safetensors, DamagedHeadersNeverCrash) {
    test::TempDir dir;
    const std::string path = dir.file("f");
    const std::string good = file_of(
        R"({"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"I64","shape":[],"data_offsets":[8,16]}})",
        std::string(16, '\1'));
    int refused = 0;
    const auto open = [&](const std::string& content) {
        std::filesystem::remove(path);  // ext4 syncs a file that is truncated and written again
        test::write_file(path, content);
        try {
            const SafetensorsFile f(path);
            for (const auto& [name, e] : f.entries()) {
                if (e.dtype == "F32" || e.dtype == "BF16") f.floats(name);
            }
        } catch (const Error&) {
            refused++;
        }
    };
    int tries = 0;
    for (size_t i = 0; i + 16 < good.size(); i++)
        for (const char c : {'0', '9', '{', '"', '\0', '\xff', '-'}) {
            std::string bad = good;
            bad[i] = c;
            open(bad);
            tries++;
        }
    for (uint64_t k = 0; k < 500; k++) {
        std::string bad = good;
        for (uint64_t j = 0; j < 3; j++)
            bad[random_below(1, k, 2 * j, bad.size())] = char(random_bits(1, k, 2 * j + 1));
        open(bad);
        tries++;
    }
    for (size_t n = 0; n < good.size(); n++) open(good.substr(0, n)), tries++;
    EXPECT_GT(refused, tries / 2);
    EXPECT_LT(refused, tries);
}

TEST(Safetensors, UnwritablePlacesAreNamed) {
    const float x = 1;
    try {
        write_safetensors("/no/such/dir/x", {{"x", "F32", {1}, &x}});
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitFailure);
        EXPECT_STREQ(e.what(), "/no/such/dir/x: cannot write: No such file or directory");
    }
}

// The child writes more than its file-size limit allows: a one-line error, and no file.
TEST(Safetensors, FileSizeLimitLeavesNoPartialFile) {
    test::TempDir dir;
    const std::string path = dir.file("big");
    const pid_t child = ::fork();
    if (child == 0) {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{1 << 16, 1 << 16};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        const std::vector<float> x(1 << 20);
        try {
            write_safetensors(path, {{"x", "F32", {1 << 20}, x.data()}});
        } catch (const Error& e) {
            const bool right =
                e.code == kExitFailure && std::string(e.what()) == path + ": cannot write: File too large";
            ::_exit(right ? 7 : 8);
        }
        ::_exit(9);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 7);
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Safetensors, FullDiskLeavesNoPartialFile) {
    test::TempDir dir;
    const std::string disk = dir.file("disk");
    std::filesystem::create_directory(disk);
    if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=256k")) GTEST_SKIP() << "cannot mount a small tmpfs";
    const std::vector<float> x(1 << 20);
    std::string what;
    try {
        write_safetensors(disk + "/x", {{"x", "F32", {1 << 20}, x.data()}});
    } catch (const Error& e) {
        what = e.what();
    }
    EXPECT_EQ(what, disk + "/x: cannot write: No space left on device");
    EXPECT_TRUE(std::filesystem::is_empty(disk));
    test::write_file(disk + "/run.json", "old");
    EXPECT_THROW(write_file_atomically(disk + "/run.json", std::string(1 << 20, 'x')), Error);
    EXPECT_EQ(test::read_file(disk + "/run.json"), "old");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(disk), {}), 1);
    ::umount(disk.c_str());
}

TEST(Safetensors, Golden) {
    if (test::goldens_dir().empty()) GTEST_SKIP() << "no goldens";
    const SafetensorsFile f(test::goldens_dir() + "/bam_ssmax/plain.safetensors");
    EXPECT_EQ(f.ints("tokens").size(), 2u * 29 + 1);
    EXPECT_EQ(f.entry("logits").numel(), 2 * 29 * 51);
    EXPECT_EQ(f.floats("losses").size(), 8u);
}

}  // namespace
}  // namespace bam
