// A second opinion on the whole model: DESIGN §2's formulas in double, one plain loop per formula, written to be read
// rather than to be fast. It shares names and shapes with the product (ModelConfig, ParameterTable), and no arithmetic.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "config.h"
#include "parameters.h"

namespace bam::test {

// Rows of inputs and their targets: row r of a stream is stream[rT .. rT + T].
struct ReferenceBatch {
    int B = 0, T = 0;
    std::vector<int32_t> ids, targets;  // (B, T)
    std::vector<int> first, position;   // (B, T): the first key a query sees, and the token's position
};
ReferenceBatch reference_batch(const std::vector<int32_t>& stream, int B, int T, const DataConfig& data);

struct ReferenceOutput {
    std::vector<double> logits;  // (B, T, V)
    std::vector<double> losses;  // (B, T)
    double loss = 0;             // their mean
    std::vector<double> grads;   // of the loss, by the table's offsets, frozen thetas too
};
ReferenceOutput reference_run(const ModelConfig& m, const ParameterTable& table, const std::vector<double>& weights,
                              const ReferenceBatch& batch, bool with_gradients = true);

// Weights that make every parameter matter: matrices like init "pytorch" but wider, norms and s_h around 1, thetas as
// given.
std::vector<double> reference_weights(const ModelConfig& m, const ParameterTable& table, uint64_t seed);

// d f / d x by a five-point stencil, error O(h^4).
double central_difference(const std::function<double()>& f, double& x, double h);

}  // namespace bam::test
