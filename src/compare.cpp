// The parts of a comparison and the processes that do them. See compare.h; results are in compare_results.cpp.
#include "compare.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "check.h"
#include "checkpoint.h"
#include "device.h"
#include "durable_file.h"
#include "interrupt.h"
#include "trainer.h"

extern char** environ;

namespace bam {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

namespace {

struct Variant {
    std::string name, pe;
    std::vector<std::string> sets;
};

Variant parse_extra(const std::string& text) {
    const size_t colon = text.find(':');
    std::istringstream words(colon == std::string::npos ? "" : text.substr(colon + 1));
    Variant v;
    v.name = text.substr(0, colon);
    words >> v.pe;
    for (std::string w; words >> w;) v.sets.push_back(w);
    if (v.name.empty() || v.pe.empty() || v.name.find('/') != std::string::npos)
        throw Error(kExitUsage, "--extra '" + text + "', expected \"NAME: PE key=value ...\"");
    return v;
}

std::vector<Variant> parse_variants(const CompareOptions& o) {
    std::vector<Variant> list;
    if (o.pe == "all") {
        for (const std::string& name : variant_names()) list.push_back({name, name, {}});
    } else {
        std::istringstream words(o.pe);
        for (std::string w; std::getline(words, w, ',');) {
            PositionConfig p;
            apply_variant(p, w);  // checks the name
            list.push_back({variant_of(p), w, {}});
        }
    }
    for (const std::string& text : o.extra) list.push_back(parse_extra(text));
    std::set<std::string> names;
    for (const Variant& v : list)
        if (!names.insert(v.name).second) throw Error(kExitUsage, "variant '" + v.name + "' is named twice");
    if (list.empty()) throw Error(kExitUsage, "--pe names no variant");
    return list;
}

// A child `bam`, its output appended to the part's log.
pid_t start_bam(const std::vector<std::string>& words, const std::string& log) {
    std::vector<std::string> args = {"/proc/self/exe"};  // this very program, even if a newer one was built meanwhile
    args.insert(args.end(), words.begin(), words.end());
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    setenv(kParentVariable, std::to_string(getpid()).c_str(), 1);
    pid_t pid = -1;
    const int e = posix_spawn(&pid, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    if (e != 0) throw Error(kExitFailure, "cannot start " + args[0] + ": " + std::strerror(e));
    return pid;
}

std::string last_line(const std::string& path) {
    std::FILE* f = std::fopen(path.c_str(), "r");
    std::string last, line;
    for (int c; f && (c = std::fgetc(f)) != EOF;) {
        if (c != '\n') line += char(c);
        else if (!line.empty()) last = line, line.clear();
    }
    if (f) std::fclose(f);
    return line.empty() ? last : line;
}

// What a part goes through; each stage is one child process.
enum class Stage : uint8_t { train, eval, inspect, done };

const char* name_of(Stage s) { return s == Stage::train ? "train" : s == Stage::eval ? "eval" : "inspect"; }

bool asks_for_passkeys(const Config& c) {
    return std::find(c.eval.suites.begin(), c.eval.suites.end(), "passkey") != c.eval.suites.end();
}

Stage stage_after(Stage s, const Config& c) {
    if (s == Stage::train && !c.eval.suites.empty()) return Stage::eval;
    if (s == Stage::eval && asks_for_passkeys(c)) return Stage::inspect;
    return Stage::done;
}

struct Running {
    const ComparePart* part;
    Stage stage = Stage::train;
    pid_t pid = -1;
};

class PartRunner {
public:
    PartRunner(const std::vector<ComparePart>& parts, const std::string& out, int jobs) : parts_(parts), out_(out), jobs_(jobs) {}

    // Names of parts that failed, with the last line they said.
    std::map<std::string, std::string> run() {
        while ((next_ < parts_.size() && !interrupted()) || !running_.empty()) {
            while (running_.size() < size_t(jobs_) && next_ < parts_.size() && !interrupted()) start(&parts_[next_++], Stage::train);
            wait_for_one();
        }
        return failed_;
    }

private:
    std::string log_of(const ComparePart& p) const { return out_ + "/logs/" + p.config.run.name + ".txt"; }

    std::vector<std::string> command(const ComparePart& part, Stage stage) const {
        const Config& c = part.config;
        const std::string threads = std::to_string(c.run.threads ? c.run.threads : std::max(1, usable_threads() / jobs_));
        if (stage == Stage::train)
            return {"train", out_ + "/configs/" + c.run.name + ".json", "--set", "run.threads=" + threads};
        std::vector<std::string> words = {name_of(stage), run_directory(c), "--device", c.run.device, "--threads", threads};
        if (stage == Stage::inspect) {  // beyond the trained length, where encodings differ
            words.insert(words.end(), {"--passkey", std::to_string(8 * c.train.seq_len)});
            return words;
        }
        auto list = [&](const char* option, const auto& values, auto text) {
            std::string all;
            for (const auto& v : values) all += (all.empty() ? "" : ",") + text(v);
            if (!all.empty()) words.insert(words.end(), {option, all});
        };
        list("--suite", c.eval.suites, [](const std::string& s) { return s; });
        list("--lengths", c.eval.lengths, [](int64_t n) { return std::to_string(n); });
        return words;
    }

    void start(const ComparePart* part, Stage stage) {
        std::printf("%s: %s\n", part->config.run.name.c_str(), name_of(stage));
        std::fflush(stdout);
        running_.push_back({part, stage, start_bam(command(*part, stage), log_of(*part))});
    }

    void wait_for_one() {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0) {  // a signal came: the children save and stop as well
            for (const Running& r : running_) kill(r.pid, SIGTERM);
            return;
        }
        const auto at = std::find_if(running_.begin(), running_.end(), [&](const Running& r) { return r.pid == pid; });
        if (at == running_.end()) return;
        const Running r = *at;
        running_.erase(at);
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (code == kExitInterrupted || interrupted()) return;
        if (code != 0) {
            failed_[r.part->config.run.name] = "exit " + std::to_string(code) + ": " + last_line(log_of(*r.part));
            std::fprintf(stderr, "bam: %s failed, %s\n", r.part->config.run.name.c_str(), failed_[r.part->config.run.name].c_str());
        } else if (const Stage next = stage_after(r.stage, r.part->config); next != Stage::done) {
            start(r.part, next);
        }
    }

    const std::vector<ComparePart>& parts_;
    std::string out_;
    int jobs_;
    size_t next_ = 0;
    std::vector<Running> running_;
    std::map<std::string, std::string> failed_;
};

void print_proof(const json& proof) {
    for (const json& p : proof["parts"]) {
        std::string own;
        for (const auto& [name, n] : p["own_parameters"].items()) own += (own.empty() ? "" : ", ") + name + " x" + n.dump();
        std::printf("  %-22s %s trained parameters%s\n", p["name"].get<std::string>().c_str(), p["trained"].dump().c_str(),
                    own.empty() ? "" : (", of its own: " + own).c_str());
    }
    for (const auto& [seed, h] : proof["seeds"].items())
        std::printf("  seed %s: shared initial weights %s, token rows %s, the same for all\n", seed.c_str(),
                    h["shared_weights_xxh64"].get<std::string>().c_str(), h["rows_xxh64"].get<std::string>().c_str());
}

}  // namespace

std::vector<ComparePart> compare_parts(const CompareOptions& o) {
    std::vector<ComparePart> parts;
    for (int s = 0; s < o.seeds; ++s)
        for (const Variant& v : parse_variants(o)) {
            std::vector<std::string> sets = o.sets;
            sets.insert(sets.end(), v.sets.begin(), v.sets.end());
            ComparePart p{v.name, 0, load_config(o.config, sets, v.pe)};
            const std::string out = o.out.empty() ? run_directory(p.config) + "-compare" : o.out;
            p.config.run.seed += uint64_t(s);
            p.seed = p.config.run.seed;
            p.config.run.out = out + "/runs";
            p.config.run.name = v.name + "-s" + std::to_string(p.seed);
            parts.push_back(std::move(p));
        }
    return parts;
}

int compare(const CompareOptions& o) {
    const std::vector<ComparePart> parts = compare_parts(o);
    const std::string out = fs::path(parts.front().config.run.out).parent_path().string();
    for (const char* d : {"/configs", "/logs", "/runs"}) make_directories(out + d);
    RunLock lock(out);
    const json proof = compare_proof(parts);
    std::printf("%s: %zu runs, differing in the encoding only\n", out.c_str(), parts.size());
    print_proof(proof);
    for (const ComparePart& p : parts)
        write_file_atomically(out + "/configs/" + p.config.run.name + ".json", to_json(p.config).dump(2) + "\n");

    catch_interrupts(false);
    const std::map<std::string, std::string> failed = PartRunner(parts, out, o.jobs).run();
    if (interrupted()) {
        std::printf("stopped, everything so far is saved; the same command goes on\n");
        return kExitInterrupted;
    }
    json results = compare_results(parts);
    results["proof"] = proof;
    results["failed"] = failed;
    const std::string table = results_table(results);
    write_file_atomically(out + "/compare.json", results.dump(2) + "\n");
    write_file_atomically(out + "/table.txt", table);
    write_file_atomically(out + "/table.csv", results_csv(results));
    std::printf("\n%s\n%s: compare.json, table.txt, table.csv; pictures: bam report %s\n", table.c_str(), out.c_str(), out.c_str());
    return failed.empty() ? kExitDone : kExitFailure;
}

}  // namespace bam
