// Shards, rows and documents.
#include "loader.h"

#include <glob.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>

#include "check.h"
#include "mapped_file.h"
#include "random.h"

namespace bam {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
    throw Error(kExitData, path + ": " + what);
}

// ---- shards
// -----------------------------------------------------------------------------------------------------------

Shard open_shard(const std::string& path) {
    const MappedFile file = map_file(path, kShardHeaderBytes, "a token shard");
    const int64_t size = file.size;
    Shard s;
    s.path = path;
    s.mapping = file.data;
    int32_t header[3];
    std::memcpy(header, s.mapping.get(), sizeof header);
    const auto [magic, version, tokens] = header;
    if (magic != kShardMagic16 && magic != kShardMagic32) {
        refuse(path, "starts with " + std::to_string(magic) + ", expected a token shard: " +
                         std::to_string(kShardMagic16) + " (uint16) or " + std::to_string(kShardMagic32) + " (uint32)");
    }
    s.width = magic == kShardMagic16 ? 2 : 4;
    const int32_t expected_version = s.width == 2 ? kShardVersion16 : kShardVersion32;
    if (version != expected_version) {
        refuse(path, "version " + std::to_string(version) + ", expected " + std::to_string(expected_version) +
                         " for magic " + std::to_string(magic));
    }
    // The header holds 32 bits of the count; the file's size decides, and the header must agree with it.
    s.n_tokens = (size - kShardHeaderBytes) / s.width;
    if ((size - kShardHeaderBytes) % s.width != 0 || uint32_t(s.n_tokens) != uint32_t(tokens)) {
        refuse(path, std::to_string(size) + " bytes, expected " +
                         std::to_string(kShardHeaderBytes + int64_t(uint32_t(tokens)) * s.width) + " for the " +
                         std::to_string(uint32_t(tokens)) + " tokens of its header");
    }
    s.tokens = s.mapping.get() + kShardHeaderBytes;
    return s;
}

void add_dataset_files(std::vector<std::string>& out, const std::string& directory, Split split) {
    std::error_code ignored;
    if (!fs::exists(fs::path(directory) / "dataset.json", ignored)) {
        refuse(directory, "a directory without dataset.json; name its shards, as in " + directory + "/train_*.bin");
    }
    const DatasetInfo d = read_dataset(directory);
    const auto add = [&](const DatasetPart& p) {
        for (const auto& f : p.files) out.push_back((fs::path(directory) / f.name).string());
    };
    if (split != Split::val) add(d.train);
    if (split != Split::train) add(d.val);
    if (split == Split::val && d.val.files.empty())
        refuse(directory, "its dataset.json has no validation part (\"val\")");
}

void add_glob(std::vector<std::string>& out, const std::string& pattern) {
    glob_t g{};
    const int rc = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &g);
    for (size_t i = 0; rc == 0 && i < g.gl_pathc; i++) out.push_back(g.gl_pathv[i]);
    ::globfree(&g);
    if (rc == 0) return;
    if (pattern.find_first_of("*?[") == std::string::npos) refuse(pattern, "no such file");
    refuse(pattern, "no file matches");
}

std::vector<std::string> find_shards(const std::vector<std::string>& patterns, Split split) {
    std::vector<std::string> paths;
    for (const std::string& pattern : patterns) {
        std::error_code ignored;
        const fs::file_status status = fs::status(pattern, ignored);
        if (fs::is_directory(status)) {
            add_dataset_files(paths, pattern, split);
        } else if (fs::exists(status)) {
            paths.push_back(pattern);
        } else {
            add_glob(paths, pattern);
        }
    }
    for (std::string& p : paths) p = fs::path(p).lexically_normal().string();
    std::sort(paths.begin(), paths.end());
    const auto twice = std::adjacent_find(paths.begin(), paths.end());
    if (twice != paths.end()) refuse(*twice, "named twice in one data set");
    return paths;
}

std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& w : words) text += (text.empty() ? "" : ", ") + w;
    return text;
}

}  // namespace

// ---- TokenStream
// ------------------------------------------------------------------------------------------------------

TokenStream::TokenStream(const std::vector<std::string>& patterns, Split split) : starts_{0} {
    if (patterns.empty())
        throw Error(kExitUsage, "no token shards are named, expected files, globs or data set directories");
    for (const std::string& path : find_shards(patterns, split)) {
        shards_.push_back(open_shard(path));
        starts_.push_back(starts_.back() + shards_.back().n_tokens);
    }
    if (size() == 0) refuse(joined(patterns), "no tokens in " + std::to_string(shards_.size()) + " shards");
}

