// `bam report`: pictures of runs and comparisons, by scripts/report.py.
#pragma once
#include <string>
#include <vector>

namespace bam {

// Runs the script (found beside the build tree or under <prefix>/share/bam) with python3; out empty: <first directory>/report.
// Returns its exit code. Errors: Error(kExitFailure) when the script or python3 is missing.
int report(const std::vector<std::string>& directories, const std::string& out, const std::string& title);

}  // namespace bam
