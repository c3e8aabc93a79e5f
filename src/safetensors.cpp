#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "check.h"
#include "durable_file.h"
#include "json.h"
#include "tensor.h"

namespace bam {

namespace {

using Json = nlohmann::json;

constexpr int64_t kAlign = 64;               // of the data's start in files we write
constexpr int64_t kMaxHeader = 100'000'000;  // as in the reference implementation

// Bytes an element; 0: no such type.
int64_t element_size(const std::string& dtype) {
    if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
    if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
    if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
    if (dtype == "BOOL" || dtype == "U8" || dtype == "I8" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
    return 0;
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string t;
    for (int64_t d : shape) t += (t.empty() ? "" : ", ") + std::to_string(d);
    return "[" + t + "]";
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw Error(kExitData, path + ": " + what);
}

// A non-negative integer that fits int64, or -1.
int64_t natural(const Json& j) {
    if (!j.is_number_unsigned() || j.get<uint64_t>() > uint64_t(INT64_MAX)) return -1;
    return int64_t(j.get<uint64_t>());
}

std::vector<int64_t> naturals(const Json& j, const std::string& where, const std::string& path) {
    std::vector<int64_t> values;
    const bool list = j.is_array();
    if (list)
        for (const Json& v : j) values.push_back(natural(v));
    if (!list || std::count(values.begin(), values.end(), -1))
        fail(path, where + " is " + j.dump(-1, ' ', false, Json::error_handler_t::replace) +
                       ", expected a list of integers >= 0");
    return values;
}

SafetensorsEntry parse_entry(const std::string& name, const Json& j, int64_t data_size, const std::string& path) {
    const std::string at = "tensor " + name + ": ";
    for (const char* key : {"dtype", "shape", "data_offsets"})
        if (!j.is_object() || !j.contains(key)) fail(path, at + key + " is missing");
    SafetensorsEntry e;
    if (j["dtype"].is_string()) e.dtype = j["dtype"].get<std::string>();
    const int64_t width = element_size(e.dtype);
    if (!width)
        fail(path, at + "dtype is " + j["dtype"].dump(-1, ' ', false, Json::error_handler_t::replace) +
                       ", expected one like F32 or BF16");
    e.shape = naturals(j["shape"], at + "shape", path);
    const std::vector<int64_t> offsets = naturals(j["data_offsets"], at + "data_offsets", path);
    if (offsets.size() != 2) fail(path, at + std::to_string(offsets.size()) + " data_offsets, expected 2");
    e.begin = offsets[0], e.end = offsets[1];
    if (e.begin > e.end || e.end > data_size)
        fail(path, at + "data_offsets " + shape_text(offsets) + ", expected ascending ones within " +
                       std::to_string(data_size) + " bytes");
    int64_t bytes = width;
    bool overflow = false;
    for (int64_t d : e.shape) overflow |= __builtin_mul_overflow(bytes, d, &bytes);
    if (overflow || bytes != e.end - e.begin)
        fail(path,
             at + std::to_string(e.end - e.begin) + " bytes, expected " + e.dtype + " of shape " + shape_text(e.shape));
    return e;
}

// The format wants every byte behind the header to belong to exactly one tensor.
void check_cover(const std::map<std::string, SafetensorsEntry>& entries, int64_t data_size, const std::string& path) {
    std::vector<std::pair<const std::string*, const SafetensorsEntry*>> order;
    for (const auto& [name, e] : entries) order.push_back({&name, &e});
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
    });
    int64_t at = 0;
    for (const auto& [name, e] : order) {
        if (e->begin != at)
            fail(path, "tensor " + *name + ": begins at byte " + std::to_string(e->begin) + " of the data, expected " +
                           std::to_string(at) + (e->begin < at ? ": it overlaps another" : ": a gap"));
        at = e->end;
    }
    if (at != data_size)
        fail(path, std::to_string(data_size) + " bytes of data, expected " + std::to_string(at) + " for its tensors");
}

}  // namespace

int64_t SafetensorsEntry::numel() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), file_(map_file(path, 8, "a safetensors file")) { parse_header(); }

