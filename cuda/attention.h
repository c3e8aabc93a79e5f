// What all attention kernels share: their arguments and what a query knows of itself (definitions: DESIGN §2.2).
//
// Logits are kept in units of log 2: logit * log2 e = q.k * score_scale + bias * bias_scale. A query that sees one key has probability 1
// there and no logit gradient.
#pragma once
#include "cuda/kernel.h"
#include "src/backend.h"

namespace bam {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -3.0e38f;
// Beyond this an fp32 lse no longer holds the sum beside the maximum: backward makes both again.
constexpr float kPreciseLse = 1024.0f;
// Per row and head: sums for s_h, for a theta that scales the bias, for each theta.
constexpr int kRowSums = 2 + kMaxThetas;
// Tables that a row sums its dlogits over: the bias; the bias where it is above its floor, below which it has no slope; its derivatives.
constexpr int kTables = 2 + kMaxThetas;

// (B, T, heads, D) with strides in elements.
struct Heads {
    void* data;
    int64_t batch_stride, token_stride;
};

struct AttentionArgs {
    Heads q, k, v;
    void* out;                  // (B, T, H*D)
    float* lse;                 // (B, H, T) or null
    const int32_t* key_begin;   // (B, T)
    const int32_t* offset;      // (B) or null
    const float* log_n;         // (B, T)
    const float* seq_scale;     // (H) or null
    const float* bias;          // (H, distances) or null
    int64_t distances;
    int T, H, K, D;
    float scale;                // 1 / sqrt(D)
    bool scale_scores;          // c*qk + bias instead of c*(qk + bias)
    // Backward.
    Heads dq, dk, dv;
    const void* dout;           // (B, T, H*D)
    float *row_max, *log2_sum;  // (B, H, T): p = 2^(logit * log2 e - row_max - log2_sum)
    float* delta;               // (B, H, T): dout . out
    const float* dbias[kMaxThetas];  // (H, distances) or null
    float* middle;              // (kTables, H): see RowSums
    float* row_sums;            // (kRowSums, B, H, T)
};

__device__ inline float without_floor(float bias) { return bias <= float(kPriorFloor) ? 0.0f : bias; }

// What a query's row knows of itself. A row past the end sees no key.
struct Query {
    float score_scale, bias_scale;
    int begin, position;  // keys seen: [begin, position]
    bool single;          // sees one key: probability 1, no logit gradient
    float factor;         // c

    __device__ static Query at(const AttentionArgs& a, int b, int h, int t) {
        Query q{0, 0, 1 << 30, -1, false, 1};
        if (t >= a.T) return q;
        const int64_t i = int64_t(b) * a.T + t;
        if (a.seq_scale) q.factor = a.seq_scale[h] * a.log_n[i];
        q.score_scale = q.factor * a.scale * kLog2e;
        q.bias_scale = a.scale_scores ? kLog2e : q.factor * kLog2e;
        q.begin = a.key_begin[i];
        q.position = (a.offset ? a.offset[b] : 0) + t;
        q.single = q.begin == q.position;
        return q;
    }
    __device__ bool sees(int key) const { return key >= begin && key <= position; }
};

// What a lane sums over its keys of one query, for the gradients of s_h and of the prior.
//
// A query's dlogits sum to zero but for rounding (of delta above all: out may be bf16). A table may have values of 1e10 and more, so it
// must not multiply that rounding. Each table is moved to be 0 where the bias of the head is greatest (`middle`), and what is left is
// taken away at the key that has more than half of the weight, if there is one: there p is 1 to rounding when the bias is huge
// elsewhere. The sum over scores is corrected at their mean.
struct RowSums {
    float score = 0, mean_score = 0, residual = 0, table[kTables] = {}, middle[kTables] = {};
    int top = -1;  // key with more than half of the weight

    __device__ void begin(const AttentionArgs& a, int h) {
        if (!a.bias) return;
#pragma unroll
        for (int i = 0; i < kTables; ++i)
            if (i < 2 || a.dbias[i - 2]) middle[i] = a.middle[i * a.H + h];
    }

    // One key: its dlogit g, weight p, score q.k, and the tables' values there (of those that are given).
    __device__ void add(float g, float p, float q_k, int key) {
        score = fmaf(g, q_k, score);
        mean_score = fmaf(p, q_k, mean_score);
        residual += g;
        if (p > 0.5f) top = key;
    }
    __device__ void add_bias(float g, float bias) {
        table[0] = fmaf(g, bias - middle[0], table[0]);
        table[1] = fmaf(g, without_floor(bias) - middle[1], table[1]);
    }
    __device__ void add_derivative(int p, float g, float value) { table[2 + p] = fmaf(g, value - middle[2 + p], table[2 + p]); }

    // Over the four lanes of a row; the first stores, if the row is one of the batch.
    __device__ void finish(const AttentionArgs& a, const Query& q, int b, int h, int t, bool stores) {
        score = quad_sum(score), mean_score = quad_sum(mean_score), residual = quad_sum(residual);
#pragma unroll
        for (int i = 0; i < kTables; ++i) table[i] = quad_sum(table[i]);
        top = max(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = max(top, __shfl_xor_sync(kFullWarp, top, 2));
        if (!stores) return;
        const int64_t rows = int64_t(gridDim.z) * a.H * a.T, i = (int64_t(b) * a.H + h) * a.T + t;
        float s = a.scale * (score - residual * mean_score);
        if (a.bias) {
            if (top >= 0) {
                const int64_t at = h * a.distances + (q.position - top);
                // Rounded as in the sums: they cancel to zero where only the top key has weight.
                table[0] -= rounded_product(residual, a.bias[at] - middle[0]);
                table[1] -= rounded_product(residual, without_floor(a.bias[at]) - middle[1]);
#pragma unroll
                for (int p = 0; p < kMaxThetas; ++p)
                    if (a.dbias[p]) table[2 + p] -= rounded_product(residual, a.dbias[p][at] - middle[2 + p]);
            }
            if (!a.scale_scores) s += table[0];
            const float dbias = a.scale_scores ? 1.0f : q.factor;
#pragma unroll
            for (int j = 1; j < kTables; ++j) a.row_sums[j * rows + i] = table[j] * dbias;
        }
        a.row_sums[i] = s * a.log_n[int64_t(b) * a.T + t];
    }
};

// Attention on tensor cores for bf16, heads padded to D = 16, 32, 48, 64 or 128 elements (attention_tensor.h). backward needs delta,
// row_max and log2_sum, and adds row_sums.
template <int D>
struct TensorAttention {
    static void forward(const AttentionArgs& a, int B, cudaStream_t stream);
    static void backward(const AttentionArgs& a, int B, cudaStream_t stream);
};

}  // namespace bam
