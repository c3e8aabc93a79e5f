// Word lists for needles: "quiet-harbor". Written for this project.
#pragma once
#include <string>
#include <vector>

namespace bam {

const std::vector<std::string>& adjectives();
const std::vector<std::string>& nouns();

}  // namespace bam
