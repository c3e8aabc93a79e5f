// Models and data that the tests walk through: all ten variants, each as it is and with every option it has.
#pragma once
#include <string>
#include <vector>

#include "reference_model.h"

namespace bam::test {

struct Shape {
    int heads = 3, kv_heads = 1;  // kv_heads in the cases with grouped queries
    int head_dim = 5;             // one more with RoPE if odd
    int ffn = 7, vocab = 11, layers = 2;
    int rows = 2, length = 9;
};

struct Case {
    std::string name;
    ModelConfig model;
    DataConfig data;
    int rows = 0, length = 0;
};

ModelConfig model_for(const std::string& variant, const Shape& shape = {});

// Separator 2; one token in four in batch_of().
DataConfig documents(bool mask, bool by_document = true, bool separator_at_end = true);

std::vector<Case> all_cases(const Shape& shape = {});
// Two a variant: plain, and as many options at once as it has.
std::vector<Case> few_cases(const Shape& shape);

ReferenceBatch batch_of(const Case& c);

// Sets every theta or s_h whose name ends so.
void set_parameters(std::vector<double>& weights, const ParameterTable& table, const std::string& suffix, double value);

}  // namespace bam::test
