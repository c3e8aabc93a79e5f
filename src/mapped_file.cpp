#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "check.h"

namespace bam {
namespace {

// What the signal handler can read at any moment: a list that only grows, at its head, and only under the lock.
struct Mapping {
    std::atomic<const char*> begin{nullptr};  // nullptr: free
    std::atomic<int64_t> size{0};
    char line[1024];
    Mapping* next = nullptr;
};
std::atomic<Mapping*> mappings{nullptr};
std::mutex lock;

extern "C" void bam_on_bus_error(int, siginfo_t* info, void*) {
    const char* address = static_cast<const char*>(info->si_addr);
    for (const Mapping* m = mappings; m; m = m->next) {
        const char* begin = m->begin;
        if (!begin || address < begin || address >= begin + m->size) continue;
        if (::write(2, m->line, std::strlen(m->line))) {}
        ::_exit(kExitData);
    }
    std::signal(SIGBUS, SIG_DFL);  // not ours: again, and without us
}

Mapping* remember(const std::string& path, const void* p, int64_t size) {
    static const bool once = [] {
        struct sigaction a {};
        a.sa_sigaction = bam_on_bus_error;
        a.sa_flags = SA_SIGINFO;
        return ::sigaction(SIGBUS, &a, nullptr) == 0;
    }();
    (void)once;
    const std::lock_guard guard(lock);
    Mapping* m = mappings;
    while (m && m->begin) m = m->next;
    if (!m) {
        m = new Mapping;
        m->next = mappings;
        mappings = m;
    }
    std::snprintf(m->line, sizeof m->line, "bam: %.900s: became shorter, or cannot be read any more, while in use\n", path.c_str());
    m->size = size;
    m->begin = static_cast<const char*>(p);
    return m;
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) { throw Error(kExitData, path + ": " + what); }

}  // namespace

MappedFile map_file(const std::string& path, int64_t least, const std::string& kind) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not block
    if (fd < 0) refuse(path, std::string("cannot open: ") + std::strerror(errno));
    struct stat st {};
    const bool regular = ::fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    const int64_t size = regular ? st.st_size : 0;
    void* p = size >= least ? ::mmap(nullptr, size_t(size), PROT_READ, MAP_SHARED, fd, 0) : nullptr;
    const int error = errno;
    ::close(fd);
    if (!regular) refuse(path, "not a regular file, expected " + kind);
    if (size < least) refuse(path, std::to_string(size) + " bytes, expected " + kind + " of at least " + std::to_string(least));
    if (p == MAP_FAILED) refuse(path, std::string("cannot map: ") + std::strerror(error));
    Mapping* place = remember(path, p, size);
    return {std::shared_ptr<const char>(static_cast<const char*>(p),
                                        [size, place](const char* q) {
                                            const std::lock_guard guard(lock);
                                            place->begin = nullptr;
                                            ::munmap(const_cast<char*>(q), size_t(size));
                                        }),
            size};
}

}  // namespace bam
