// The product's model as tests call it: host vectors in, host vectors out.
#pragma once
#include <memory>
#include <vector>

#include "model.h"
#include "reference_model.h"

namespace bam::test {

Batch product_batch(const ReferenceBatch& batch, int first_row = 0, int rows = 0);  // rows 0: all

struct ProductOutput {
    std::vector<float> logits;  // (B, T, V)
    std::vector<float> losses;  // (B, T)
    std::vector<float> grads;   // of the mean loss, the table's trained part
    double loss() const;
};

class Product {
public:
    // One thread unless a test is about more: these models are too small to share.
    Product(const ModelConfig& m, const std::vector<float>& weights, DType compute = DType::f32, int threads = 1);
    Backend& device() { return *device_; }
    Model& model() { return *model_; }

    std::vector<float> logits(const ReferenceBatch& batch);
    ProductOutput run(const ReferenceBatch& batch, int micro_batch = 0, Keep keep = Keep::all);  // 0: all rows at once

private:
    std::unique_ptr<Backend> device_;
    std::unique_ptr<Model> model_;
};

std::vector<float> as_floats(const std::vector<double>& x);

}  // namespace bam::test
