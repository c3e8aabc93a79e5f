#include "eval/runner.h"

#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "check.h"
#include "checkpoint.h"
#include "interrupt.h"

namespace bam {

using clock = std::chrono::steady_clock;

namespace {

// Thrown out of the reader in the middle of an item.
struct Stopped {};

// Answers of a model need not be UTF-8.
std::string dump(const Json& j, int indent = -1) { return j.dump(indent, ' ', false, Json::error_handler_t::replace); }

std::string hash_of(const std::string& text) {
    char hex[20];
    std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(XXH64(text.data(), text.size(), 0)));
    return hex;
}

double seconds_since(clock::time_point t) { return std::chrono::duration<double>(clock::now() - t).count(); }

}  // namespace

// The lines of one suite's JSONL file that belong to this model and these options, by the dump of their key.
struct Runner::Log {
    std::string path;
    std::string key;  // "run" of the lines
    std::map<std::string, Json> lines;
    std::ofstream out;

    Log(const std::string& path, const std::string& key) : path(path), key(key) {
        std::ifstream in(path, std::ios::binary);
        std::string text{std::istreambuf_iterator<char>(in), {}};
        for (size_t at = 0; at < text.size();) {
            const size_t end = std::min(text.find('\n', at), text.size());
            const Json line = Json::parse(text.begin() + at, text.begin() + end, nullptr, false);
            if (line.is_object() && line.value("run", "") == key && line.contains("key")) lines[line["key"].dump()] = line;
            at = end + 1;
        }
        out.open(path, std::ios::binary | std::ios::app);
        if (!text.empty() && text.back() != '\n') out << '\n';  // ends a torn line
        require();
    }
    void require() {
        if (!out.flush()) throw Error(kExitFailure, path + ": cannot be written: " + std::strerror(errno));
    }
    void add(const Json& line) {
        out << dump(line) + "\n";
        require();
        lines[line["key"].dump()] = Json::parse(dump(line));
    }
};

double Runner::cost(const SuiteItem& item) const {
    const double n = double(item.tokens);
    return item.rows * (o_.flops_linear * n + o_.flops_quadratic * n * n);
}

bool Runner::must_stop() const { return interrupted() || clock::now() > deadline_; }

void Runner::on_chunk(int64_t tokens) {
    item_read_ += tokens;
    if (progress_) {
        const double share = std::min(1.0, double(item_read_) / double(std::max<int64_t>(1, item_tokens_)));
        const double done = work_done_ + item_cost_ * share * share;  // nearer to quadratic where it matters
        const double left = done > 0 ? seconds_since(started_) / done * (work_left_ - (done - work_done_)) : -1;
        progress_->update(line_ + (left >= 0 ? " | " + human_time(left) + " left" : ""), false);
    }
    if (must_stop()) throw Stopped();
}

void Runner::show(const Suite& suite, const SuiteItem& item, size_t done) {
    line_ = suite.name + " " + suite.variant;
    for (const auto& [name, value] : item.key.items()) line_ += " | " + name + " " + value.dump();
    line_ += " | " + std::to_string(done) + " of " + std::to_string(suite.items.size()) + " done";
    if (progress_) progress_->update(line_, false);
}

void Runner::summarize(const Suite& suite, const Log& log, const std::string& key) {
    // Lengths done by earlier commands with the same options are part of the summary.
    std::vector<Json> lines;
    for (const auto& [name, whole] : log.lines) {
        lines.push_back(whole.at("key"));
        lines.back().update(whole.at("result"));
    }
    const auto place = [](const Json& line) { return std::pair(line.value("length", int64_t(0)), line.value("item", int64_t(0))); };
    std::stable_sort(lines.begin(), lines.end(), [&](const Json& a, const Json& b) { return place(a) < place(b); });
    size_t done = 0;
    for (const SuiteItem& item : suite.items) done += log.lines.count(item.key.dump());
    Json s = {{"format", "bam-eval"}, {"version", 1}, {"suite", suite.name}, {"variant", suite.variant}, {"model", o_.model},
              {"trained_length", o_.trained_length}, {"options", suite.options}, {"run", key},
              {"items", suite.items.size()}, {"items_done", done}};
    s["results"] = lines.empty() ? Json::array() : suite.summarize(lines);
    write_file_atomically(o_.out + "/" + suite.file + ".json", dump(s, 1) + "\n");
    if (o_.quiet) return;
    std::string text = suite.name + " " + suite.variant + ", " + std::to_string(done) + " of " +
                       std::to_string(suite.items.size()) + " items -> " + o_.out + "/" + suite.file + ".json\n";
    if (!lines.empty()) text += suite.table(s["results"]);
    std::printf("%s", text.c_str());
    std::fflush(stdout);
}

Runner::End Runner::run(const Suite& suite, Reader& reader) {
    std::filesystem::create_directories(o_.out);
    const std::string key = hash_of(o_.identity + dump(suite.options) + suite.file);
    Log log(o_.out + "/" + suite.file + ".jsonl", key);
    started_ = clock::now(), work_done_ = work_left_ = 0;
    size_t done = 0;
    for (const SuiteItem& item : suite.items) {
        if (log.lines.count(item.key.dump())) ++done;
        else work_left_ += cost(item);
    }
    if (!o_.quiet) progress_ = std::make_unique<Progress>();
    End end = End::finished;
    for (const SuiteItem& item : suite.items) {
        if (log.lines.count(item.key.dump())) continue;
        show(suite, item, done);
        item_tokens_ = item.tokens * item.rows, item_read_ = 0, item_cost_ = cost(item);
        const auto begun = clock::now();
        try {
            if (must_stop()) throw Stopped();
            const Json result = item.run(reader);
            log.add({{"run", key}, {"suite", suite.name}, {"variant", suite.variant}, {"key", item.key}, {"result", result},
                     {"seconds", seconds_since(begun)}});
        } catch (const Stopped&) {
            end = interrupted() ? End::interrupted : End::out_of_time;
            break;
        }
        ++done, work_done_ += item_cost_, work_left_ -= item_cost_;
    }
    progress_.reset();
    summarize(suite, log, key);
    return end;
}

}  // namespace bam
