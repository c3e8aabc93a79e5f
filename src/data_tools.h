// `bam data info` and `bam data verify`: what token shards hold, and whether they are sound.
#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace bam {

struct DataInfoOptions {
    std::vector<std::string> patterns;  // shards, globs, directories with dataset.json
    bool json = false;
    int64_t separator_id = -1;  // documents are counted by it; -1: what a dataset.json beside the shard says
};

// Reads every token. Errors as TokenStream's.
void data_info(const DataInfoOptions& options, std::ostream& out);

// Checks headers, sizes, every id against vocab_size (0: that of the dataset.json beside a shard, else ids are not
// checked), and a dataset.json's own claims. Errors: Error(kExitData) naming file and byte offset of the first fault.
void data_verify(const std::vector<std::string>& patterns, int64_t vocab_size, std::ostream& out);

}  // namespace bam
