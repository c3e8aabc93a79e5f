#include "report.h"

#include <spawn.h>
#include <sys/wait.h>

#include <filesystem>

#include "check.h"

extern char** environ;

namespace bam {

namespace fs = std::filesystem;

static fs::path find_script() {
    const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
    for (const char* relative : {"../../scripts/report.py", "../share/bam/report.py"})
        if (fs::exists(here / relative)) return fs::weakly_canonical(here / relative);
    throw Error(kExitFailure, "scripts/report.py is not beside this program (" + here.string() + "), expected ../../scripts or ../share/bam");
}

int report(const std::vector<std::string>& directories, const std::string& out, const std::string& title) {
    for (const std::string& d : directories)
        if (!fs::is_directory(d)) throw Error(kExitData, d + ": no such directory, expected a run or comparison directory");
    std::vector<std::string> args = {"python3", find_script().string()};
    args.insert(args.end(), directories.begin(), directories.end());
    args.insert(args.end(), {"-o", out.empty() ? (fs::path(directories.front()) / "report").string() : out});
    if (!title.empty()) args.insert(args.end(), {"--title", title});
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_t pid = -1;
    if (posix_spawnp(&pid, "python3", nullptr, nullptr, argv.data(), environ) != 0)
        throw Error(kExitFailure, "python3 is missing: scripts/install_deps.sh report");
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : int(kExitFailure);
}

}  // namespace bam
