#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "batches.h"
#include "check.h"
#include "device.h"
#include "plan.h"
#include "random.h"
#include "stepper.h"

namespace bam {

using json = nlohmann::ordered_json;

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Config bench_config(const BenchOptions& o) {
    json model = {{"preset", o.preset}, {"vocab_size", o.vocab_size}};
    if (o.layers > 0) model["n_layers"] = o.layers;
    const json j = {{"model", model},
                    {"data", {{"train", {"random tokens"}}}},
                    {"run", {{"dtype", o.dtype}, {"device", o.device}, {"threads", o.threads}}},
                    {"train",
                     {{"seq_len", o.seq_len},
                      {"tokens_per_step", o.tokens / o.seq_len * o.seq_len},
                      {"micro_batch", o.micro_batch},
                      {"recompute", o.recompute}}}};
    if (o.tokens < o.seq_len)
        throw Error(kExitUsage, "--tokens " + std::to_string(o.tokens) + " is less than one row of --seq-len " +
                                    std::to_string(o.seq_len));
    Config c = parse_config(j, "bench");
    apply_variant(c.model.position, o.pe);
    return c;
}

Batch random_batch(const Config& c, int B, uint64_t stream) {
    std::vector<int32_t> rows(size_t(B) * (c.train.seq_len + 1));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = int32_t(random_below(c.run.seed, stream, i, c.model.vocab_size));
    DataConfig d = c.data;
    d.has_separator = false;
    return make_batch(rows, B, c.train.seq_len, d);
}

struct StepTimes {
    double seconds = 0;                   // of the median step
    std::map<std::string, double> by_op;  // of the same step
    std::map<std::string, double> op_medians;
    int64_t memory = 0;
};

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

StepTimes time_steps(Backend& device, const Config& c, DType compute, int steps) {
    Stepper stepper(device, c, compute);
    Model& model = stepper.model();
    model.fill_weights([&](float* w) { init_weights(model.table(), c.model, c.run.seed, w); });
    const int64_t rows = c.train.rows_per_step(), M = c.train.micro_batch;
    std::vector<StepTimes> measured;
    for (int s = 0; s <= steps; ++s) {  // the first warms up
        device.profile(true);
        const double begin = now();
        stepper.begin();
        for (int64_t row = 0; row < rows; row += M)
            stepper.accumulate(random_batch(c, int(std::min(M, rows - row)), uint64_t(s) << 32 | row), row);
        const Stepper::Result r = stepper.measure();
        stepper.apply(r, s + 1, 1.0);
        device.synchronize();
        const double seconds = now() - begin;
        if (s > 0) measured.push_back({seconds, device.profile_seconds(), {}, 0});
    }
    device.profile(false);
    std::sort(measured.begin(), measured.end(),
              [](const StepTimes& a, const StepTimes& b) { return a.seconds < b.seconds; });
    StepTimes t = measured[measured.size() / 2];
    for (const auto& [op, _] : t.by_op) {
        std::vector<double> times;
        for (StepTimes& m : measured) times.push_back(m.by_op[op]);
        t.op_medians[op] = median(times);
    }
    t.memory = device.used_memory();
    return t;
}

}  // namespace

int bench_train(const BenchOptions& o) {
    Config c = bench_config(o);
    auto device = open_device(o.device, o.threads);
    const DType compute = resolve(c, *device);
    const double gemm_before = device->measure_gemm(compute);
    const StepTimes t = time_steps(*device, c, compute, o.steps);
    const double gemm = std::max(gemm_before, device->measure_gemm(compute));
    const double rate = double(c.train.tokens_per_step) / t.seconds;
    const double flops = rate * training_flops_per_token(c.model, c.train.seq_len);
    double named = 0;
    for (const auto& [op, seconds] : t.by_op) named += seconds;
    json j = {{"model", o.preset},
              {"encoding", variant_of(c.model.position)},
              {"dtype", c.run.dtype},
              {"seq_len", c.train.seq_len},
              {"tokens_per_step", c.train.tokens_per_step},
              {"micro_batch", c.train.micro_batch},
              {"step_seconds", t.seconds},
              {"tok_per_s", rate},
              {"model_flops_per_s", flops},
              {"gemm_flops_per_s", gemm},
              {"utilization", flops / gemm},
              {"peak_bytes", t.memory},
              {"seconds_by_op", t.by_op},
              {"seconds_outside_ops", t.seconds - named}};
    if (o.json) {
        std::printf("%s\n", j.dump(2).c_str());
        return kExitDone;
    }
    std::printf("%s %s %s, T %d, %lld tokens a step in micro-batches of %d rows, on %s\n", o.preset.c_str(),
                variant_of(c.model.position).c_str(), c.run.dtype.c_str(), c.train.seq_len,
                (long long)c.train.tokens_per_step, c.train.micro_batch, device->name().c_str());
    std::printf("%.0f tok/s, %s of %s GEMM: utilization %.1f%%, peak %s\n", rate, human_flops(flops).c_str(),
                human_flops(gemm).c_str(), 100 * flops / gemm, human_bytes(double(t.memory)).c_str());
    std::vector<std::pair<double, std::string>> sorted;
    for (const auto& [op, seconds] : t.by_op) sorted.push_back({seconds, op});
    sorted.push_back({t.seconds - named, "(outside ops)"});
    std::sort(sorted.rbegin(), sorted.rend());
    for (const auto& [seconds, op] : sorted)
        std::printf("  %-22s %9.1f ms %5.1f%%\n", op.c_str(), 1e3 * seconds, 100 * seconds / t.seconds);
    return kExitDone;
}

