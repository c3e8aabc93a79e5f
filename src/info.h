// `bam info`: what this binary is and what it runs on.
#pragma once
#include <string>

namespace bam {

int print_info(const std::string& device, bool json);

}  // namespace bam
