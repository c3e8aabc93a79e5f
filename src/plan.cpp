#include "plan.h"

#include <algorithm>

#include "check.h"
#include "device.h"
#include "model.h"

namespace bam {

static double room(const Backend& device) {
    return 0.9 * double(device.total_memory());
}

int64_t copy_bytes(const ModelConfig& m, const Backend& device, DType compute, bool kept) {
    const int64_t C = m.dim, F = m.ffn_hidden;
    const int64_t output = device.weight_bytes(m.vocab_size, C, compute), w13 = device.weight_bytes(2 * F, C, compute);
    const int64_t qkv = device.weight_bytes(m.qkv_dim(), C, compute), wo = device.weight_bytes(C, C, compute);
    if (!kept) return std::max({output, w13, qkv});
    return output + m.n_layers * (qkv + wo + w13 + device.weight_bytes(C, F, compute));
}

static MemoryPlan plan_with(const Config& c, const Backend& device, DType compute, int micro_batch, bool keeps_copies) {
    const ModelConfig& m = c.model;
    const ParameterTable t = make_parameter_table(m);
    MemoryPlan p;
    p.keeps_copies = keeps_copies;
    p.weights = 4 * t.total;
    p.gradients = 4 * t.trained;
    p.moments = 8 * t.trained;
    p.copies = copy_bytes(m, device, compute, keeps_copies);
    p.activations = Model::activation_bytes(m, compute, micro_batch, c.train.seq_len, keep_for(c.train.recompute));
    if (has_prior(m.position.encoding))
        p.tables = int64_t(m.position.encoding == Encoding::bam && !m.position.bam_global ? m.n_layers : 1) *
                   m.n_heads * c.train.seq_len * 4 * 2;
    return p;
}

static bool fits(const MemoryPlan& p, const Backend& device) {
    return double(p.total()) <= room(device);
}

MemoryPlan plan_memory(const Config& c, const Backend& device, DType compute, int micro_batch) {
    const MemoryPlan p = plan_with(c, device, compute, micro_batch, true);
    return fits(p, device) ? p : plan_with(c, device, compute, micro_batch, false);
}

int choose_micro_batch(const Config& c, const Backend& device, DType compute) {
    const int64_t busy_tokens = device.host_memory() ? 8192 : 65536;
    const int64_t most =
        std::clamp<int64_t>(busy_tokens / c.train.seq_len, 1, std::min<int64_t>(c.train.rows_per_step(), kMaxRows));
    const auto largest = [&](bool keeps_copies) {
        int64_t rows = most;
        while (rows > 0 && !fits(plan_with(c, device, compute, int(rows), keeps_copies), device)) rows /= 2;
        return rows;
    };
    // Kept copies save a pass over the weights a micro-batch; larger micro-batches save passes over the gradients, too.
    const int64_t with = largest(true), without = largest(false);
    if (without == 0)
        throw Error(kExitFailure, "training needs " +
                                      human_bytes(double(plan_with(c, device, compute, 1, false).total())) +
                                      " even with micro_batch 1, and " + device.name() + " has " +
                                      human_bytes(double(device.total_memory())) +
                                      " in all; choose a smaller model or seq_len, or train.recompute \"block\"");
    return int(without >= 4 * with ? without : with);
}

DType resolve(Config& c, const Backend& device) {
    const DType compute = choose_dtype(c.run.dtype, device);
    c.run.dtype = name_of(compute);
    c.train.micro_batch = c.train.micro_batch > 0 ? int(std::min<int64_t>(c.train.micro_batch, c.train.rows_per_step()))
                                                  : choose_micro_batch(c, device, compute);
    return compute;
}

}  // namespace bam
