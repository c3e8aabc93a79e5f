// `bam bench train|ops|attention`: whole steps and single ops on random tokens, as DESIGN §5 defines speed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace bam {

struct BenchOptions {
    std::string preset = "l12", pe = "nope", dtype = "auto", device = "auto", recompute = "none";
    int vocab_size = 32768, seq_len = 512, micro_batch = 0, steps = 3, threads = 0;
    int layers = 0;  // 0: the preset's
    int64_t tokens = 8192;
    bool json = false;
};

int bench_train(const BenchOptions& o);
int bench_ops(const BenchOptions& o);
// Attention within steps of one layer: of each variant (one of "all": all ten) at each length.
int bench_attention(const BenchOptions& o, std::vector<std::string> variants, const std::vector<int>& lengths);

}  // namespace bam
