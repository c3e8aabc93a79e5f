#include "eval/sampling.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "eval/reader.h"

namespace bam {

void check_sampling(const SampleOptions& o) {
    auto require = [](bool good, const char* name, double value, const char* expected) {
        if (good) return;
        char text[160];
        std::snprintf(text, sizeof text, "%s is %g, expected %s", name, value, expected);
        throw Error(kExitUsage, text);
    };
    require(o.max_tokens >= 1, "number of tokens", o.max_tokens, "1 or more");
    require(o.temperature >= 0 && std::isfinite(o.temperature), "temperature", o.temperature, "0 (greedy) or more");
    require(o.top_k >= 0, "top-k", o.top_k, "0 (all) or more");
    require(o.top_p > 0 && o.top_p <= 1, "top-p", o.top_p, "a number in (0, 1]");
    require(o.min_p >= 0 && o.min_p <= 1, "min-p", o.min_p, "a number in [0, 1]");
    require(o.repetition_penalty > 0 && std::isfinite(o.repetition_penalty), "repetition penalty", o.repetition_penalty,
            "a number above 0");
    for (const std::string& s : o.stop)
        if (s.empty()) throw Error(kExitUsage, "stop string is empty, expected some text");
}

namespace {

struct Candidate {
    int id;
    double weight;  // logit, then probability
};

void penalize(std::vector<Candidate>& all, const std::vector<int>& seen, double penalty) {
    if (penalty == 1) return;
    std::vector<bool> done(all.size());
    for (int id : seen) {
        if (id < 0 || size_t(id) >= all.size() || done[id]) continue;
        done[id] = true;
        all[id].weight = all[id].weight > 0 ? all[id].weight / penalty : all[id].weight * penalty;
    }
}

// Likeliest first, cut by top-k, top-p and min-p; weights become probabilities among the k, not renormalised after.
void cut(std::vector<Candidate>& all, const SampleOptions& o) {
    const size_t k = o.top_k > 0 ? std::min<size_t>(o.top_k, all.size()) : all.size();
    std::partial_sort(all.begin(), all.begin() + k, all.end(), [](const Candidate& a, const Candidate& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
    });
    all.resize(k);
    const double top = all[0].weight;
    double sum = 0;
    for (Candidate& c : all) sum += c.weight = std::exp((c.weight - top) / o.temperature);
    double reached = 0;
    size_t n = 0;
    while (n < all.size() && (n == 0 || (reached < o.top_p * sum && all[n].weight >= o.min_p))) reached += all[n++].weight;
    all.resize(n);
}

}  // namespace

int pick_token(const float* logits, int V, const std::vector<int>& seen, const SampleOptions& o, double u) {
    if (o.temperature == 0 && o.repetition_penalty == 1) return argmax(logits, V);
    std::vector<Candidate> all(V);
    for (int v = 0; v < V; ++v) all[v] = {v, logits[v]};
    penalize(all, seen, o.repetition_penalty);
    if (o.temperature == 0)
        return std::max_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.weight < b.weight; })->id;
    cut(all, o);
    double sum = 0;
    for (const Candidate& c : all) sum += c.weight;
    double at = u * sum;
    for (const Candidate& c : all)
        if ((at -= c.weight) < 0) return c.id;
    return all.back().id;
}

}  // namespace bam
