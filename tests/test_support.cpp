#include "test_support.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "random.h"

extern char** environ;

namespace bam::test {
namespace fs = std::filesystem;

TempDir::TempDir() {
    std::string name = (fs::temp_directory_path() / "bam_test.XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
}

TempDir::~TempDir() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + path);
    return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& content) {
    std::ofstream out(path, std::ios::binary);
    out << content;
    if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

void write_shard(const std::string& path, const std::vector<int32_t>& tokens, int width) {
    std::string bytes(1024 + tokens.size() * size_t(width), '\0');
    int32_t* header = reinterpret_cast<int32_t*>(bytes.data());
    header[0] = width == 2 ? 20240520 : 20240801;
    header[1] = width == 2 ? 1 : 7;
    header[2] = int32_t(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i)
        for (int b = 0; b < width; ++b)
            bytes[1024 + i * size_t(width) + size_t(b)] = char(uint32_t(tokens[i]) >> (8 * b));
    write_file(path, bytes);
}

std::vector<int32_t> random_tokens(int64_t n, int vocab, uint64_t seed, int separator, int separator_every) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
        int id = int(random_below(seed, 1, uint64_t(i), uint64_t(vocab)));
        if (separator_every > 0) {
            if (id == separator) id = (id + 1) % vocab;
            if (random_below(seed, 2, uint64_t(i), uint64_t(separator_every)) == 0) id = separator;
        }
        ids[size_t(i)] = id;
    }
    return ids;
}

std::vector<float> random_floats(int64_t n, double low, double high, uint64_t seed, uint64_t stream) {
    std::vector<float> x(static_cast<size_t>(n));
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(low + (high - low) * random_uniform(seed, stream, i));
    return x;
}

std::vector<float> random_normals(int64_t n, double scale, uint64_t seed, uint64_t stream) {
    std::vector<float> x(static_cast<size_t>(n));
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(scale * random_normal(seed, stream, i));
    return x;
}

double max_abs(const std::vector<float>& x) {
    double m = 0;
    for (float v : x) m = std::isnan(v) ? std::numeric_limits<double>::infinity() : std::max(m, double(std::fabs(v)));
    return m;
}

double max_abs_difference(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) throw std::runtime_error("vectors of different sizes");
    double m = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double d = std::fabs(double(a[i]) - double(b[i]));
        m = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(m, d);
    }
    return m;
}

std::string test_data(const std::string& name) {
    return fs::absolute("tests/data/" + name).string();
}

std::string goldens_dir() {
    const char* named = getenv("BAM_GOLDENS");
    for (fs::path p : {fs::path(named ? named : ""), fs::path("../shared/goldens"), fs::path("../../shared/goldens")})
        if (!p.empty() && fs::is_directory(p)) return fs::absolute(p).string();
    return "";
}

// ---- the program ---------------------------------------------------------------------------------------------------

std::string bam_program() {
    const char* named = getenv("BAM");
    const fs::path p = named ? named : "build/bam";
    return fs::exists(p) ? fs::absolute(p).string() : "";
}

namespace {

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
    std::vector<char*> p;
    for (std::string& s : strings) p.push_back(s.data());
    p.push_back(nullptr);
    return p;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& added) {
    std::vector<std::string> env;
    for (char** e = environ; *e; ++e) {
        const std::string entry = *e;
        if (!added.count(entry.substr(0, entry.find('=')))) env.push_back(entry);
    }
    for (const auto& [key, value] : added) env.push_back(key + "=" + value);
    return env;
}

}  // namespace

Process::Process(const std::vector<std::string>& args, const RunOptions& options) : options_(options) {
    std::vector<std::string> argv = {options.program.empty() ? bam_program() : options.program};
    argv.insert(argv.end(), args.begin(), args.end());
    std::vector<std::string> env = merged_environment(options.env);
    write_file(scratch_.file("in"), options.stdin_text);

    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, scratch_.file("in").c_str(), O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, scratch_.file("out").c_str(), O_WRONLY | O_CREAT, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, scratch_.file("err").c_str(), O_WRONLY | O_CREAT, 0600);
    if (!options.directory.empty()) posix_spawn_file_actions_addchdir_np(&actions, options.directory.c_str());
    const int error =
        posix_spawn(&pid_, argv[0].c_str(), &actions, nullptr, pointers_to(argv).data(), pointers_to(env).data());
    posix_spawn_file_actions_destroy(&actions);
    if (error) throw std::runtime_error("cannot start " + argv[0]);
}

Process::~Process() {
    if (!done_ && pid_ > 0) {
        kill(pid_, SIGKILL);
        waitpid(pid_, &status_, 0);
    }
}

void Process::signal(int number) const {
    if (!done_) kill(pid_, number);
}

bool Process::running() {
    if (!done_) done_ = waitpid(pid_, &status_, WNOHANG) == pid_;
    return !done_;
}

RunResult Process::wait() {
    using clock = std::chrono::steady_clock;
    const auto deadline = clock::now() + std::chrono::duration<double>(options_.timeout_seconds);
    for (int pause_us = 200; running(); pause_us = std::min(2 * pause_us, 5000)) {
        if (clock::now() > deadline) signal(SIGKILL);
        std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    }
    return collect(status_);
}

RunResult Process::collect(int status) const {
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return {code, read_file(scratch_.file("out")), read_file(scratch_.file("err"))};
}

RunResult run_bam(const std::vector<std::string>& args, const RunOptions& options) {
    return Process(args, options).wait();
}

}  // namespace bam::test