// The last shard that starts at or before index: never an empty one.
size_t TokenStream::shard_of(int64_t index) const {
    return size_t(std::upper_bound(starts_.begin(), starts_.end(), index) - starts_.begin()) - 1;
}

void TokenStream::read(int64_t begin, int64_t count, int32_t* out) const {
    for (size_t s = shard_of(begin); count > 0; s++) {
        const Shard& shard = shards_[s];
        const int64_t first = begin - starts_[s];
        const int64_t n = std::min(count, shard.n_tokens - first);
        if (shard.width == 2) {
            const uint16_t* p = static_cast<const uint16_t*>(shard.tokens) + first;
            for (int64_t i = 0; i < n; i++) out[i] = p[i];
        } else {
            std::memcpy(out, static_cast<const uint32_t*>(shard.tokens) + first, size_t(n) * 4);
        }
        out += n;
        begin += n;
        count -= n;
    }
}

void TokenStream::read_checked(int64_t begin, int64_t count, int vocab_size, int32_t* out) const {
    read(begin, count, out);
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, uint32_t(out[i]));
    if (largest < uint32_t(vocab_size)) return;
    const int64_t bad =
        std::find_if(out, out + count, [&](int32_t id) { return uint32_t(id) >= uint32_t(vocab_size); }) - out;
    const TokenPlace where = place(begin + bad);
    refuse(where.path, "token id " + std::to_string(uint32_t(out[bad])) + " at byte " +
                           std::to_string(where.byte_offset) + ", expected less than the vocabulary's " +
                           std::to_string(vocab_size));
}

TokenPlace TokenStream::place(int64_t index) const {
    const size_t s = shard_of(index);
    return {shards_[s].path, kShardHeaderBytes + (index - starts_[s]) * shards_[s].width};
}

void TokenStream::will_need(int64_t begin, int64_t count) const {
    const uintptr_t page = uintptr_t(::sysconf(_SC_PAGESIZE));
    for (size_t s = shard_of(begin); count > 0 && s < shards_.size(); s++) {
        const Shard& shard = shards_[s];
        const int64_t n = std::min(count, starts_[s + 1] - begin);
        const uintptr_t first = uintptr_t(shard.tokens) + uintptr_t(begin - starts_[s]) * shard.width;
        const uintptr_t aligned = first / page * page;
        ::madvise(reinterpret_cast<void*>(aligned), first - aligned + size_t(n) * shard.width, MADV_WILLNEED);
        begin += n;
        count -= n;
    }
}

uint64_t TokenStream::fingerprint() const {
    XXH64_state_t* state = XXH64_createState();
    XXH64_reset(state, 0);
    for (const Shard& s : shards_) {
        const std::string name = fs::path(s.path).filename().string();
        const char* data = s.mapping.get();
        const int64_t size = kShardHeaderBytes + s.n_tokens * s.width;
        const int64_t part = std::min<int64_t>(size, 65536);
        XXH64_update(state, name.c_str(), name.size() + 1);
        XXH64_update(state, &size, sizeof size);
        XXH64_update(state, data, size_t(part));
        XXH64_update(state, data + size - part, size_t(part));
    }
    const uint64_t h = XXH64_digest(state);
    XXH64_freeState(state);
    return h;
}

// ---- rows
// -------------------------------------------------------------------------------------------------------------

int64_t permute(int64_t i, int64_t n, uint64_t seed, uint64_t epoch) {
    constexpr int kRounds = 8;
    const uint64_t stream = stream_of("row order");
    if (n <= 1) return 0;
    // An unbalanced Feistel network over the bits of n - 1; walking its cycle until it is back in [0, n) keeps it a
    // bijection. Fewer than two turns are expected, as 2^bits < 2n.
    const int bits = std::bit_width(uint64_t(n - 1)), low = bits / 2;
    const uint64_t low_mask = (uint64_t(1) << low) - 1, high_mask = (uint64_t(1) << (bits - low)) - 1;
    uint64_t keys[kRounds];
    for (int r = 0; r < kRounds; r++) keys[r] = random_bits(seed, stream ^ mix64(epoch), uint64_t(r));
    uint64_t x = uint64_t(i);
    do {
        uint64_t left = x >> low, right = x & low_mask;
        for (int r = 0; r < kRounds; r += 2) {
            left ^= mix64(keys[r] + right) & high_mask;
            right ^= mix64(keys[r + 1] + left) & low_mask;
        }
        x = left << low | right;
    } while (x >= uint64_t(n));
    return int64_t(x);
}

