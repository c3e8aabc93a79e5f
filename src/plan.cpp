#include "plan.h"

#include <algorithm>

#include "check.h"
#include "device.h"
#include "model.h"

namespace bam {

MemoryPlan plan_memory(const Config& c, const Backend& device, DType compute, int micro_batch) {
    const ModelConfig& m = c.model;
    const ParameterTable t = make_parameter_table(m);
    const int64_t C = m.dim, F = m.ffn_hidden;
    const Keep keep = keep_for(c.train.recompute);
    MemoryPlan p;
    p.weights = 4 * t.total;
    p.gradients = 4 * t.trained;
    p.moments = 8 * t.trained;
    p.copies = m.n_layers * (device.weight_bytes(m.qkv_dim(), C, compute) + device.weight_bytes(C, C, compute) +
                             device.weight_bytes(2 * F, C, compute) + device.weight_bytes(C, F, compute)) +
               device.weight_bytes(m.vocab_size, C, compute);
    p.activations = Model::activation_bytes(m, compute, micro_batch, c.train.seq_len, keep);
    if (has_prior(m.position.encoding))
        p.tables = int64_t(m.position.encoding == Encoding::bam && !m.position.bam_global ? m.n_layers : 1) * m.n_heads *
                   c.train.seq_len * 4 * 2;
    return p;
}

int choose_micro_batch(const Config& c, const Backend& device, DType compute) {
    const int64_t busy_tokens = device.host_memory() ? 8192 : 65536;
    const double room = 0.9 * double(device.total_memory());
    int64_t rows = std::clamp<int64_t>(busy_tokens / c.train.seq_len, 1, std::min<int64_t>(c.train.rows_per_step(), kMaxRows));
    while (rows > 1 && double(plan_memory(c, device, compute, int(rows)).total()) > room) rows = rows / 2;
    const MemoryPlan p = plan_memory(c, device, compute, int(rows));
    if (double(p.total()) > room)
        throw Error(kExitFailure, "training needs " + human_bytes(double(p.total())) + " even with micro_batch 1, and " +
                                      device.name() + " has " + human_bytes(double(device.total_memory())) +
                                      " in all; choose a smaller model or seq_len, or train.recompute \"block\"");
    return int(rows);
}

DType resolve(Config& c, const Backend& device) {
    const DType compute = choose_dtype(c.run.dtype, device);
    c.run.dtype = name_of(compute);
    c.train.micro_batch = c.train.micro_batch > 0
                              ? int(std::min<int64_t>(c.train.micro_batch, c.train.rows_per_step()))
                              : choose_micro_batch(c, device, compute);
    return compute;
}

}  // namespace bam
