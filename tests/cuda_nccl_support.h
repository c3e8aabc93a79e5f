// What tests of the emulated NCCL share: ranks, each in a process of its own, and what they say when they end.
#pragma once
#include <nccl.h>
#include <regex.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <string>

#include "cuda_support.h"

namespace bam {

struct Ended {
    int status;
    std::string said;  // to stderr
    bool well() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
    bool aborted() const { return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT; }
};
inline bool says(const Ended& e, const std::string& pattern) {
    regex_t regex;
    EXPECT_EQ(regcomp(&regex, pattern.c_str(), REG_EXTENDED | REG_NOSUB), 0) << pattern;
    const bool found = regexec(&regex, e.said.c_str(), 0, nullptr, 0) == 0;
    regfree(&regex);
    return found;
}

// Runs f(0) ... f(n - 1), each in a process of its own. They are forked: what they inherit of the emulation has nothing queued. All are
// zombies until the last has closed its stderr, so a rank that is lost must be noticed as one.
inline std::vector<Ended> run_ranks(int n, const std::function<void(int)>& f) {
    std::vector<int> processes, pipes;
    for (int rank = 0; rank < n; ++rank) {
        int ends[2];
        EXPECT_EQ(pipe(ends), 0);
        const int process = fork();
        if (process == 0) {
            dup2(ends[1], 2);
            alarm(40);
            f(rank);
            _exit(0);
        }
        close(ends[1]);
        processes.push_back(process);
        pipes.push_back(ends[0]);
    }
    std::vector<Ended> ended(static_cast<size_t>(n));
    for (size_t r = 0; r < ended.size(); ++r) {
        char buffer[4096];
        for (ssize_t got; (got = read(pipes[r], buffer, sizeof buffer)) > 0;) ended[r].said.append(buffer, size_t(got));
        close(pipes[r]);
    }
    for (size_t r = 0; r < ended.size(); ++r) waitpid(processes[r], &ended[r].status, 0);
    return ended;
}

inline void expect_well(const std::vector<Ended>& ended) {
    for (const Ended& e : ended) EXPECT_TRUE(e.well()) << "status " << e.status << ": " << e.said;
}
// Each rank must die with one of these lines.
inline void expect_all_die(const std::vector<Ended>& ended, const std::string& with) {
    for (const Ended& e : ended) {
        EXPECT_TRUE(e.aborted()) << "status " << e.status;
        EXPECT_NE(e.said.find("emu: " + with + "\n"), std::string::npos) << "expected " << with << "\nit said " << e.said;
    }
}

// In a rank.
inline void require(bool condition, const char* what, int line = __builtin_LINE()) {
    if (condition) return;
    fprintf(stderr, "line %d: not so: %s\n", line, what);
    _exit(1);
}

// What processes forked later share with this one.
template <typename T>
struct Common {
    size_t n;
    T* p;
    explicit Common(size_t n) : n(n) {
        p = static_cast<T*>(mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    }
    ~Common() { munmap(p, n * sizeof(T)); }
};

inline ncclUniqueId new_id() {
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    return id;
}

// A rank with a stream, memory and a communicator.
struct Rank : Device {
    int ranks, rank;
    ncclComm_t comm = nullptr;
    Rank(const ncclUniqueId& id, int ranks, int rank) : ranks(ranks), rank(rank) {
        require(ncclCommInitRank(&comm, ranks, id, rank) == ncclSuccess, "ncclCommInitRank");
    }
    // Unlike Device, waits before what it holds goes.
    void finish() {
        cudaStreamSynchronize(stream);
        require(ncclCommDestroy(comm) == ncclSuccess, "ncclCommDestroy");
    }
    void all_reduce(float* p, size_t n) { require(ncclAllReduce(p, p, n, ncclFloat32, ncclSum, comm, stream) == ncclSuccess, "ncclAllReduce"); }
};

// Runs f(rank) on n ranks of one communicator.
inline std::vector<Ended> run_comm(int n, const std::function<void(Rank&)>& f) {
    const ncclUniqueId id = new_id();
    return run_ranks(n, [&](int rank) {
        Rank r(id, n, rank);
        f(r);
        r.finish();
    });
}

template <typename F>
void in_stream_orders(F f) {
    WithOptions restore;
    for (Streams streams : {Streams::lazy, Streams::eager, Streams::random}) {
        emu::options().streams = streams;
        SCOPED_TRACE(testing::Message() << "streams " << int(streams));
        f();
    }
}

}  // namespace bam
