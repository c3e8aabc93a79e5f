// Errors as users meet them: an exception with one line of text and the exit code of DESIGN §4.
// main() catches it, prints the line and returns the code; nothing below main exits or asserts on bad input.
#pragma once
#include <stdexcept>
#include <string>

namespace bam {

enum ExitCode : int {
    kExitDone = 0,
    kExitFailure = 1,       // anything else: disk full, out of memory
    kExitUsage = 2,         // command line or config
    kExitData = 3,          // bad or missing data or model
    kExitDiverged = 4,      // non-finite loss or gradient
    kExitPeerLost = 5,      // another process of the job died
    kExitInterrupted = 75,  // saved after a signal or --stop-at; start again to go on
};

struct Error : std::runtime_error {
    Error(ExitCode code, const std::string& line) : std::runtime_error(line), code(code) {}
    ExitCode code;
};

}  // namespace bam
