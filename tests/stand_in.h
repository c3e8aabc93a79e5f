// Readers whose answers are known: what a suite scores them must be known too.
#pragma once
#include <functional>
#include <vector>

#include "eval/reader.h"
#include "eval/suite.h"

namespace bam::test {

// Logits are whatever `next` writes for the row's tokens so far.
class StandIn : public Reader {
public:
    using Next = std::function<void(const std::vector<int>& ids, std::vector<float>& logits)>;
    StandIn(int V, Next next) : V_(V), next_(std::move(next)) {}
    int vocab_size() const override { return V_; }
    void start(int rows, int64_t capacity) override {
        rows_.assign(size_t(rows), {});
        capacity_ = capacity;
    }
    void feed(const std::vector<RowPart>& parts, const LogitsSink& sink) override {
        for (size_t r = 0; r < parts.size(); ++r)
            for (size_t i = 0; i < parts[r].ids.size(); ++i) {
                rows_[r].push_back(parts[r].ids[i]);
                ++tokens_read;
                if (int64_t(rows_[r].size()) > capacity_) throw std::logic_error("row longer than announced");
                if (parts[r].logits_from < 0 || int64_t(i) < parts[r].logits_from) continue;
                std::vector<float> logits(static_cast<size_t>(V_), 0.0f);
                next_(rows_[r], logits);
                sink(int(r), int64_t(i), logits.data());
            }
    }
    const std::vector<int>& row(int r) const { return rows_[size_t(r)]; }
    int64_t tokens_read = 0;

private:
    int V_;
    Next next_;
    std::vector<std::vector<int>> rows_;
    int64_t capacity_ = 0;
};

// Every token as likely as any other.
inline StandIn uniform(int V) {
    return StandIn(V, [](const std::vector<int>&, std::vector<float>&) {});
}

// Says what followed the longest earlier copy of the row's end (the latest of equally long ones).
inline StandIn copier(int V) {
    return StandIn(V, [](const std::vector<int>& ids, std::vector<float>& logits) {
        const size_t n = ids.size();
        size_t best = 0, answer = 0;
        for (size_t end = 1; end < n; ++end) {
            size_t length = 0;
            while (length < end && ids[end - 1 - length] == ids[n - 1 - length]) ++length;
            if (length >= best && length > 0) best = length, answer = end;
        }
        if (best) logits[size_t(ids[answer])] = 10;
    });
}

struct Outcome {
    std::vector<Json> lines;
    Json results;
};

inline Outcome run(const Suite& s, Reader& reader) {
    Outcome r;
    for (const SuiteItem& item : s.items) {
        Json line = item.key;
        line.update(item.run(reader));
        r.lines.push_back(line);
    }
    r.results = s.summarize(r.lines);
    return r;
}

}  // namespace bam::test
