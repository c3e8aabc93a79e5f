#include "resume.h"

#include <cstdio>
#include <filesystem>

#include "check.h"

namespace bam {

namespace fs = std::filesystem;

static void set_aside(const std::string& run_dir, const std::vector<fs::path>& what) {
    int n = 1;
    while (fs::exists(fs::path(run_dir) / ("replaced-" + std::to_string(n)))) ++n;
    const fs::path to = fs::path(run_dir) / ("replaced-" + std::to_string(n));
    bool made = false;
    for (const fs::path& p : what) {
        if (!fs::exists(p)) continue;
        if (!made) fs::create_directory(to);
        made = true;
        fs::rename(p, to / p.filename());
    }
}

static void take_open_settings(const Config& saved, Config& c) {
    if (c.run.threads == 0) c.run.threads = saved.run.threads;
    if (c.run.dtype == "auto") c.run.dtype = saved.run.dtype;
    if (c.train.micro_batch == 0) c.train.micro_batch = saved.train.micro_batch;
}

static std::string start_from(const std::string& run_dir, const std::string& path) {
    if (!fs::exists(fs::path(path) / "state.json"))
        throw Error(kExitData, path + ": no checkpoint (no state.json there), expected a directory like " + run_dir +
                                   "/checkpoints/step_00000500");
    const std::string damage = verify_checkpoint(path);
    if (!damage.empty()) throw Error(kExitData, path + ": damaged: " + damage);
    std::vector<fs::path> later;
    const bool own = fs::exists(run_dir) && fs::exists(fs::path(path).parent_path()) &&
                     fs::equivalent(fs::path(path) / "..", fs::path(run_dir) / "checkpoints");
    for (const CheckpointInfo& i : list_checkpoints(run_dir))
        if (!own || !fs::equivalent(i.path, path)) {
            Config ignored;
            if (!own || i.step > read_state(path, &ignored).step) later.push_back(i.path);
        }
    set_aside(run_dir, later);
    return path;
}

Start choose_start(const std::string& run_dir, const std::string& resume, bool force, Config& config, bool quiet) {
    Start start;
    if (resume == "no") {
        const fs::path run(run_dir);
        set_aside(run_dir, {run / "checkpoints", run / "metrics.jsonl", run / "samples.txt", run / "eval", run / "run.json"});
        return start;
    }
    if (resume == "auto") {
        start.checkpoint = newest_good_checkpoint(run_dir, [](const std::string& line) {
                               std::fprintf(stderr, "bam: %s\n", line.c_str());
                           }).path;
    } else {
        start.checkpoint = start_from(run_dir, resume);
    }
    if (start.checkpoint.empty()) return start;

    Config saved;
    start.state = read_state(start.checkpoint, &saved);
    take_open_settings(saved, config);
    const std::vector<std::string> conflicts = resume_conflicts(saved, config);
    if (!conflicts.empty() && !force) {
        std::string line = run_dir + ": cannot resume from step " + std::to_string(start.state.step) + ": ";
        for (size_t i = 0; i < conflicts.size(); ++i) line += (i ? "; " : "") + conflicts[i];
        throw Error(kExitUsage, line + " (use another run.name, --resume no, or --force-resume)");
    }
    if (!quiet)
        for (const std::string& c : conflicts) std::fprintf(stderr, "bam: resuming although %s\n", c.c_str());
    return start;
}

}  // namespace bam
