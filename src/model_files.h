// The files of a model directory and of the optimizer, as checkpoint.cpp puts them together.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "checkpoint.h"

namespace bam {

inline constexpr const char* kModelConfig = "config.json";
inline constexpr const char* kModelWeights = "model.safetensors";

// Into a directory that exists; name -> xxh64 of each file.
std::map<std::string, uint64_t> write_model_files(const std::string& dir, const ModelConfig& m, const ModelExtras& e,
                                                  const ParameterTable& t, const float* weights);

// m and v: (t.trained), as tensors "m.NAME" and "v.NAME".
uint64_t write_moments(const std::string& path, const ParameterTable& t, const float* m, const float* v);
void read_moments(const std::string& path, const ParameterTable& t, float* m, float* v);

}  // namespace bam