RowLoader::RowLoader(std::shared_ptr<const TokenStream> stream, int64_t begin, int64_t end, int seq_len, bool shuffle,
                     uint64_t seed)
    : stream_(std::move(stream)),
      begin_(begin),
      end_(end),
      rows_(0),
      seq_len_(seq_len),
      shuffle_(shuffle),
      seed_(seed) {
    if (end - begin < int64_t(seq_len) + 1) {
        refuse(stream_->shards().front().path,
               std::to_string(std::max<int64_t>(0, end - begin)) + " tokens in the " +
                   std::to_string(stream_->shards().size()) + " shard(s), expected at least " +
                   std::to_string(int64_t(seq_len) + 1) + " for one row of seq_len " + std::to_string(seq_len));
    }
    rows_ = (end - begin - 1) / seq_len;
}

int64_t RowLoader::dropped_tokens() const {
    return end_ - begin_ - (rows_ * seq_len_ + 1);
}

int64_t RowLoader::row_start(int64_t n) const {
    const int64_t epoch = n / rows_, position = n % rows_;
    return begin_ + (shuffle_ ? permute(position, rows_, seed_, uint64_t(epoch)) : position) * seq_len_;
}

void RowLoader::read_row(int64_t n, int vocab_size, int32_t* out) const {
    stream_->read_checked(row_start(n), int64_t(seq_len_) + 1, vocab_size, out);
}

void RowLoader::will_need(int64_t n, int64_t count) const {
    for (int64_t i = n; i < n + count; i++) stream_->will_need(row_start(i), int64_t(seq_len_) + 1);
}

// ---- data sets and documents
// ------------------------------------------------------------------------------------------

namespace {

// Bytes of text behind a stream that is exactly one part of a data set; 0: unknown.
int64_t text_bytes_of(const TokenStream& stream) {
    const std::optional<DatasetInfo> d = dataset_of_shard(stream.shards().front().path);
    if (!d) return 0;
    for (const DatasetPart* p : {&d->train, &d->val}) {
        bool same = p->files.size() == stream.shards().size() && p->tokens == stream.size();
        for (size_t i = 0; same && i < p->files.size(); i++) {
            same = stream.shards()[i].path == (fs::path(d->directory) / p->files[i].name).lexically_normal();
        }
        if (same) return p->text_bytes;
    }
    return 0;
}

}  // namespace

DataSet open_data(const DataConfig& d) {
    DataSet s;
    s.train = std::make_shared<TokenStream>(d.train, Split::train);
    s.train_end = s.train->size();
    if (!d.val.empty()) {
        s.val = std::make_shared<TokenStream>(d.val, Split::val);
        s.val_end = s.val->size();
        s.val_text_bytes = text_bytes_of(*s.val);
    } else if (d.val_tokens > 0) {
        // Not their sum, which may overflow.
        if (d.val_tokens >= s.train_end || d.val_gap >= s.train_end - d.val_tokens) {
            refuse(joined(d.train), std::to_string(s.train_end) + " tokens, expected more than data.val_tokens " +
                                        std::to_string(d.val_tokens) + " + data.val_gap " + std::to_string(d.val_gap));
        }
        s.val = s.train;
        s.val_end = d.val_tokens;
        s.train_begin = d.val_tokens + d.val_gap;
    }
    if (s.val && s.val_end - s.val_begin < 2) {
        refuse(joined(d.val.empty() ? d.train : d.val),
               "1 validation token, expected at least 2: one to read, one to predict");
    }
    return s;
}

void find_documents(const int32_t* ids, int T, const DataConfig& d, int32_t* key_begin, int32_t* positions) {
    const bool documents = d.has_separator && d.document_mask;
    int32_t begin = 0;
    for (int t = 0; t < T; t++) {
        const int before = d.separator_at_end ? t - 1 : t;  // where the separator stands if a document begins at t
        if (documents && t > 0 && ids[before] == d.separator_id) begin = t;
        key_begin[t] = begin;
        positions[t] = d.positions_by_document ? t - begin : t;
    }
}

}  // namespace bam
