// `bam score` and `bam generate`: from a model's path to what they print.
#pragma once
#include <string>
#include <vector>

#include "eval/loaded_model.h"
#include "eval/sampling.h"

namespace bam {

struct ScoreCommand {
    std::string model, tokens, text;   // one of the files
    LoadOptions load;
    bool document_mask = false, exact = false;
    int64_t context = 0, stride = 0;   // 0: everything, the context
    int64_t separator = -1;            // -1: the model's
    std::string separator_position;    // end | start, of a separator given here
    std::string positions;             // document | row; empty: the model's
};

// A JSON line for each token on stdout: {"id":5,"logprob":-1.25}, null for the first.
int score_command(const ScoreCommand& c);

struct GenerateCommand {
    std::string model;
    std::vector<std::string> prompts;
    LoadOptions load;
    SampleOptions sample;
    bool json = false;  // a line for each prompt when all are done, instead of text as it comes
};

int generate_command(const GenerateCommand& c);

}  // namespace bam
