// Needles in a haystack: the eight tasks, prompts and scoring of RULER (Hsieh et al. 2024, arXiv 2404.06654; NVIDIA/RULER main).
// The prompts are RULER's word for word; words and the order of random draws are this project's own.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "eval/generate.h"
#include "eval/suite.h"
#include "tokenizer.h"

namespace bam {

enum class Haystack : uint8_t { noise, essay, needles };
enum class NeedleKind : uint8_t { words, numbers, uuids };

struct NiahTask {
    const char* name;
    Haystack haystack;
    NeedleKind keys, values;
    int n_keys, n_values, n_queries;  // keys hidden, values of each, keys asked for
};
const std::vector<NiahTask>& niah_tasks();

constexpr int kNiahAnswerTokens = 128;  // part of a task's length

struct NiahOptions {
    std::vector<int64_t> lengths;  // tokens of prompt and answer
    int samples = 0;               // a task and length; 0: 20
    uint64_t seed = 42;
    std::string essay_file;        // text; tasks with an essay haystack need it
};

struct NiahPrompt {
    std::string text;
    std::vector<std::string> answers;
};

// Item `item` of a task with `n` pieces of haystack: sentences of noise, other needles, or words of the essay.
NiahPrompt niah_prompt(const NiahTask& task, const std::vector<std::string>& essay_words, int64_t n, uint64_t seed, int item);

std::vector<std::string> split_words(const std::string& text);      // at any white space
std::vector<std::string> split_sentences(const std::string& text);  // behind . ! ? and closing quotes or brackets

// Share of the references that the answer contains, letter case aside (RULER's string_match_all).
double niah_score(const std::string& answer, const std::vector<std::string>& references);

// variant: task names separated by commas, or "" for all that can be done: without an essay file, those that need none.
// Errors: Error(kExitUsage) for an unknown task, an essay task without a file, or a length that cannot hold the prompt;
// Error(kExitData) for an essay file that cannot be read or has no text, or a tokenizer that cannot write a needle.
Suite make_niah(const std::string& variant, const NiahOptions& o, const Tokenizer& tokenizer, const Separator& separator);

}  // namespace bam