void SafetensorsFile::parse_header() {
    uint64_t header = 0;
    std::memcpy(&header, file_.data.get(), 8);
    const int64_t limit = std::min(file_.size - 8, kMaxHeader);
    if (header > uint64_t(limit))
        fail(path_, "header of " + std::to_string(header) + " bytes, expected at most " + std::to_string(limit) +
                        ": truncated, or not a safetensors file");
    data_begin_ = 8 + int64_t(header);
    const Json j = parse_json<Json>(std::string(file_.data.get() + 8, header), path_ + ": header", kExitData);
    if (!j.is_object()) fail(path_, "header: expected a JSON object");
    for (const auto& [name, value] : j.items()) {
        if (name != "__metadata__") {
            entries_[name] = parse_entry(name, value, file_.size - data_begin_, path_);
            continue;
        }
        if (!value.is_object()) fail(path_, "__metadata__: expected an object of strings");
        for (const auto& [key, text] : value.items()) {
            if (!text.is_string()) fail(path_, "__metadata__: " + key + ": expected a string");
            metadata_[key] = text.get<std::string>();
        }
    }
    check_cover(entries_, file_.size - data_begin_, path_);
}

const SafetensorsEntry& SafetensorsFile::entry(const std::string& name) const {
    const auto it = entries_.find(name);
    if (it == entries_.end()) fail(path_, "tensor " + name + " is missing");
    return it->second;
}

const void* SafetensorsFile::data(const std::string& name) const {
    return file_.data.get() + data_begin_ + entry(name).begin;
}

std::vector<float> SafetensorsFile::floats(const std::string& name) const {
    std::vector<float> values(size_t(entry(name).numel()));
    copy_floats(name, values.data());
    return values;
}

void SafetensorsFile::copy_floats(const std::string& name, float* out) const {
    const SafetensorsEntry& e = entry(name);
    const char* from = static_cast<const char*>(data(name));
    if (e.begin == e.end) return;
    if (e.dtype == "F32") {
        std::memcpy(out, from, size_t(e.end - e.begin));
    } else if (e.dtype == "BF16") {
        for (int64_t i = 0, n = e.numel(); i < n; i++) {
            bf16 x;
            std::memcpy(&x, from + 2 * i, 2);  // foreign files need not be aligned
            out[i] = to_float(x);
        }
    } else {
        fail(path_, "tensor " + name + ": dtype " + e.dtype + ", expected F32 or BF16");
    }
}

std::vector<int32_t> SafetensorsFile::ints(const std::string& name) const {
    const SafetensorsEntry& e = entry(name);
    std::vector<int32_t> values(size_t(e.numel()));
    const char* from = static_cast<const char*>(data(name));
    if (values.empty()) return values;
    if (e.dtype == "I32") {
        std::memcpy(values.data(), from, size_t(e.end - e.begin));
    } else if (e.dtype == "I64") {
        for (size_t i = 0; i < values.size(); i++) {
            int64_t x;
            std::memcpy(&x, from + 8 * i, 8);
            if (x != int32_t(x)) fail(path_, "tensor " + name + ": " + std::to_string(x) + " does not fit 32 bits");
            values[i] = int32_t(x);
        }
    } else {
        fail(path_, "tensor " + name + ": dtype " + e.dtype + ", expected I32 or I64");
    }
    return values;
}

uint64_t write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                           const std::map<std::string, std::string>& metadata) {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    std::vector<int64_t> bytes;
    int64_t at = 0;
    for (const SafetensorsItem& item : items) {
        int64_t n = element_size(item.dtype);
        for (int64_t d : item.shape) n *= d;
        if (!element_size(item.dtype) || header.contains(item.name)) throw std::logic_error("tensor " + item.name);
        header[item.name] = {{"dtype", item.dtype}, {"shape", item.shape}, {"data_offsets", {at, at + n}}};
        bytes.push_back(n);
        at += n;
    }
    std::string text = header.dump();
    text.resize((8 + text.size() + kAlign - 1) / kAlign * kAlign - 8, ' ');
    const uint64_t size = text.size();

    DurableFile file(path);
    file.write(&size, 8);
    file.write(text.data(), int64_t(text.size()));
    for (size_t i = 0; i < items.size(); i++) file.write(items[i].data, bytes[i]);
    return file.finish();
}

}  // namespace bam
