// `bam bench train|ops`: whole steps and single ops on random tokens, as DESIGN §5 defines speed.
#pragma once
#include <cstdint>
#include <string>

namespace bam {

struct BenchOptions {
    std::string preset = "l12", pe = "nope", dtype = "auto", device = "auto", recompute = "none";
    int vocab_size = 32768, seq_len = 512, micro_batch = 0, steps = 3, threads = 0;
    int64_t tokens = 8192;
    bool json = false;
};

int bench_train(const BenchOptions& o);
int bench_ops(const BenchOptions& o);

}  // namespace bam
