// A data set on disk (DESIGN §3): a directory of token shards in llm.c's format, the tokenizer's file, and
// dataset.json, which says what they hold. Written whole or not at all: everything is made in a hidden directory inside
// and renamed at the end, dataset.json last.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer.h"

namespace bam {

// A shard: 256 int32 (magic, version, number of tokens mod 2^32), then the tokens.
constexpr int64_t kShardHeaderBytes = 1024;
constexpr int32_t kShardMagic16 = 20240520, kShardVersion16 = 1;
constexpr int32_t kShardMagic32 = 20240801, kShardVersion32 = 7;

enum class Split : uint8_t { all, train, val };

struct DatasetPart {
    struct File {
        std::string name;
        int64_t tokens = 0;
    };
    std::vector<File> files;
    int64_t tokens = 0, documents = 0;
    int64_t text_bytes = 0;  // of the text before tokenizing: what bits per byte divides by
};

struct DatasetInfo {
    std::string directory;
    std::string source;  // the command that made it up, or empty: tokenized text
    std::string tokenizer_file, tokenizer_kind;
    uint64_t tokenizer_fingerprint = 0;
    int vocab_size = 0;
    int separator_id = -1;  // -1: none
    bool separator_at_end = true;
    DatasetPart train, val;
};

// Errors: Error(kExitData) naming dataset.json, the key, what was found and what was expected.
DatasetInfo read_dataset(const std::string& directory);
// That of the directory the shard lies in, if a dataset.json there lists it.
std::optional<DatasetInfo> dataset_of_shard(const std::string& shard_path);

// Writes a data set from documents as they come, in constant memory. Without finish() nothing stays behind.
class DatasetWriter {
public:
    // Errors: Error(kExitUsage) if the directory holds foreign files, or a data set and not `force`, which replaces it
    // at finish(); Error(kExitFailure) if it cannot be written or another process is writing there.
    DatasetWriter(const std::string& directory, const Tokenizer& tokenizer, bool force = false,
                  int64_t shard_tokens = 100'000'000);
    ~DatasetWriter();
    DatasetWriter(const DatasetWriter&) = delete;

    // A document is any number of add()s and one end_document(), which puts the separator. An empty one leaves no
    // trace.
    void add(Split part, const std::vector<int>& ids, int64_t text_bytes);
    void end_document(Split part);
    // Errors: Error(kExitData) if there are no tokens; Error(kExitFailure) naming the file and the system's reason.
    DatasetInfo finish(const std::string& source = "");

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace bam
