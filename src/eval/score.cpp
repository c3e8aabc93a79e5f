#include "eval/score.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>

#include "check.h"
#include "dataset.h"
#include "loader.h"

namespace bam {

std::vector<Window> make_windows(int64_t n, int64_t context, int64_t stride) {
    std::vector<Window> windows;
    for (int64_t begin = 0, from = 1; from < n; begin += stride) {
        const int64_t end = std::min(n, begin + context + 1);
        windows.push_back({begin, end, from});
        from = end;
    }
    return windows;
}

std::vector<double> score_tokens(Reader& reader, const std::vector<int>& ids, int64_t context, int64_t stride) {
    constexpr int64_t kTogether = 512;  // tokens of short windows read side by side
    const int64_t n = int64_t(ids.size());
    const std::vector<Window> windows = make_windows(n, context ? context : n, context ? stride : n);
    std::vector<double> result(ids.size(), std::numeric_limits<double>::quiet_NaN());
    const size_t together = context ? size_t(std::max<int64_t>(1, kTogether / context)) : 1;
    for (size_t w = 0; w < windows.size(); w += together) {
        const size_t end = std::min(windows.size(), w + together);
        std::vector<ScoredRow> rows;
        for (size_t i = w; i < end; ++i)
            rows.push_back({{ids.begin() + windows[i].begin, ids.begin() + windows[i].end}, windows[i].from - windows[i].begin});
        const auto scores = reader.logprobs(rows);
        for (size_t i = w; i < end; ++i) std::copy(scores[i - w].begin(), scores[i - w].end(), result.begin() + windows[i].from);
    }
    return result;
}

static std::vector<int> read_shard(const std::string& path, int vocab_size) {
    const TokenStream stream({path});
    std::vector<int> ids(stream.size());
    stream.read(0, stream.size(), ids.data());
    for (size_t i = 0; i < ids.size(); ++i)
        if (ids[i] < 0 || ids[i] >= vocab_size)
            throw Error(kExitData, path + ": token id " + std::to_string(ids[i]) + " at byte " +
                                       std::to_string(stream.place(int64_t(i)).byte_offset) + ", expected below vocab_size " +
                                       std::to_string(vocab_size));
    return ids;
}

static std::vector<int> parse_ids(const std::string& path, const std::string& text, int vocab_size) {
    std::vector<int> ids;
    const auto separates = [](char c) { return c == ',' || std::isspace(static_cast<unsigned char>(c)); };
    for (size_t i = 0; i < text.size();) {
        if (separates(text[i])) {
            ++i;
            continue;
        }
        const size_t end = std::find_if(text.begin() + i, text.end(), separates) - text.begin();
        int id = -1;
        const auto parsed = std::from_chars(text.data() + i, text.data() + end, id);
        if (parsed.ec != std::errc() || parsed.ptr != text.data() + end || id < 0 || id >= vocab_size)
            throw Error(kExitData, path + ": '" + text.substr(i, std::min<size_t>(end - i, 20)) + "' at byte " + std::to_string(i) +
                                       ", expected a token shard or ids below vocab_size " + std::to_string(vocab_size) + " as text");
        ids.push_back(id);
        i = end;
    }
    return ids;
}

std::vector<int> read_token_file(const std::string& path, int vocab_size) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw Error(kExitData, path + ": cannot be read, expected a token shard or ids as text");
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    int32_t magic = 0;
    if (text.size() >= sizeof magic) std::memcpy(&magic, text.data(), sizeof magic);
    std::vector<int> ids = magic == kShardMagic16 || magic == kShardMagic32 ? read_shard(path, vocab_size)
                                                                            : parse_ids(path, text, vocab_size);
    if (ids.empty()) throw Error(kExitData, path + ": holds no tokens");
    return ids;
}

}  // namespace bam
