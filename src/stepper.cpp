#include "stepper.h"

#include <cmath>

#include "optimizer.h"
#include "plan.h"

namespace bam {

Stepper::Stepper(Backend& device, const Config& config, DType compute)
    : config_(config),
      model_(device, config.model, compute,
             plan_memory(config, device, compute, config.train.micro_batch).keeps_copies) {
    const int64_t trained = model_.table().trained, targets = config.train.rows_per_step() * config.train.seq_len;
    memory_ = make_arena(device, [&](Arena& a) {
        grads_ = a.take(DType::f32, {trained});
        m_ = a.take(DType::f32, {trained});
        v_ = a.take(DType::f32, {trained});
        losses_ = a.take(DType::f32, {targets});
    });
    device.zero(m_);
    device.zero(v_);
    host_losses_.resize(targets);
    model_.reserve(config.train.micro_batch, config.train.seq_len, keep_for(config.train.recompute));
}

void Stepper::begin() { model_.device().zero(grads_); }

void Stepper::accumulate(const Batch& batch, int64_t row) {
    const int64_t T = config_.train.seq_len;
    const float scale = float(1.0 / double(losses_.numel()));
    model_.loss_and_gradients(batch, losses_.slice(row * T, batch.B * T), grads_, scale);
}

bool Stepper::Result::finite() const { return std::isfinite(loss) && std::isfinite(grad_norm) && bad_rows.empty(); }

Stepper::Result Stepper::measure() {
    Result r;
    const int64_t T = config_.train.seq_len, rows = config_.train.rows_per_step();
    r.grad_norm = model_.device().global_norm(grads_);
    model_.device().download(host_losses_.data(), losses_);
    for (int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (int64_t t = 0; t < T; ++t) sum += host_losses_[row * T + t];
        if (!std::isfinite(sum)) r.bad_rows.push_back(row);
        r.loss += sum;
    }
    r.loss /= double(losses_.numel());
    return r;
}

void Stepper::apply(const Result& r, int64_t update, double schedule_factor) {
    const OptimizerConfig& o = config_.train.optimizer;
    model_.device().update(model_.weights().slice(0, model_.table().trained), m_, v_, grads_,
                           update_groups(model_.table(), o, schedule_factor),
                           update_step(o, update, clip_factor(r.grad_norm, config_.train.grad_clip)));
    model_.weights_changed();
}

}  // namespace bam
