// Runs a suite's items on a reader: what is done already is read back, what is new is appended, and all is summed up.
#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "eval/suite.h"
#include "progress.h"

namespace bam {

struct RunnerOptions {
    std::string out;             // directory; made if missing
    Json model;                  // what the summary says of the model
    int trained_length = 0;
    std::string identity;        // all of the model that decides results: weights, shape, dtype, ...
    double flops_linear = 1;     // cost of n tokens ~ flops_linear * n + flops_quadratic * n^2, for the time left
    double flops_quadratic = 0;
    bool quiet = false;
};

class Runner {
public:
    explicit Runner(RunnerOptions options) : o_(std::move(options)) {}
    void set_deadline(std::chrono::steady_clock::time_point t) { deadline_ = t; }

    enum class End { finished, out_of_time, interrupted };
    // Errors: Error(kExitFailure) when results cannot be written.
    End run(const Suite& suite, Reader& reader);

    // To be told of tokens as they are read: shows progress, and stops the current item when a signal came or time is up.
    void on_chunk(int64_t tokens);

private:
    struct Log;
    double cost(const SuiteItem& item) const;
    void show(const Suite& suite, const SuiteItem& item, size_t done);
    void summarize(const Suite& suite, const Log& log, const std::string& key);
    bool must_stop() const;

    RunnerOptions o_;
    std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
    std::chrono::steady_clock::time_point started_;
    std::unique_ptr<Progress> progress_;
    std::string line_;                       // what is being done
    double work_done_ = 0, work_left_ = 0;   // in flops, this run
    int64_t item_tokens_ = 0, item_read_ = 0;
    double item_cost_ = 0;
};

}  // namespace bam
