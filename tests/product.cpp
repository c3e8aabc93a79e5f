#include "product.h"

#include <algorithm>

#include "arena.h"
#include "subjects.h"

namespace bam::test {

Batch product_batch(const ReferenceBatch& batch, int first_row, int rows) {
    if (rows == 0) rows = batch.B - first_row;
    const auto begin = size_t(first_row * batch.T), end = begin + size_t(rows * batch.T);
    auto part = [&](const auto& x) {
        return std::vector<int32_t>(x.begin() + int64_t(begin), x.begin() + int64_t(end));
    };
    Batch b;
    b.B = rows, b.T = batch.T;
    b.ids = part(batch.ids), b.targets = part(batch.targets);
    b.key_begin = part(batch.first), b.positions = part(batch.position);
    return b;
}

double ProductOutput::loss() const {
    double sum = 0;
    for (float l : losses) sum += l;
    return sum / double(losses.size());
}

Product::Product(const ModelConfig& m, const std::vector<float>& weights, DType compute, int threads)
    : device_(make_test_backend(threads)), model_(std::make_unique<Model>(*device_, m, compute)) {
    model_->fill_weights([&](float* values) { std::ranges::copy(weights, values); });
}

std::vector<float> Product::logits(const ReferenceBatch& batch) {
    std::vector<float> z(batch.ids.size() * size_t(model_->config().vocab_size));
    model_->forward(product_batch(batch));
    model_->logits(0, int64_t(batch.ids.size()), z.data());
    return z;
}

ProductOutput Product::run(const ReferenceBatch& batch, int micro_batch, Keep keep) {
    ProductOutput out;
    out.logits = logits(batch);
    const int64_t N = int64_t(batch.ids.size());
    Tensor losses, grads;
    const Arena memory = make_arena(*device_, [&](Arena& a) {
        losses = a.take(DType::f32, {N});
        grads = a.take(DType::f32, {model_->table().trained});
    });
    device_->zero(grads);
    if (micro_batch == 0) micro_batch = batch.B;
    for (int row = 0; row < batch.B; row += micro_batch) {
        const int rows = std::min(micro_batch, batch.B - row);
        model_->reserve(rows, batch.T, keep);
        model_->loss_and_gradients(product_batch(batch, row, rows),
                                   losses.slice(int64_t(row) * batch.T, int64_t(rows) * batch.T), grads,
                                   1.0f / float(N));
    }
    out.losses.resize(size_t(N));
    out.grads.resize(size_t(grads.numel()));
    device_->download(out.losses.data(), losses);
    device_->download(out.grads.data(), grads);
    return out;
}

std::vector<float> as_floats(const std::vector<double>& x) {
    return {x.begin(), x.end()};
}

}  // namespace bam::test
