// Files mapped read-only. One that is cut short, or whose disk fails, while it is in use ends the program with a line that names it and
// exit code 3, in place of SIGBUS.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace bam {

struct MappedFile {
    std::shared_ptr<const char> data;
    int64_t size = 0;  // bytes
};

// kind: what is expected there ("a token shard"), for messages. Errors: Error(kExitData) naming the file: it cannot be opened, is not a
// regular file, or has fewer than `least` (>= 1) bytes.
MappedFile map_file(const std::string& path, int64_t least, const std::string& kind);

}  // namespace bam
