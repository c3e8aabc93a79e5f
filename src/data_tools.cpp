// Both read each shard front to back, once.
#include "data_tools.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>

#include "check.h"
#include "loader.h"

namespace bam {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

constexpr int64_t kChunk = 1 << 20;  // tokens read at once

// Calls act(first index, count, ids) for successive chunks of shard s.
template <class F>
void for_chunks(const TokenStream& stream, int64_t start, int64_t tokens, F&& act) {
    std::vector<int32_t> ids(size_t(std::min(kChunk, tokens)));
    for (int64_t i = 0; i < tokens; i += kChunk) {
        const int64_t n = std::min(kChunk, tokens - i);
        if (i + n < tokens) stream.will_need(start + i + n, std::min(kChunk, tokens - i - n));
        act(start + i, n, ids.data());
    }
}

struct ShardSummary {
    std::string path;
    int width = 2;
    int64_t tokens = 0, bytes = 0;
    int64_t max_id = -1;     // -1: no tokens
    int64_t documents = -1;  // -1: no separator known
};

ShardSummary summarize(const TokenStream& stream, size_t s, int64_t start, int64_t separator_id) {
    const Shard& shard = stream.shards()[s];
    ShardSummary r{shard.path, shard.width, shard.n_tokens, kShardHeaderBytes + shard.n_tokens * shard.width};
    if (separator_id < 0) {
        if (const auto d = dataset_of_shard(shard.path)) separator_id = d->separator_id;
    }
    if (separator_id >= 0) r.documents = 0;
    for_chunks(stream, start, shard.n_tokens, [&](int64_t first, int64_t n, int32_t* ids) {
        stream.read(first, n, ids);
        uint32_t largest = 0;
        for (int64_t i = 0; i < n; i++) largest = std::max(largest, uint32_t(ids[i]));
        r.max_id = std::max(r.max_id, int64_t(largest));
        if (separator_id >= 0) r.documents += std::count(ids, ids + n, int32_t(separator_id));
    });
    return r;
}

// A column of text: as wide as asked, numbers to the right.
std::string right(const std::string& s, size_t width) {
    return std::string(width - std::min(width, s.size()), ' ') + s;
}
std::string number_or_dash(int64_t n) {
    return n < 0 ? "-" : std::to_string(n);
}

void print_row(std::ostream& out, const std::string& name, const ShardSummary& r, size_t width) {
    out << name << std::string(width - name.size(), ' ')
        << right(r.width ? (r.width == 2 ? "uint16" : "uint32") : "", 8) << right(std::to_string(r.tokens), 16)
        << right(number_or_dash(r.max_id), 12) << right(number_or_dash(r.documents), 13)
        << right(std::to_string(r.bytes), 17) << "\n";
}

ordered_json or_null(int64_t n) {
    return n < 0 ? ordered_json() : ordered_json(n);
}

ordered_json to_json(const ShardSummary& r) {
    return {
        {"tokens", r.tokens}, {"max_id", or_null(r.max_id)}, {"documents", or_null(r.documents)}, {"bytes", r.bytes}};
}

// What a dataset.json claims of a shard and of its tokenizer's file.
void check_claims(const DatasetInfo& d, const Shard& shard) {
    const std::string name = fs::path(shard.path).filename().string();
    for (const DatasetPart* p : {&d.train, &d.val}) {
        for (const auto& f : p->files) {
            if (f.name == name && f.tokens != shard.n_tokens) {
                throw Error(kExitData, shard.path + ": " + std::to_string(shard.n_tokens) + " tokens, expected the " +
                                           std::to_string(f.tokens) + " of dataset.json");
            }
        }
    }
    const std::string path = (fs::path(d.directory) / d.tokenizer_file).string();
    if (load_tokenizer(path)->fingerprint() != d.tokenizer_fingerprint) {
        throw Error(kExitData,
                    path + ": another tokenizer than the one dataset.json was made with (fingerprints differ)");
    }
}

}  // namespace

void data_info(const DataInfoOptions& o, std::ostream& out) {
    const TokenStream stream(o.patterns);
    std::vector<ShardSummary> rows;
    ShardSummary total;
    total.width = 0;
    total.documents = 0;
    size_t width = 5;
    int64_t start = 0;
    for (size_t s = 0; s < stream.shards().size(); s++) {
        rows.push_back(summarize(stream, s, start, o.separator_id));
        const ShardSummary& r = rows.back();
        start += r.tokens;
        total.tokens += r.tokens;
        total.bytes += r.bytes;
        total.max_id = std::max(total.max_id, r.max_id);
        total.documents = total.documents < 0 || r.documents < 0 ? -1 : total.documents + r.documents;
        width = std::max(width, r.path.size());
    }
    if (o.json) {
        ordered_json j = {{"files", ordered_json::array()}, {"total", to_json(total)}};
        for (const ShardSummary& r : rows) {
            ordered_json f = {{"path", r.path}, {"format", r.width == 2 ? "uint16" : "uint32"}};
            f.update(to_json(r));
            j["files"].push_back(f);
        }
        out << j.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
        return;
    }
    out << "file" << std::string(width - 4, ' ') << right("format", 8) << right("tokens", 16) << right("max id", 12)
        << right("documents", 13) << right("bytes", 17) << "\n";
    for (const ShardSummary& r : rows) print_row(out, r.path, r, width);
    print_row(out, "total", total, width);
}

void data_verify(const std::vector<std::string>& patterns, int64_t vocab_size, std::ostream& out) {
    if (vocab_size < 0 || vocab_size > INT32_MAX) {
        throw Error(kExitUsage, "vocab-size is " + std::to_string(vocab_size) + ", expected 1 to 2147483647");
    }
    const TokenStream stream(patterns);
    int64_t start = 0;
    for (const Shard& shard : stream.shards()) {
        const auto dataset = dataset_of_shard(shard.path);
        if (dataset) check_claims(*dataset, shard);
        const int64_t V = vocab_size > 0 ? vocab_size : dataset ? dataset->vocab_size : 0;
        if (V > 0) {
            for_chunks(stream, start, shard.n_tokens,
                       [&](int64_t first, int64_t n, int32_t* ids) { stream.read_checked(first, n, int(V), ids); });
        }
        start += shard.n_tokens;
        out << shard.path << ": " << shard.n_tokens << " tokens, "
            << (V > 0 ? "all ids below " + std::to_string(V) : "ids not checked without --vocab-size") << "\n";
    }
    out << "good: " << stream.shards().size() << " shard(s), " << stream.size() << " tokens\n";
}

}  // namespace bam
