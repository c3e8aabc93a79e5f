// metrics.jsonl of a run directory (DESIGN §3): one JSON object a line, numbers in full precision, NaN and infinities
// as null.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace bam {

// Appends; a torn last line of an earlier process is ended first, so that every object has a line of its own. Each line
// reaches the system as it is logged. Errors: Error(kExitFailure) naming the file and the system's reason.
class MetricsLog {
public:
    explicit MetricsLog(const std::string& path);
    ~MetricsLog();
    MetricsLog(const MetricsLog&) = delete;
    void log(const nlohmann::ordered_json& object);

private:
    void write(const std::string& text);
    std::string path_;
    int fd_ = -1;
};

}  // namespace bam
