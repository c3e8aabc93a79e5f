// What an evaluation suite is to the runner: items that can be done in any order and need not be done twice, and how their
// results are summed up. Used inside src/eval only, so JSON is at hand.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/reader.h"

namespace bam {

using Json = nlohmann::ordered_json;

struct SuiteItem {
    Json key;             // {"length": 512, "depth": 0.5, "item": 3}: tells it apart from the suite's other items
    int64_t tokens = 0;   // a row's length, for time and memory
    int rows = 1;
    std::function<Json(Reader&)> run;  // the item's results
};

struct Suite {
    std::string name, variant;
    std::string file;     // stem of its files: "passkey", "passkey-landmark"
    Json options;         // all that changes an item's result, besides the model
    std::vector<SuiteItem> items;
    // "results" of the summary from the lines (key and results) of finished items, in the items' order.
    std::function<Json(const std::vector<Json>& lines)> summarize;
    std::function<std::string(const Json& results)> table;  // the same for people
};

// Mean and standard error (sample standard deviation / sqrt(n); null for n < 2) of 0/1 or real values.
struct Mean {
    double sum = 0, squares = 0;
    int64_t n = 0;
    void add(double x) { sum += x, squares += x * x, ++n; }
    double mean() const { return n ? sum / double(n) : 0; }
    Json stderr_() const;
};

// Rows of cells as aligned text, the first row being the heading.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

std::string format(const char* how, double x);  // one number, printf style

// Lines with equal values of a key, in order of first appearance.
std::vector<std::pair<Json, std::vector<Json>>> group_by(const std::vector<Json>& lines, const char* key);

}  // namespace bam
