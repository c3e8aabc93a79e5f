// What several tests need: temporary directories, files, token shards, random fills, and the `bam` program run as a
// user would. Paths are found from the working directory (the repository root) and from the environment: BAM the
// program, BAM_GOLDENS the goldens.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace bam::test {

// A fresh directory, removed with all it holds at the end of the scope.
class TempDir {
public:
    TempDir();
    ~TempDir();
    TempDir(const TempDir&) = delete;
    const std::string& path() const { return path_; }
    std::string file(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

std::string read_file(const std::string& path);  // throws std::runtime_error if it cannot be read
void write_file(const std::string& path, const std::string& content);
std::vector<std::string> lines_of(const std::string& text);  // without line ends; a torn last line counts

// An llm.c shard (DESIGN §3): width 2 | 4 bytes a token.
void write_shard(const std::string& path, const std::vector<int32_t>& tokens, int width = 2);

// Ids in [0, vocab) from (seed, index); with separator_every > 0, about one in that many is `separator` and no other
// is.
std::vector<int32_t> random_tokens(int64_t n, int vocab, uint64_t seed, int separator = -1, int separator_every = 0);
std::vector<float> random_floats(int64_t n, double low, double high, uint64_t seed, uint64_t stream = 0);  // uniform
std::vector<float> random_normals(int64_t n, double scale, uint64_t seed, uint64_t stream = 0);

double max_abs(const std::vector<float>& x);
double max_abs_difference(const std::vector<float>& a, const std::vector<float>& b);  // NaN counts as infinite

// tests/data/NAME, and the goldens directory ("" if absent).
std::string test_data(const std::string& name);
std::string goldens_dir();

// ---- the program ---------------------------------------------------------------------------------------------------

std::string bam_program();  // absolute path: $BAM, else build/bam; "" if there is none

struct RunOptions {
    std::map<std::string, std::string> env;  // added to the environment
    std::string stdin_text;
    std::string directory;         // working directory; empty: this one's
    double timeout_seconds = 300;  // then killed with SIGKILL
    std::string program;           // empty: bam_program()
};

struct RunResult {
    int code = -1;  // exit code, or 128 + signal
    std::string out, err;
};

// A running child process.
class Process {
public:
    explicit Process(const std::vector<std::string>& args, const RunOptions& options = {});
    ~Process();  // kills it if it still runs
    Process(const Process&) = delete;
    pid_t pid() const { return pid_; }
    void signal(int number) const;
    bool running();
    RunResult wait();

private:
    RunResult collect(int status) const;
    TempDir scratch_;
    RunOptions options_;
    pid_t pid_ = -1;
    int status_ = 0;
    bool done_ = false;
};

RunResult run_bam(const std::vector<std::string>& args, const RunOptions& options = {});

// Skips the test when there is no program to run.
#define REQUIRE_BAM() \
    if (bam::test::bam_program().empty()) GTEST_SKIP() << "no bam program: set BAM or run make"

}  // namespace bam::test
