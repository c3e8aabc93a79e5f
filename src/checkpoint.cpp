// Checkpoints: a model directory, optimizer.safetensors and state.json, which holds the hashes of the others and of
// itself.
#include "checkpoint.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <xxhash.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "check.h"
#include "json.h"
#include "json_fields.h"
#include "model_files.h"

namespace bam {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kState = "state.json";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kTemporary = ".tmp-";

std::string checkpoints_of(const std::string& run_dir) {
    return run_dir + "/checkpoints";
}

std::string step_name(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof name, "step_%08lld", static_cast<long long>(step));
    return name;
}

// ---- state.json ---------------------------------------------------------------------------------------------------
// Its last member is the xxh64 of its text with these zeros in the place of the digits.

const std::string kNoHash(16, '0');

std::string seal(Json j) {
    j["xxh64"] = kNoHash;
    std::string text = j.dump(1) + "\n";
    text.replace(text.rfind(kNoHash), kNoHash.size(), hex_of(XXH64(text.data(), text.size(), 0)));
    return text;
}

// Errors: Error(kExitData).
Json read_sealed(const std::string& path) {
    std::string text = read_text_file(path, kExitData);
    const std::string key = "\"xxh64\": \"";
    const size_t at = text.rfind(key);
    if (at == std::string::npos || at + key.size() + kNoHash.size() > text.size())
        throw Error(kExitData, path + ": no xxh64 at its end: truncated, or not a checkpoint's");
    const std::string expected = text.substr(at + key.size(), kNoHash.size());
    text.replace(at + key.size(), kNoHash.size(), kNoHash);
    const std::string found = hex_of(XXH64(text.data(), text.size(), 0));
    if (found != expected) throw Error(kExitData, path + ": xxh64 " + found + ", expected " + expected);
    return parse_json<Json>(text, path, kExitData);
}

struct FileRecord {
    int64_t bytes = 0;
    std::string hash;
};

struct State {
    std::string format = "bam-checkpoint";
    int version = 1;
    TrainState train;
    std::string data_fingerprint;
    std::map<std::string, FileRecord> files;
};

template <class Io>
void fields(Io& io, State& s) {
    constexpr int64_t any = std::numeric_limits<int64_t>::max();
    io.choice("format", s.format, Names<std::string>{{"bam-checkpoint", "bam-checkpoint"}});
    io.integer("version", s.version, 1, 1);
    io.integer("step", s.train.step, 0, any);
    io.integer("rows_consumed", s.train.rows_consumed, 0, any);
    io.integer("tokens", s.train.tokens, 0, any);
    io.integer("skipped_steps", s.train.skipped_steps, 0, any);
    io.text("data_fingerprint", s.data_fingerprint);
    io.section("files", [&](Io& files) {
        for (const char* name : {kModelConfig, kModelWeights, kOptimizer})
            files.section(name, [&](Io& f) {
                f.integer("bytes", s.files[name].bytes, 0, any);
                f.text("xxh64", s.files[name].hash);
            });
    });
}

// Takes "config" out of the object and reads the rest.
State parse_state(Json j, const std::string& path, Config* config) {
    const JsonSource source{.file = path, .code = kExitData};
    if (!j.contains("config")) source.fail("config", "missing");
    try {
        if (config) *config = parse_config(j["config"], path + ": config");
    } catch (const Error& e) {
        throw Error(kExitData, e.what());
    }
    for (const char* taken : {"config", "xxh64"}) j.erase(taken);
    State s;
    FieldReader io(source, "", j);
    fields(io, s);
    io.finish();
    s.train.data_fingerprint = std::strtoull(s.data_fingerprint.c_str(), nullptr, 16);
    return s;
}

// Empty, or what is wrong with one file of a checkpoint.
std::string check_file(const std::string& dir, const std::string& name, const FileRecord& record) {
    const std::string path = dir + "/" + name;
    struct stat info {};
    if (::stat(path.c_str(), &info)) return path + ": " + std::strerror(errno);
    if (info.st_size != record.bytes)
        return path + ": " + std::to_string(info.st_size) + " bytes, expected " + std::to_string(record.bytes);
    const std::string found = hex_of(hash_file(path));
    return found == record.hash ? "" : path + ": xxh64 " + found + ", expected " + record.hash;
}

// ---- directories ---------------------------------------------------------------------------------------------------

// Temporary directories end in the pid that made them. With our own pid they are from an earlier life (pids start again
// in a container), because a process writes one checkpoint at a time.
void remove_stale(const std::string& checkpoints) {
    std::error_code ignored;
    for (const fs::directory_entry& e : fs::directory_iterator(checkpoints, ignored)) {
        const std::string name = e.path().filename();
        if (!name.starts_with(kTemporary)) continue;
        const long pid = std::atol(name.substr(name.rfind('-') + 1).c_str());
        const bool alive = pid > 0 && pid != ::getpid() && (::kill(pid_t(pid), 0) == 0 || errno == EPERM);
        if (!alive) fs::remove_all(e.path(), ignored);
    }
}

