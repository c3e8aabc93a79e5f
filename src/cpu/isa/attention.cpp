// Attention, flash style: memory linear in T, logits only ever in 64 x 64 tiles (definitions: DESIGN §2.2).
#include "cpu/isa/attention_backward.h"
#include "cpu/isa/attention_forward.h"
#include "cpu/isa/declare.h"

namespace {

template <typename Op, typename T>
void forward(const AttentionCall& c, const AttentionTask& t) {
    Scratch m{reinterpret_cast<uintptr_t>(t.scratch)};
    Forward<Op> pass(c, m);
    int count;
    QueryTile<Op>* tiles = make_tiles<Op>(c, t, pass, m, count);
    const ProductScope<Op> scope;
    pass.template run<T>(t, tiles, count, m);
}

template <typename Op, typename T>
void backward(const AttentionCall& c, const AttentionTask& t) {
    Scratch m{reinterpret_cast<uintptr_t>(t.scratch)};
    Backward<Op> pass(c, m);
    int count;
    QueryTile<Op>* tiles = make_tiles<Op>(c, t, pass, m, count);
    const ProductScope<Op> scope;
    pass.template run<T>(t, tiles, count);
}

template <typename Op, template <typename> typename Pass>
int64_t scratch_bytes(const AttentionCall& c, int64_t queries) {
    Scratch m{0};
    Pass<Op> pass(c, m);
    AttentionTask t{};
    t.end = queries;
    int count;
    make_tiles<Op>(c, t, pass, m, count);
    const int64_t D = round_up(c.D, Op::kPadD);
    return m.used + 2 * kTile * (D > kTile ? D : kTile) * int64_t(sizeof(float)) + 4096;
}

}  // namespace

namespace bam::BAM_ISA {

int64_t attention_forward_scratch(const AttentionCall& c, int64_t queries) {
    return c.low ? scratch_bytes<LowOp, Forward>(c, queries) : scratch_bytes<Fp32, Forward>(c, queries);
}

void attention_forward(const AttentionCall& c, const AttentionTask& t) {
    c.low ? forward<LowOp, uint16_t>(c, t) : forward<Fp32, float>(c, t);
}

int64_t attention_backward_scratch(const AttentionCall& c, int64_t queries) {
    return c.low ? scratch_bytes<LowOp, Backward>(c, queries) : scratch_bytes<Fp32, Backward>(c, queries);
}

void attention_backward(const AttentionCall& c, const AttentionTask& t) {
    c.low ? backward<LowOp, uint16_t>(c, t) : backward<Fp32, float>(c, t);
}

}  // namespace bam::BAM_ISA
