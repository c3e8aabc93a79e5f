#include "durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "check.h"

namespace bam {

namespace {

constexpr int64_t kBlock = 1 << 20;  // written, then hashed while it is in the cache

[[noreturn]] void fail(const std::string& path, const char* what) {
    throw Error(kExitFailure, path + ": cannot " + what + ": " + std::strerror(errno));
}

}  // namespace

DurableFile::DurableFile(const std::string& path) : path_(path) {
    fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail(path, "write");
    hash_ = XXH64_createState();
    XXH64_reset(static_cast<XXH64_state_t*>(hash_), 0);
}

DurableFile::~DurableFile() {
    XXH64_freeState(static_cast<XXH64_state_t*>(hash_));
    if (fd_ < 0) return;
    ::close(fd_);
    ::unlink(path_.c_str());
}

void DurableFile::write(const void* data, int64_t bytes) {
    const char* at = static_cast<const char*>(data);
    for (const char* end = at + bytes; at < end;) {
        const ssize_t n = ::write(fd_, at, size_t(std::min(kBlock, int64_t(end - at))));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(path_, "write");
        XXH64_update(static_cast<XXH64_state_t*>(hash_), at, size_t(n));
        at += n;
    }
}

uint64_t DurableFile::finish() {
    if (::fsync(fd_)) fail(path_, "write");
    const int fd = fd_;
    fd_ = -1;
    if (::close(fd)) {
        const int reason = errno;
        ::unlink(path_.c_str());
        errno = reason;
        fail(path_, "write");
    }
    return XXH64_digest(static_cast<XXH64_state_t*>(hash_));
}

TemporaryDirectory::TemporaryDirectory(const std::string& path) : path(path) {
    make_directories(path);
}

TemporaryDirectory::~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}

void write_file_atomically(const std::string& path, const std::string& content) {
    const std::string temporary = path + ".tmp-" + std::to_string(::getpid());
    DurableFile file(temporary);
    file.write(content.data(), int64_t(content.size()));
    file.finish();
    if (::rename(temporary.c_str(), path.c_str())) {
        const int reason = errno;
        ::unlink(temporary.c_str());
        errno = reason;
        fail(path, "write");
    }
    const std::string parent = std::filesystem::path(path).parent_path();
    sync_directory(parent.empty() ? "." : parent);
}

void sync_directory(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail(path, "open");
    // Some network file systems cannot sync a directory and say EINVAL.
    const bool failed = ::fsync(fd) && errno != EINVAL;
    const int reason = errno;
    ::close(fd);
    errno = reason;
    if (failed) fail(path, "sync");
}

void make_directories(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (!error && !std::filesystem::is_directory(path)) error = std::make_error_code(std::errc::not_a_directory);
    if (error) throw Error(kExitFailure, path + ": cannot make the directory: " + error.message());
}

uint64_t hash_file(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw Error(kExitData, path + ": " + std::strerror(errno));
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    XXH64_state_t* state = XXH64_createState();
    XXH64_reset(state, 0);
    std::vector<char> block(kBlock);
    ssize_t n;
    while ((n = ::read(fd, block.data(), block.size())) > 0) XXH64_update(state, block.data(), size_t(n));
    const int reason = errno;
    const uint64_t hash = XXH64_digest(state);
    XXH64_freeState(state);
    ::close(fd);
    if (n < 0) throw Error(kExitData, path + ": " + std::strerror(reason));
    return hash;
}

std::string hex_of(uint64_t hash) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

}  // namespace bam
