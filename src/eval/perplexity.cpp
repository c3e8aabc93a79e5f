#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "eval/score.h"
#include "eval/session.h"

namespace bam {

namespace {

std::vector<int> read_ids(const TokenRange& range, int64_t begin, int64_t end, int vocab_size) {
    std::vector<int> ids(end - begin);
    range.stream->read(begin, end - begin, ids.data());
    for (int64_t i = 0; i < end - begin; ++i) {
        if (ids[i] >= 0 && ids[i] < vocab_size) continue;
        const TokenPlace p = range.stream->place(begin + i);
        throw Error(kExitData, p.path + ": token id " + std::to_string(ids[i]) + " at byte " + std::to_string(p.byte_offset) +
                                   ", expected below vocab_size " + std::to_string(vocab_size));
    }
    return ids;
}

// Sum and number of every window's negative log-probabilities: [[nll, tokens], ...].
Json score_windows(Reader& reader, const TokenRange& range, const std::vector<Window>& windows, int vocab_size) {
    std::vector<ScoredRow> rows;
    for (const Window& w : windows)
        rows.push_back({read_ids(range, range.begin + w.begin, range.begin + w.end, vocab_size), w.from - w.begin});
    Json result = Json::array();
    for (const std::vector<double>& row : reader.logprobs(rows)) {
        double sum = 0;
        for (double logprob : row) sum -= logprob;
        result.push_back({sum, row.size()});
    }
    return {{"windows", result}};
}

// Windows of a length over the range's first tokens, short ones together in one item, so that they are read side by side.
void add_windows(Suite& s, const PerplexityOptions& o, const TokenRange& range, int64_t length, int64_t stride, int V) {
    const int64_t have = range.end - range.begin, n = o.tokens ? std::min(have, std::max(o.tokens, length) + 1) : have;
    if (have < length + 1)
        throw Error(kExitData, range.stream->shards().front().path + ": " + std::to_string(have) +
                                   " tokens of validation data, expected at least " + std::to_string(length + 1) +
                                   " for perplexity at length " + std::to_string(length));
    std::vector<Window> windows = make_windows(n, length, stride);
    if (stride == length && windows.back().end - windows.back().begin < length + 1) windows.pop_back();  // all of one length
    const int64_t together = std::max<int64_t>(1, SessionOptions().chunk / length);
    for (size_t w = 0; w < windows.size(); w += together) {
        SuiteItem item;
        const std::vector<Window> group(windows.begin() + w, windows.begin() + std::min(windows.size(), w + together));
        item.key = {{"length", length}, {"item", w / together}};
        item.tokens = length, item.rows = int(group.size());
        item.run = [range, group, V](Reader& reader) { return score_windows(reader, range, group, V); };
        s.items.push_back(std::move(item));
    }
}

Json nll_summary(double sum, int64_t tokens, const Json& error) {
    const double mean = sum / double(std::max<int64_t>(1, tokens));
    return {{"nll", mean}, {"stderr", error}, {"perplexity", std::exp(mean)}, {"tokens", tokens}};
}

Json summarize_windows(const std::vector<Json>& lines, const std::string& variant) {
    Json results = Json::array();
    for (const auto& [length, group] : group_by(lines, "length")) {
        double sum = 0;
        int64_t tokens = 0;
        Mean by_window;
        for (const Json& line : group)
            for (const Json& w : line.at("windows")) {
                sum += w[0].get<double>(), tokens += w[1].get<int64_t>();
                by_window.add(w[0].get<double>() / w[1].get<double>());
            }
        Json r = {{"length", length}, {"variant", variant}};
        r.update(nll_summary(sum, tokens, by_window.stderr_()));
        r["windows"] = by_window.n;
        results.push_back(r);
    }
    return results;
}

std::string windows_table(const Json& results) {
    std::vector<std::vector<std::string>> rows = {{"length", "tokens", "nll", "+-", "perplexity"}};
    for (const Json& r : results)
        rows.push_back({r["length"].dump(), r["tokens"].dump(), format("%.4f", r["nll"]),
                        r["stderr"].is_null() ? "-" : format("%.4f", r["stderr"]), format("%.4f", r["perplexity"])});
    return format_table(rows);
}

// ---- by position ------------------------------------------------------------------------------------------------------

// Beginnings of documents of at least `least` tokens, separators included.
std::vector<int64_t> long_documents(const TokenRange& range, const DataConfig& d, int64_t least, int64_t wanted) {
    std::vector<int64_t> starts;
    int64_t begin = range.begin;
    auto close = [&](int64_t end) {
        if (end - begin >= least) starts.push_back(begin);
        begin = end;
    };
    std::vector<int32_t> block(1 << 16);
    for (int64_t at = range.begin; at < range.end && int64_t(starts.size()) < wanted; at += int64_t(block.size())) {
        const int64_t n = std::min<int64_t>(int64_t(block.size()), range.end - at);
        range.stream->read(at, n, block.data());
        for (int64_t i = 0; i < n; ++i)
            if (block[i] == d.separator_id) close(at + i + (d.separator_at_end ? 1 : 0));
    }
    if (int64_t(starts.size()) < wanted) close(range.end);
    starts.resize(std::min<int64_t>(wanted, int64_t(starts.size())));
    return starts;
}

// Position p is the number of tokens before the scored one: 1 .. length. Bin b covers [b*length/bins, (b+1)*length/bins) of p - 1.
Json score_by_position(Reader& reader, std::vector<int> ids, int64_t length, int bins) {
    const std::vector<double> logprobs = reader.logprobs({{std::move(ids), 1}})[0];
    Json result = Json::array();
    for (int b = 0; b < bins; ++b) {
        const int64_t begin = length * b / bins, end = length * (b + 1) / bins;
        double sum = 0;
        for (int64_t i = begin; i < end; ++i) sum -= logprobs[i];
        result.push_back({sum, end - begin});
    }
    return {{"bins", result}};
}

void add_documents(Suite& s, const PerplexityOptions& o, const TokenRange& range, int64_t length, int V) {
    if (!o.data.has_separator)
        throw Error(kExitData, "perplexity by_position needs documents, and the model's data section names no separator");
    const int64_t wanted = o.tokens ? std::max<int64_t>(1, o.tokens / length) : std::numeric_limits<int64_t>::max();
    const std::vector<int64_t> starts = long_documents(range, o.data, length + 1, wanted);
    if (starts.empty())
        throw Error(kExitData, range.stream->shards().front().path + ": no document of at least " + std::to_string(length + 1) +
                                   " tokens, which perplexity by_position at length " + std::to_string(length) + " needs");
    for (size_t i = 0; i < starts.size(); ++i) {
        SuiteItem item;
        item.key = {{"length", length}, {"item", i}};
        item.tokens = length;
        item.run = [range, begin = starts[i], length, bins = int(std::min<int64_t>(o.bins, length)), V](Reader& reader) {
            return score_by_position(reader, read_ids(range, begin, begin + length + 1, V), length, bins);
        };
        s.items.push_back(std::move(item));
    }
}

Json summarize_by_position(const std::vector<Json>& lines) {
    Json results = Json::array();
    for (const auto& [length, group] : group_by(lines, "length")) {
        const size_t bins = group[0].at("bins").size();
        Json r = {{"length", length}, {"variant", "by_position"}, {"documents", group.size()}}, list = Json::array();
        double total = 0;
        int64_t tokens = 0;
        Mean documents;
        for (const Json& line : group) {
            double sum = 0;
            for (const Json& bin : line.at("bins")) sum += bin[0].get<double>();
            documents.add(sum / length.get<double>());
            total += sum, tokens += length.get<int64_t>();
        }
        for (size_t b = 0; b < bins; ++b) {
            Mean mean;
            for (const Json& line : group) mean.add(line.at("bins")[b][0].get<double>() / line.at("bins")[b][1].get<double>());
            const int64_t L = length, begin = L * int64_t(b) / int64_t(bins), end = L * int64_t(b + 1) / int64_t(bins);
            Json bin = {{"begin", begin}, {"end", end}};
            bin.update(nll_summary(mean.mean() * double(end - begin) * double(mean.n), (end - begin) * mean.n, mean.stderr_()));
            list.push_back(bin);
        }
        r.update(nll_summary(total, tokens, documents.stderr_()));
        r["bins"] = list;
        results.push_back(r);
    }
    return results;
}

std::string by_position_table(const Json& results) {
    std::vector<std::vector<std::string>> rows = {{"length", "positions", "tokens", "nll", "+-", "perplexity"}};
    for (const Json& r : results)
        for (const Json& b : r["bins"])
            rows.push_back({r["length"].dump(), b["begin"].dump() + "-" + std::to_string(b["end"].get<int64_t>() - 1),
                            b["tokens"].dump(), format("%.4f", b["nll"]),
                            b["stderr"].is_null() ? "-" : format("%.4f", b["stderr"]), format("%.4f", b["perplexity"])});
    return format_table(rows);
}

}  // namespace

TokenRange evaluation_tokens(const DataConfig& data, const std::vector<std::string>& files) {
    const std::vector<std::string>& named = files.empty() ? data.val : files;
    if (!named.empty()) {
        const auto stream = std::make_shared<const TokenStream>(named);
        return {stream, 0, stream->size()};
    }
    if (data.val_tokens == 0 || data.train.empty())
        throw Error(kExitData, "perplexity needs token shards: the model names no validation data, expected --data");
    const DataSet set = open_data(data);
    return {set.val, set.val_begin, set.val_end};
}

Suite make_perplexity(const std::string& variant, const PerplexityOptions& o, const TokenRange& range, int vocab_size) {
    if (variant != "windows" && variant != "sliding" && variant != "by_position")
        throw Error(kExitUsage, "perplexity variant '" + variant + "', expected windows, sliding or by_position");
    Suite s;
    s.name = "perplexity", s.variant = variant, s.file = variant == "windows" ? "perplexity" : "perplexity-" + variant;
    s.options = {{"tokens", o.tokens}, {"data", range.stream->fingerprint()}, {"begin", range.begin}, {"end", range.end},
                 {"document_mask", o.document_mask}};
    if (variant == "sliding") s.options["stride"] = o.stride;
    if (variant == "by_position") s.options["bins"] = o.bins;
    for (int64_t length : o.lengths) {
        const int64_t stride = variant == "windows" ? length : o.stride ? o.stride : std::max<int64_t>(1, length / 2);
        if (stride > length)
            throw Error(kExitUsage, "stride " + std::to_string(stride) + " at length " + std::to_string(length) +
                                        ", expected at most the length");
        if (variant == "by_position") add_documents(s, o, range, length, vocab_size);
        else add_windows(s, o, range, length, stride, vocab_size);
    }
    if (variant == "by_position") {
        s.summarize = summarize_by_position, s.table = by_position_table;
    } else {
        s.summarize = [variant](const std::vector<Json>& lines) { return summarize_windows(lines, variant); };
        s.table = windows_table;
    }
    return s;
}

}  // namespace bam
