// What the ops of backend.h compute, straight from DESIGN §2 in double precision: brute force, no tiles, no running
// maxima, nothing shared with src/. The right answers of ops_test.cpp (and of the CUDA backend's tests).
#pragma once
#include <cstdint>
#include <vector>

namespace reference {

using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;

// y (M, N) = a (M, K) b^T (N, K)
Doubles matmul(const Doubles& a, const Doubles& b, int64_t M, int64_t N, int64_t K);
Doubles transposed(const Doubles& a, int64_t rows, int64_t columns);

struct Norm {
    Doubles x, y, rstd;
};
Norm norm(const Doubles& x, const Doubles& delta, const Doubles& w, int64_t C, double eps);  // delta may be empty
struct NormGrads {
    Doubles dx, dw;
};
NormGrads norm_backward(const Doubles& dy, const Doubles& x, const Doubles& w, int64_t C, double eps);

Doubles swiglu(const Doubles& gate_up, int64_t F);
Doubles swiglu_backward(const Doubles& dy, const Doubles& gate_up, int64_t F);

// x (N, width): pair i of the first `heads` heads turned by positions[n] * base^(-2i/D).
Doubles rope(const Doubles& x, const Ints& positions, int64_t width, int heads, int D, double base, bool half,
             double sign);

struct Loss {
    Doubles losses, dlogits;
};
Loss cross_entropy(const Doubles& logits, const Ints& targets, int64_t V, double scale);

// q (B, T, H, D); k, v (B, S, K, D); key_begin (B, T); offset (B) or empty; seq_scale (H) or empty; bias (H, P) or
// empty.
struct AttentionCase {
    int B, T, S, H, K, D;
    bool scale_scores;
    Doubles q, k, v;
    Ints key_begin, offset;
    Doubles seq_scale, bias;
    std::vector<Doubles> tables;  // each (H, P): derivatives of the bias
};
struct AttentionResult {
    Doubles out, lse;  // (B, T, H, D), (B, H, T)
};
AttentionResult attention(const AttentionCase& a);
// A per-head gradient and the sum of the absolute values of its row terms.
struct HeadGrad {
    Doubles value, size;
};
struct AttentionGradients {
    Doubles dq, dk, dv;
    HeadGrad dseq_scale, dscale;
    std::vector<HeadGrad> dtables;
};
AttentionGradients attention_backward(const AttentionCase& a, const Doubles& dout);

}  // namespace reference
