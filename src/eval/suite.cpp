#include "eval/suite.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace bam {

Json Mean::stderr_() const {
    if (n < 2) return nullptr;
    const double variance = std::max(0.0, (squares - sum * sum / double(n)) / double(n - 1));
    return std::sqrt(variance / double(n));
}

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
    std::vector<size_t> width;
    for (const auto& row : rows) {
        width.resize(std::max(width.size(), row.size()));
        for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
    }
    std::string text;
    for (const auto& row : rows) {
        std::string line;
        for (size_t c = 0; c < row.size(); ++c) line += (c ? "  " : "") + std::string(width[c] - row[c].size(), ' ') + row[c];
        text += line + "\n";
    }
    return text;
}

std::string format(const char* how, double x) {
    char text[64];
    std::snprintf(text, sizeof text, how, x);
    return text;
}

std::vector<std::pair<Json, std::vector<Json>>> group_by(const std::vector<Json>& lines, const char* key) {
    std::vector<std::pair<Json, std::vector<Json>>> groups;
    for (const Json& line : lines) {
        auto at = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == line.at(key); });
        if (at != groups.end()) at->second.push_back(line);
        else groups.emplace_back(line.at(key), std::vector<Json>(1, line));
    }
    return groups;
}

}  // namespace bam
