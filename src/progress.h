// What a long command says while it works: on a terminal one live line, elsewhere plain lines now and then.
#pragma once
#include <chrono>
#include <string>

namespace bam {

class Progress {
public:
    Progress();
    ~Progress();
    // On a terminal: replaces the live line. Elsewhere: prints it if `due` or if half a minute has passed since the last.
    void update(const std::string& line, bool due);
    // A line that stays, above the live one.
    void print(const std::string& line);

private:
    void clear();
    bool terminal_;
    bool live_ = false;
    std::chrono::steady_clock::time_point last_;
};

std::string human_time(double seconds);  // "3m20s"

}  // namespace bam
