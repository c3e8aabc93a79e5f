#include "metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "check.h"

namespace bam {

MetricsLog::MetricsLog(const std::string& path) : path_(path) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd_ < 0) throw Error(kExitFailure, path + ": cannot write: " + std::strerror(errno));
    try {
        char last = '\n';
        const off_t size = ::lseek(fd_, 0, SEEK_END);
        if (size > 0 && ::pread(fd_, &last, 1, size - 1) == 1 && last != '\n') write("\n");
    } catch (...) {
        ::close(fd_);
        throw;
    }
}

MetricsLog::~MetricsLog() {
    ::close(fd_);
}

// One write() a line: another reader never sees half of it, except on a full disk.
void MetricsLog::write(const std::string& text) {
    for (size_t done = 0; done < text.size();) {
        const ssize_t n = ::write(fd_, text.data() + done, text.size() - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) throw Error(kExitFailure, path_ + ": cannot write: " + std::strerror(errno));
        done += size_t(n);
    }
}

void MetricsLog::log(const nlohmann::ordered_json& object) {
    // dump() prints doubles shortest round-trip and what is not finite as null; text that is not UTF-8 must not end a
    // run.
    write(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace bam