namespace {

// What an op cannot do without in one step: multiply-adds at GEMM speed, bytes at memory bandwidth.
struct Floor {
    double flops = 0, bytes = 0;
};

std::map<std::string, Floor> step_floors(const Config& c, DType compute) {
    const ModelConfig& m = c.model;
    const double N = double(c.train.tokens_per_step), e = double(size_of(compute)), C = m.dim, F = m.ffn_hidden,
                 V = m.vocab_size;
    const double L = m.n_layers, P = double(make_parameter_table(m).trained), W = double(matmul_parameters(m));
    const double attention = 2 * N * c.train.seq_len * C * L;  // two products over the causal half
    const double qkv = double(m.qkv_dim()), rotated = double(m.n_heads + m.n_kv_heads) * m.head_dim();
    return {{"matmul_forward", {2 * N * W, 0}},
            {"matmul_backward", {4 * N * W, 0}},
            {"attention_forward", {attention, N * L * e * (qkv + C)}},
            {"attention_backward", {2.5 * attention, N * L * e * (2 * qkv + 2 * C)}},
            {"norm_forward", {0, N * C * (2 * L + 1) * (8 + 2 * e)}},
            {"norm_backward", {0, N * C * (2 * L + 1) * (12 + 2 * e)}},
            {"rope_forward", {0, 2 * N * L * rotated * e}},
            {"rope_backward", {0, 2 * N * L * rotated * e}},
            {"swiglu_forward", {0, 3 * N * L * F * e}},
            {"swiglu_backward", {0, 5 * N * L * F * e}},
            {"cross_entropy", {0, N * V * (4 + e)}},
            {"embedding_forward", {0, 8 * N * C}},
            {"embedding_backward", {0, 12 * N * C}},
            {"refresh_weights", {0, W * (4 + 2 * e)}},
            {"global_norm", {0, 4 * P}},
            {"update", {0, 28 * P}},
            {"zero", {0, 4 * P}}};
}

// Bytes/s of a copy far larger than the caches.
double measure_bandwidth(Backend& device) {
    constexpr int64_t kElements = 64 << 20;
    Arena memory(device, 2 * 4 * kElements);
    const Tensor a = memory.take(DType::f32, {kElements}), b = memory.take(DType::f32, {kElements});
    device.zero(a);
    device.zero(b);
    double best = 0;
    for (int i = 0; i < 5; ++i) {
        const double begin = now();
        device.copy(b, a);
        device.synchronize();
        best = std::max(best, 2.0 * 4 * kElements / (now() - begin));
    }
    return best;
}

}  // namespace