// Puts `temporary` in the place of `path`. What was at `path` is then at `temporary`, or gone.
void put_in_place(const std::string& temporary, const std::string& path) {
    const auto move = [](const std::string& from, const std::string& to) {
        return ::rename(from.c_str(), to.c_str()) == 0;
    };
    if (move(temporary, path)) return;
    const bool occupied = errno == ENOTEMPTY || errno == EEXIST;
    if (occupied && ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) return;
    // A file system that cannot exchange: for a moment this step is missing, older checkpoints are there.
    const std::string old = temporary + "-" + std::to_string(::getpid());
    if (occupied && move(path, old)) {
        const bool moved = move(temporary, path);
        if (!moved) move(old, path);
        std::error_code ignored;
        fs::remove_all(old, ignored);
        if (moved) return;
    }
    throw Error(kExitFailure, path + ": cannot put a new checkpoint here: " + std::strerror(errno));
}

std::string check_state(const std::string& dir, std::vector<std::string> names) {
    try {
        const State s = parse_state(read_sealed(dir + "/" + kState), dir + "/" + kState, nullptr);
        for (const std::string& name : names) {
            const std::string wrong = check_file(dir, name, s.files.at(name));
            if (!wrong.empty()) return wrong;
        }
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

CheckpointInfo newest(const std::string& run_dir, const std::vector<std::string>& names, const Told& skipped) {
    const std::vector<CheckpointInfo> all = list_checkpoints(run_dir);
    for (auto c = all.rbegin(); c != all.rend(); ++c) {
        const std::string wrong = check_state(c->path, names);
        if (wrong.empty()) return *c;
        if (skipped) skipped("skipped a checkpoint: " + wrong);
    }
    return {"", -1};
}

// ---- resuming ------------------------------------------------------------------------------------------------------

// DESIGN §4: what may differ on resume because it changes no number, or, like the dtype "auto", was resolved then.
bool may_change(const std::string& path, const Json& wanted) {
    static const std::vector<std::string> free = {"run.name",
                                                  "run.out",
                                                  "run.device",
                                                  "run.threads",
                                                  "model.preset",
                                                  "model.init_from",
                                                  "eval",
                                                  "train.micro_batch",
                                                  "train.val_every",
                                                  "train.sample_every",
                                                  "train.keep_last",
                                                  "train.keep_every",
                                                  "train.recompute",
                                                  "train.checkpoint_every",
                                                  "train.log_priors_every"};
    return std::find(free.begin(), free.end(), path) != free.end() || (path == "run.dtype" && wanted == "auto");
}

void compare(const Json& saved, const Json& wanted, const std::string& at, std::vector<std::string>& conflicts) {
    if (may_change(at, wanted) || saved == wanted) return;
    if (!saved.is_object() || !wanted.is_object()) {
        conflicts.push_back(at + ": " + saved.dump() + " in the checkpoint, " + wanted.dump() + " now");
        return;
    }
    for (const auto& [key, value] : wanted.items())
        compare(saved.value(key, Json()), value, at.empty() ? key : at + "." + key, conflicts);
}

}  // namespace

void write_checkpoint(const std::string& run_dir, const Config& c, const ModelExtras& e, const TrainState& s,
                      const CheckpointData& d) {
    const std::string checkpoints = checkpoints_of(run_dir), name = step_name(s.step);
    make_directories(checkpoints);
    sync_directory(run_dir);
    remove_stale(checkpoints);
    const TemporaryDirectory temporary(checkpoints + "/" + kTemporary + name + "-" + std::to_string(::getpid()));

    std::map<std::string, uint64_t> hashes = write_model_files(temporary.path, c.model, e, *d.table, d.weights);
    hashes[kOptimizer] = write_moments(temporary.path + "/" + kOptimizer, *d.table, d.m, d.v);
    State state;
    state.train = s;
    state.data_fingerprint = hex_of(s.data_fingerprint);
    for (const auto& [file, hash] : hashes)
        state.files[file] = {int64_t(fs::file_size(temporary.path + "/" + file)), hex_of(hash)};
    Json j;
    FieldWriter io(j);
    fields(io, state);
    j["config"] = to_json(c);
    DurableFile file(temporary.path + "/" + kState);
    const std::string text = seal(j);
    file.write(text.data(), int64_t(text.size()));
    file.finish();
    sync_directory(temporary.path);

    put_in_place(temporary.path, checkpoints + "/" + name);
    sync_directory(checkpoints);
}

std::vector<CheckpointInfo> list_checkpoints(const std::string& run_dir) {
    std::vector<CheckpointInfo> found;
    std::error_code error;
    for (const fs::directory_entry& e : fs::directory_iterator(checkpoints_of(run_dir), error)) {
        const std::string name = e.path().filename();
        const std::string digits = name.starts_with("step_") ? name.substr(5) : "";
        const bool number =
            !digits.empty() && digits.size() < 19 && digits.find_first_not_of("0123456789") == std::string::npos;
        if (number && name == step_name(std::stoll(digits)) && e.is_directory(error))
            found.push_back({e.path(), std::stoll(digits)});
    }
    std::sort(found.begin(), found.end(),
              [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
    return found;
}

std::string verify_checkpoint(const std::string& dir) {
    return check_state(dir, {kModelConfig, kModelWeights, kOptimizer});
}

CheckpointInfo newest_good_checkpoint(const std::string& run_dir, const Told& skipped) {
    return newest(run_dir, {kModelConfig, kModelWeights, kOptimizer}, skipped);
}

std::string find_model(const std::string& path, const Told& skipped) {
    const std::vector<std::string> model = {kModelConfig, kModelWeights};
    struct stat info {};
    if (::stat(path.c_str(), &info)) throw Error(kExitData, path + ": " + std::strerror(errno));
    const std::string expected = "expected a model directory, a checkpoint or a run directory";
    if (!S_ISDIR(info.st_mode)) throw Error(kExitData, path + ": not a directory, " + expected);
    if (fs::exists(path + "/" + kState)) {
        const std::string wrong = check_state(path, model);
        if (!wrong.empty()) throw Error(kExitData, wrong);
        return path;
    }
    if (fs::exists(path + "/" + kModelConfig)) return path;
    if (!fs::is_directory(checkpoints_of(path)))
        throw Error(kExitData, path + ": neither " + kModelConfig + " nor checkpoints/ in it, " + expected);
    std::string first;
    const CheckpointInfo good = newest(path, model, [&](const std::string& line) {
        if (first.empty()) first = line;
        if (skipped) skipped(line);
    });
    if (good.path.empty())
        throw Error(kExitData, path + ": no good checkpoint in it" + (first.empty() ? "" : "; " + first));
    return good.path;
}

TrainState read_state(const std::string& dir, Config* config) {
    const std::string path = dir + "/" + kState;
    return parse_state(read_sealed(path), path, config).train;
}

void read_checkpoint(const std::string& dir, const CheckpointData& d) {
    read_weights(dir, *d.table, d.weights);
    read_moments(dir + "/" + kOptimizer, *d.table, d.m, d.v);
}

void prune_checkpoints(const std::string& run_dir, int keep_last, int64_t keep_every) {
    const std::vector<CheckpointInfo> all = list_checkpoints(run_dir);
    const size_t keep = size_t(std::max(keep_last, 1));
    for (size_t i = 0; i + keep < all.size(); i++) {
        if (keep_every > 0 && all[i].step % keep_every == 0) continue;
        // Hidden first: a process that dies here leaves no half a checkpoint under a checkpoint's name.
        const std::string hidden = checkpoints_of(run_dir) + "/" + kTemporary + "old-" + step_name(all[i].step) + "-" +
                                   std::to_string(::getpid());
        std::error_code error;
        fs::rename(all[i].path, hidden, error);
        if (!error) fs::remove_all(hidden, error);
        if (error) throw Error(kExitFailure, all[i].path + ": cannot remove: " + error.message());
    }
}

std::vector<std::string> resume_conflicts(const Config& saved, const Config& wanted) {
    std::vector<std::string> conflicts;
    compare(to_json(saved), to_json(wanted), "", conflicts);
    return conflicts;
}

RunLock::RunLock(const std::string& run_dir, double wait_seconds) {
    make_directories(run_dir);
    const std::string path = run_dir + "/lock";
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) throw Error(kExitFailure, path + ": " + std::strerror(errno));
    const auto locked = [&] { return ::flock(fd_, LOCK_EX | LOCK_NB) == 0; };
    bool mine = locked();
    while (!mine && errno == EWOULDBLOCK && wait_seconds > 0) {
        ::usleep(50'000);
        wait_seconds -= 0.05;
        mine = locked();
    }
    if (!mine) {
        const int reason = errno;
        char holder[32] = {};
        const bool known = ::pread(fd_, holder, sizeof holder - 1, 0) > 0;
        ::close(fd_);
        if (reason != EWOULDBLOCK) throw Error(kExitFailure, path + ": cannot lock: " + std::strerror(reason));
        throw Error(kExitFailure, run_dir + ": in use by process " + (known ? holder : "?") +
                                      ", expected one process a run directory");
    }
    const std::string pid = std::to_string(::getpid());
    // The pid is only for that message; the lock holds without it, on a full disk too.
    if (::ftruncate(fd_, 0) || ::pwrite(fd_, pid.data(), pid.size(), 0) < 0) return;
}

RunLock::~RunLock() {
    ::close(fd_);
}

}  // namespace bam
