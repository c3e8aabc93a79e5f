#include "eval/reader.h"

#include <algorithm>
#include <cmath>

namespace bam {

double log_softmax_at(const float* logits, int V, int target) {
    const double top = *std::max_element(logits, logits + V);
    double sum = 0;
    for (int v = 0; v < V; ++v) sum += std::exp(logits[v] - top);
    return logits[target] - top - std::log(sum);
}

int argmax(const float* x, int n) { return int(std::max_element(x, x + n) - x); }

std::vector<std::vector<double>> Reader::logprobs(const std::vector<ScoredRow>& rows) {
    std::vector<std::vector<double>> result(rows.size());
    std::vector<RowPart> parts(rows.size());
    int64_t longest = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
        const std::vector<int>& ids = rows[r].ids;
        if (int64_t(ids.size()) <= rows[r].from) continue;
        parts[r] = {{ids.begin(), ids.end() - 1}, rows[r].from - 1};
        longest = std::max<int64_t>(longest, int64_t(ids.size()) - 1);
    }
    start(int(rows.size()), longest);
    feed(parts, [&](int r, int64_t i, const float* logits) {
        result[r].push_back(log_softmax_at(logits, vocab_size(), rows[r].ids[i + 1]));
    });
    return result;
}

}  // namespace bam
