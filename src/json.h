// Strict JSON text: comments, trailing text and duplicate keys are refused, and the message says file, line and column.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "check.h"

namespace bam {

// Json is nlohmann::json or nlohmann::ordered_json. Errors: Error(code) beginning with origin.
template <class Json>
Json parse_json(const std::string& text, const std::string& origin, ExitCode code);

// A file's whole content. Errors: Error(code) naming the file and the system's reason.
std::string read_text_file(const std::string& path, ExitCode code);

nlohmann::ordered_json read_json_file(const std::string& path, ExitCode code);

}  // namespace bam
