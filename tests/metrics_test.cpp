// metrics.jsonl: every line parses, numbers come back bit for bit, and what an earlier process left is kept.
#include "metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "check.h"
#include "random.h"
#include "test_support.h"

namespace bam {
namespace {

using Json = nlohmann::ordered_json;

TEST(Metrics, NumbersComeBackBitForBit) {
    test::TempDir dir;
    MetricsLog log(dir.file("m"));
    std::vector<double> values = {0.1, 1.0 / 3, -0.0, 5e-324, 1.7976931348623157e308, 2.5, double(0.1f)};
    for (uint64_t k = 0; values.size() < 500; k++)
        if (const double x = std::bit_cast<double>(random_bits(1, 2, k)); std::isfinite(x)) values.push_back(x);
    for (const double x : values) log.log({{"event", "step"}, {"loss", x}});
    const std::vector<std::string> lines = test::lines_of(test::read_file(dir.file("m")));
    ASSERT_EQ(lines.size(), values.size());
    for (size_t i = 0; i < lines.size(); i++)
        EXPECT_EQ(std::bit_cast<uint64_t>(Json::parse(lines[i])["loss"].get<double>()),
                  std::bit_cast<uint64_t>(values[i]))
            << lines[i];
}

TEST(Metrics, LinesAreJsonWhateverIsInThem) {
    test::TempDir dir;
    MetricsLog log(dir.file("m"));
    log.log({{"event", "step"}, {"step", 1}, {"loss", std::nan("")}, {"lr", std::numeric_limits<double>::infinity()}});
    log.log({{"event", "start"}, {"path", "a\"b\\c\nd"}, {"seed", 18446744073709551615ull}});
    log.log({{"bytes", "\xff"}});
    const std::vector<std::string> lines = test::lines_of(test::read_file(dir.file("m")));
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_EQ(lines[0], R"({"event":"step","step":1,"loss":null,"lr":null})");
    EXPECT_EQ(Json::parse(lines[1])["path"], "a\"b\\c\nd");
    EXPECT_EQ(Json::parse(lines[1])["seed"].get<uint64_t>(), 18446744073709551615ull);
    EXPECT_TRUE(Json::accept(lines[2]));
}

TEST(Metrics, AppendsAndEndsATornLine) {
    test::TempDir dir;
    const std::string path = dir.file("m");
    { MetricsLog(path).log({{"step", 1}}); }
    { MetricsLog(path).log({{"step", 2}}); }
    EXPECT_EQ(test::read_file(path), "{\"step\":1}\n{\"step\":2}\n");
    test::write_file(path, "{\"step\":1}\n{\"ste");
    { MetricsLog(path).log({{"step", 2}}); }
    EXPECT_EQ(test::read_file(path), "{\"step\":1}\n{\"ste\n{\"step\":2}\n");
    { MetricsLog torn(path); }  // nothing to end
    EXPECT_EQ(test::read_file(path), "{\"step\":1}\n{\"ste\n{\"step\":2}\n");
}

TEST(Metrics, EachLineIsOutWhenItIsLogged) {
    test::TempDir dir;
    MetricsLog log(dir.file("m"));
    log.log({{"step", 1}});
    EXPECT_EQ(test::read_file(dir.file("m")), "{\"step\":1}\n");
}

std::string mistake(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitFailure);
        return e.what();
    }
    return "";
}

TEST(Metrics, WriteErrorsAreNamed) {
    EXPECT_EQ(mistake([] { MetricsLog log("/no/such/dir/m"); }),
              "/no/such/dir/m: cannot write: No such file or directory");
    if (::access("/dev/full", W_OK)) GTEST_SKIP() << "no /dev/full";
    EXPECT_EQ(mistake([] {
                  MetricsLog("/dev/full").log({{"step", 1}});
              }),
              "/dev/full: cannot write: No space left on device");
}

}  // namespace
}  // namespace bam
