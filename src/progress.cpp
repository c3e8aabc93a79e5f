#include "progress.h"

#include <unistd.h>

#include <cstdio>

namespace bam {

Progress::Progress() : terminal_(isatty(STDOUT_FILENO)), last_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
    if (live_) std::printf("\n");
    std::fflush(stdout);
}

void Progress::clear() {
    if (live_) std::printf("\r\033[K");
    live_ = false;
}

void Progress::update(const std::string& line, bool due) {
    const auto now = std::chrono::steady_clock::now();
    if (terminal_) {
        clear();
        std::printf("%s", line.c_str());
        live_ = true;
    } else if (due || now - last_ > std::chrono::seconds(30)) {
        std::printf("%s\n", line.c_str());
        last_ = now;
    }
    std::fflush(stdout);
}

void Progress::print(const std::string& line) {
    clear();
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
}

std::string human_time(double seconds) {
    char text[48];
    const long s = seconds < 0 ? 0 : long(seconds + 0.5);
    if (s < 60) std::snprintf(text, sizeof text, "%lds", s);
    else if (s < 3600) std::snprintf(text, sizeof text, "%ldm%02lds", s / 60, s % 60);
    else std::snprintf(text, sizeof text, "%ldh%02ldm", s / 3600, s / 60 % 60);
    return text;
}

}  // namespace bam
