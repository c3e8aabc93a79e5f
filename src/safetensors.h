// The safetensors file format: 8-byte little-endian header size, JSON header, dense little-endian data.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "mapped_file.h"

namespace bam {

struct SafetensorsEntry {
    std::string dtype;  // "F32", "BF16", "I32", ...
    std::vector<int64_t> shape;
    int64_t begin = 0, end = 0;  // bytes behind the header
    int64_t numel() const;
};

// A memory-mapped file, checked on opening: header inside the file, offsets in range, sizes that match dtype and shape.
// Errors: Error(kExitData) naming the file and what is wrong.
class SafetensorsFile {
public:
    explicit SafetensorsFile(const std::string& path);
    const std::string& path() const { return path_; }
    const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
    const std::map<std::string, std::string>& metadata() const { return metadata_; }
    bool has(const std::string& name) const { return entries_.count(name) > 0; }
    const SafetensorsEntry& entry(const std::string& name) const;  // Error(kExitData) if missing
    const void* data(const std::string& name) const;
    std::vector<float> floats(const std::string& name) const;     // F32 or BF16, as fp32
    void copy_floats(const std::string& name, float* out) const;  // the same into numel() elements
    std::vector<int32_t> ints(const std::string& name) const;     // I32 or I64

private:
    void parse_header();
    std::string path_;
    MappedFile file_;
    int64_t data_begin_ = 0;
    std::map<std::string, SafetensorsEntry> entries_;
    std::map<std::string, std::string> metadata_;
};

struct SafetensorsItem {
    std::string name, dtype;
    std::vector<int64_t> shape;
    const void* data;
};

// Writes the items in order and fsyncs; the data begins at a multiple of 64 bytes. Returns the file's xxh64. Errors:
// Error(kExitFailure) naming the file and the system's reason; a partial file is removed.
uint64_t write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                           const std::map<std::string, std::string>& metadata = {});

}  // namespace bam
