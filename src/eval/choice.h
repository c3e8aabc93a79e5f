// Multiple choice (DESIGN §8): ARC, HellaSwag and MMLU (by letters or by the choices' text) from JSONL in the field names of the
// public data sets; prompts and scoring as lm-evaluation-harness has them, without examples (0-shot).
#pragma once
#include <string>
#include <vector>

#include "eval/suite.h"
#include "tokenizer.h"

namespace bam {

struct ChoiceItem {
    std::string context;
    std::vector<std::string> choices;  // without the space that stands before them
    int gold = 0;
};

struct ChoiceOptions {
    std::vector<std::string> files;
    int samples = 0;  // only the first so many of each file; 0: all
};

// One line of a file. `task` empty: what its fields show (MMLU: letters). Errors: Error(kExitData) beginning with `place`.
ChoiceItem parse_choice(const std::string& line, const std::string& task, const std::string& place);

// Context and choice are encoded together, a space between them; the choice's tokens are those behind as many as the context
// alone has. Spaces at the context's end count to the choice.
struct EncodedPair {
    std::vector<int> ids;
    int64_t from = 0;
};
EncodedPair encode_pair(const Tokenizer& tokenizer, const std::string& context, const std::string& continuation);

int64_t characters(const std::string& text);  // of UTF-8

// variant: "" or a task's name. Errors: Error(kExitUsage) for an unknown one or no files; Error(kExitData) naming file and line.
Suite make_choice(const std::string& variant, const ChoiceOptions& o, const Tokenizer& tokenizer);

}  // namespace bam