int bench_ops(const BenchOptions& o) {
    Config c = bench_config(o);
    auto device = open_device(o.device, o.threads);
    const DType compute = resolve(c, *device);
    const double gemm = device->measure_gemm(compute), bandwidth = measure_bandwidth(*device);
    const StepTimes t = time_steps(*device, c, compute, o.steps);
    const std::map<std::string, Floor> floors = step_floors(c, compute);
    json rows = json::array();
    for (const auto& [op, seconds] : t.op_medians) {
        const auto f = floors.find(op);
        const double floor = f == floors.end() ? 0 : std::max(f->second.flops / gemm, f->second.bytes / bandwidth);
        rows.push_back({{"op", op},
                        {"seconds", seconds},
                        {"floor_seconds", floor},
                        {"ratio", floor > 0 ? json(seconds / floor) : json()}});
    }
    json j = {{"gemm_flops_per_s", gemm}, {"bytes_per_s", bandwidth}, {"step_seconds", t.seconds}, {"ops", rows}};
    if (o.json) {
        std::printf("%s\n", j.dump(2).c_str());
        return kExitDone;
    }
    std::printf("%s %s %s, T %d, %lld tokens: GEMM %s, copy %s/s\n", o.preset.c_str(),
                variant_of(c.model.position).c_str(), c.run.dtype.c_str(), c.train.seq_len,
                (long long)c.train.tokens_per_step, human_flops(gemm).c_str(), human_bytes(bandwidth).c_str());
    std::printf("  %-22s %10s %10s %8s\n", "op", "ms a step", "floor ms", "ratio");
    for (const json& r : rows)
        std::printf("  %-22s %10.2f %10.2f %8s\n", r["op"].get<std::string>().c_str(), 1e3 * r["seconds"].get<double>(),
                    1e3 * r["floor_seconds"].get<double>(),
                    r["ratio"].is_null() ? "-" : std::to_string(r["ratio"].get<double>()).substr(0, 5).c_str());
    return kExitDone;
}

int bench_attention(const BenchOptions& options, std::vector<std::string> variants, const std::vector<int>& lengths) {
    if (variants == std::vector<std::string>{"all"}) variants = variant_names();
    std::vector<Config> configs;
    for (int T : lengths)
        for (const std::string& pe : variants) {
            BenchOptions o = options;
            o.seq_len = T, o.pe = pe, o.tokens = std::max<int64_t>(o.tokens, T), o.layers = 1, o.vocab_size = 257;
            configs.push_back(bench_config(o));
        }
    auto device = open_device(options.device, options.threads);
    const DType compute = choose_dtype(options.dtype, *device);
    const double gemm = device->measure_gemm(compute);
    json rows = json::array();
    for (Config& c : configs) {
        device = open_device(options.device, options.threads);  // a device keeps the weights of a model that it saw
        resolve(c, *device);
        const std::map<std::string, double> t = time_steps(*device, c, compute, options.steps).op_medians;
        const std::map<std::string, Floor> floors = step_floors(c, compute);
        json row = {{"encoding", variant_of(c.model.position)},
                    {"seq_len", c.train.seq_len},
                    {"tokens", c.train.tokens_per_step}};
        for (const char* pass : {"forward", "backward"}) {
            const std::string op = std::string("attention_") + pass;
            const double rate = floors.at(op).flops / t.at(op);
            row[pass] = {{"seconds", t.at(op)}, {"flops_per_s", rate}, {"utilization", rate / gemm}};
        }
        double encoding = 0;
        for (const char* op : {"rope_forward", "rope_backward", "prior_tables"}) encoding += t.count(op) ? t.at(op) : 0;
        row["encoding_seconds"] = encoding;
        rows.push_back(row);
    }
    if (options.json) {
        const json j = {
            {"model", options.preset}, {"dtype", name_of(compute)}, {"gemm_flops_per_s", gemm}, {"attention", rows}};
        std::printf("%s\n", j.dump(2).c_str());
        return kExitDone;
    }
    std::printf(
        "one layer of %s %s on %s: GEMM %s; FLOPs of the causal half; rotations and tables of the encoding beside "
        "them\n",
        options.preset.c_str(), name_of(compute), device->name().c_str(), human_flops(gemm).c_str());
    std::printf("  %-18s %8s %8s %12s %8s %12s %8s %12s\n", "encoding", "T", "tokens", "forward ms", "of GEMM",
                "backward ms", "of GEMM", "encoding ms");
    for (const json& r : rows)
        std::printf("  %-18s %8d %8d %12.2f %7.1f%% %12.2f %7.1f%% %12.2f\n", r["encoding"].get<std::string>().c_str(),
                    r["seq_len"].get<int>(), r["tokens"].get<int>(), 1e3 * r["forward"]["seconds"].get<double>(),
                    100 * r["forward"]["utilization"].get<double>(), 1e3 * r["backward"]["seconds"].get<double>(),
                    100 * r["backward"]["utilization"].get<double>(), 1e3 * r["encoding_seconds"].get<double>());
    return kExitDone;
}

}  // namespace bam
