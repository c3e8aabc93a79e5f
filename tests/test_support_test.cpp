#include "test_support.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

namespace bam::test {
namespace {

TEST(TestSupport, ChildProcessIsCaptured) {
    RunOptions shell;
    shell.program = "/bin/sh";
    shell.stdin_text = "hello\n";
    shell.env = {{"BAM_TEST_WORD", "word"}};
    shell.directory = "/";
    const RunResult r = run_bam({"-c", "read x; echo $x $BAM_TEST_WORD $(pwd); echo bad >&2; exit 7"}, shell);
    EXPECT_EQ(r.code, 7);
    EXPECT_EQ(r.out, "hello word /\n");
    EXPECT_EQ(r.err, "bad\n");
}

TEST(TestSupport, ChildProcessIsSignalledAndTimesOut) {
    RunOptions shell;
    shell.program = "/bin/sleep";
    Process p({"100"}, shell);
    EXPECT_TRUE(p.running());
    p.signal(SIGTERM);
    EXPECT_EQ(p.wait().code, 128 + SIGTERM);
    shell.timeout_seconds = 0.05;
    EXPECT_EQ(run_bam({"100"}, shell).code, 128 + SIGKILL);
}

TEST(TestSupport, FilesAndShards) {
    std::string path;
    {
        TempDir dir;
        path = dir.path();
        write_shard(dir.file("a.bin"), {1, 300, 65535});
        const std::string bytes = read_file(dir.file("a.bin"));
        ASSERT_EQ(bytes.size(), 1024u + 6u);
        EXPECT_EQ(bytes.substr(1024), std::string("\x01\x00\x2c\x01\xff\xff", 6));
        write_shard(dir.file("b.bin"), {70000}, 4);
        EXPECT_EQ(read_file(dir.file("b.bin")).substr(1024), std::string("\x70\x11\x01\x00", 4));
        EXPECT_EQ(lines_of("a\n\nb"), (std::vector<std::string>{"a", "", "b"}));
    }
    EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace bam::test
