// One optimizer step over a global batch: gradients summed over micro-batches, clipped, applied. Trainer, benchmark and tests
// share it.
#pragma once
#include <cstdint>
#include <vector>

#include "arena.h"
#include "config.h"
#include "model.h"

namespace bam {

class Stepper {
public:
    // Allocates weights, gradients and moments (zero) for the config on the device.
    Stepper(Backend& device, const Config& config, DType compute);

    Model& model() { return model_; }
    Tensor gradients() { return grads_; }  // (table.trained) f32
    Tensor first_moments() { return m_; }
    Tensor second_moments() { return v_; }

    void begin();                                      // zero gradients
    void accumulate(const Batch& batch, int64_t row);  // rows [row, row + B) of the global batch

    struct Result {
        double loss = 0;                // mean over all targets of the global batch
        double grad_norm = 0;           // before clipping
        std::vector<int64_t> bad_rows;  // whose loss is not finite
        bool finite() const;
    };
    Result measure();                                                   // after the last accumulate()
    void apply(const Result& r, int64_t update, double schedule_factor);  // update = 1, 2, ...

private:
    const Config& config_;
    Model model_;
    Arena memory_;
    Tensor grads_, m_, v_, losses_;  // losses (rows * T)
    std::vector<float> host_losses_;
};

}  // namespace bam
