// Token shards in llm.c's format as one stream of rows. Which tokens make row (epoch, position) is a pure function of
// the data, the seed and that pair: the only state of a loader is how many rows were consumed (DESIGN §3).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "dataset.h"

namespace bam {

// One memory-mapped shard: (20240520, version 1) uint16 or (20240801, version 7) uint32 tokens behind 256 int32.
struct Shard {
    std::string path;
    std::shared_ptr<const char> mapping;
    const void* tokens = nullptr;
    int64_t n_tokens = 0;
    int width = 2;  // bytes a token: 2 | 4
    int token(int64_t i) const {
        return width == 2 ? static_cast<const uint16_t*>(tokens)[i] : int(static_cast<const uint32_t*>(tokens)[i]);
    }
};

// Where a token is on disk, for messages.
struct TokenPlace {
    std::string path;
    int64_t byte_offset;
};

// All shards of a data set as one stream of tokens, in the order of their sorted names.
class TokenStream {
public:
    // Each pattern: a glob, a file, or a directory with dataset.json, of which `split` is taken. Errors:
    // Error(kExitData) naming the file, what was found and what was expected: no match, a file twice, empty, truncated,
    // foreign magic, a token count that disagrees with the file's size, no token in all of them.
    explicit TokenStream(const std::vector<std::string>& patterns, Split split = Split::all);
    TokenStream(const TokenStream&) = delete;

    int64_t size() const { return starts_.back(); }
    const std::vector<Shard>& shards() const { return shards_; }
    // Tokens [begin, begin + count), across shard boundaries.
    void read(int64_t begin, int64_t count, int32_t* out) const;
    // The same; an id >= vocab_size is Error(kExitData) naming the file and byte offset.
    void read_checked(int64_t begin, int64_t count, int vocab_size, int32_t* out) const;
    TokenPlace place(int64_t index) const;
    void will_need(int64_t begin, int64_t count) const;  // read ahead
    // xxh64 over file names, sizes and the first and last 64 KiB of each: tells a changed data set apart on resume.
    uint64_t fingerprint() const;

private:
    size_t shard_of(int64_t index) const;
    std::vector<Shard> shards_;
    std::vector<int64_t> starts_;  // stream index of each shard's first token, then the total
};

// A seeded bijection of [0, n), another one for each epoch: cycle-walking Feistel network.
int64_t permute(int64_t i, int64_t n, uint64_t seed, uint64_t epoch);

// Rows of seq_len + 1 tokens, stride seq_len, over stream[begin, end).
class RowLoader {
public:
    // Errors: Error(kExitData) when there are fewer than seq_len + 1 tokens (says how many there are).
    RowLoader(std::shared_ptr<const TokenStream> stream, int64_t begin, int64_t end, int seq_len, bool shuffle,
              uint64_t seed);

    int64_t rows_per_epoch() const { return rows_; }
    int64_t dropped_tokens() const;  // of the last partial row: in no row of any epoch
    // Row number n of the whole training (epoch n / rows_per_epoch): where it starts in the stream.
    int64_t row_start(int64_t n) const;
    // seq_len + 1 ids of row n. Errors: an id >= vocab_size is Error(kExitData) naming the file and byte offset.
    void read_row(int64_t n, int vocab_size, int32_t* out) const;
    void will_need(int64_t n, int64_t count) const;

private:
    std::shared_ptr<const TokenStream> stream_;
    int64_t begin_, end_, rows_;
    int seq_len_;
    bool shuffle_;
    uint64_t seed_;
};

// The training part of the stream and the validation tokens of a config: either data.val, or val_tokens cut from the
// start of the training stream followed by val_gap unused tokens, or none (val == nullptr).
struct DataSet {
    std::shared_ptr<const TokenStream> train, val;
    int64_t train_begin = 0, train_end = 0;
    int64_t val_begin = 0, val_end = 0;
    int64_t val_text_bytes = 0;  // behind the validation tokens, for bits per byte; 0 unless a dataset.json tells
};
DataSet open_data(const DataConfig& d);

// What attention needs to know of a row's documents (DESIGN §2.2, §3): for each of the T tokens the index of its
// document's first token in the row, and its position. Without a separator or with document_mask false the whole row is
// one document.
void find_documents(const int32_t* ids, int T, const DataConfig& d, int32_t* key_begin, int32_t* positions);

}  // namespace bam
