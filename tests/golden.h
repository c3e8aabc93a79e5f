// Expected numbers computed by other programs: directories with config.json, model.safetensors, train.json and
// plain.safetensors | docmask.safetensors (DESIGN §2.5). Read here by other code than the product's.
#pragma once
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "config.h"
#include "parameters.h"

namespace bam::test {

struct Golden {
    std::string directory, mask;  // "plain" | "docmask"
    ModelConfig model;
    DataConfig data;
    TrainConfig train;
    int rows = 0;
    std::vector<int32_t> tokens;                        // rows * seq_len + 1
    std::map<std::string, std::vector<float>> weights;  // by parameter name
    std::map<std::string, std::vector<float>>
        expected;  // "logits", "loss", "grad.NAME", "losses", "grad_norms", "final.NAME"

    std::string name() const { return directory + "/" + mask; }
    std::string case_name() const;  // for GoogleTest: the last folder and the mask
    std::vector<float> arena(const ParameterTable& table) const;
};

inline std::ostream& operator<<(std::ostream& out, const Golden& g) {
    return out << g.name();
}

// F32 and I32 tensors of a safetensors file, the bits of I32 kept in floats.
std::map<std::string, std::vector<float>> read_tensors(const std::string& path);

// What lies in tests/data and, when it is there, in the goldens directory.
std::vector<Golden> all_goldens();

}  // namespace bam::test
