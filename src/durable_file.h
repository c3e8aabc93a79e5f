// Files that are on disk when the call returns: written, hashed on the way, fsynced. Errors are Error(kExitFailure)
// naming the file and the system's reason (disk full, read-only, ...), and leave no partial file.
#pragma once
#include <cstdint>
#include <string>

namespace bam {

// A new file (an old one of that name is replaced), removed again unless finish() was reached.
class DurableFile {
public:
    explicit DurableFile(const std::string& path);
    ~DurableFile();
    DurableFile(const DurableFile&) = delete;
    void write(const void* data, int64_t bytes);
    uint64_t finish();  // fsync and close; the xxh64 of the content

private:
    std::string path_;
    int fd_ = -1;
    void* hash_ = nullptr;  // XXH64_state_t
};

// A directory for what is not finished; removed with all that is still in it at the end of the scope.
struct TemporaryDirectory {
    explicit TemporaryDirectory(const std::string& path);
    ~TemporaryDirectory();
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    const std::string path;
};

// Writes a whole file through a temporary one beside it: fsync, rename, fsync of the directory. The old file stays
// until the new one is whole.
void write_file_atomically(const std::string& path, const std::string& content);

void sync_directory(const std::string& path);    // makes renames and new names in it durable
void make_directories(const std::string& path);  // with parents; Error(kExitFailure) naming the path
uint64_t hash_file(const std::string& path);     // xxh64; Error(kExitData) if it cannot be read
std::string hex_of(uint64_t hash);               // 16 digits

}  // namespace bam
