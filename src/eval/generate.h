// Continuing texts with a model: several prompts side by side, told as they come.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "eval/reader.h"
#include "eval/sampling.h"
#include "model.h"
#include "tokenizer.h"

namespace bam {

struct Generated {
    std::vector<int> ids;    // all that was drawn, but a separator
    std::string text;        // up to the stop string
    std::string stopped_by;  // "length" | "stop" (a stop string) | "separator"
};

// Told pieces of text of each prompt's continuation, whole characters, never a part of a stop string; and when it is done.
struct TextSink {
    std::function<void(int prompt, const std::string& text)> text;
    std::function<void(int prompt)> done;
};

// What ends a document, and whether it stands before documents: then a prompt begins with it. id -1: none.
struct Separator {
    int id = -1;
    bool at_end = true;
};

// A prompt's ids, behind a separator where documents begin with one or the prompt is empty.
// Errors: Error(kExitUsage) for an empty prompt when there is no separator.
std::vector<int> prompt_ids(const Tokenizer& tokenizer, const Separator& separator, const std::string& prompt);

// Each prompt's continuation depends on its place in the list, the seed and itself, not on the other prompts.
std::vector<Generated> generate(Reader& reader, const Tokenizer& tokenizer, const Separator& separator,
                                const std::vector<std::vector<int>>& prompts, const SampleOptions& o, const TextSink& sink = {});

// Prompt and continuation, by a model that may be in training: its activation buffers are remade.
std::string sample_text(Model& model, const Tokenizer& tokenizer, const std::string& prompt, const SampleOptions& o);

}  // namespace bam
