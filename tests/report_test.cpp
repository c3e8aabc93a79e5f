// scripts/report.py, tested by tests/report_test.py on run directories it makes up.
#include <gtest/gtest.h>

#include "test_support.h"

namespace bam::test {
namespace {

TEST(Report, PassesItsPythonTests) {
    RunOptions python;
    python.program = "/usr/bin/env";
    const RunResult help = Process({"python3", "scripts/report.py", "--help"}, python).wait();
    if (help.code != 0) GTEST_SKIP() << "no report without python3-matplotlib: " << help.err;
    // Run as report.py runs: by the python3 that has matplotlib.
    for (const char* interpreter : {"python3", "/usr/bin/python3"}) {
        if (Process({interpreter, "-c", "import matplotlib"}, python).wait().code != 0) continue;
        const RunResult r = Process({interpreter, "tests/report_test.py"}, python).wait();
        EXPECT_EQ(r.code, 0) << r.err;
        EXPECT_NE(r.err.find("\nOK"), std::string::npos) << r.err;
        return;
    }
    FAIL() << "report.py --help works, but no python3 has matplotlib";
}

TEST(Report, IsACommand) {
    REQUIRE_BAM();
    const TempDir dir;
    const RunResult r = run_bam({"report", dir.path()});
    if (r.err.find("needs matplotlib") != std::string::npos) GTEST_SKIP() << r.err;
    EXPECT_EQ(r.code, 3);
    EXPECT_EQ(r.err, "report.py: " + dir.path() +
                         ": no run.json in it or below, expected a run or the directory of a comparison\n");
    EXPECT_EQ(run_bam({"report"}).code, 2);
}

}  // namespace
}  // namespace bam::test
