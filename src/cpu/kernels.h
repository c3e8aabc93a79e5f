// Inner loops of the CPU backend as tables of function pointers, one table for each instruction set, chosen once at run
// time. The files in isa/ are compiled once for each of them and include nothing of the standard library: an inline
// function compiled there could be the copy the linker keeps for the whole program, and stop older machines.
//
// bf16 numbers are uint16_t here. A `low` flag says that the void pointers beside it hold bf16 instead of fp32.
#pragma once
#include <stdint.h>

namespace bam {

enum class Isa : uint8_t { base, avx2, avx512, avx512bf16, amx };

constexpr int kMaxTables = 5, kMaxHeadSize = 256;
constexpr int kPackK = 32, kPackN = 64;  // of a packed block

// Upper bounds that let attention leave out key tiles: by tile of kAttentionTile keys or distances.
constexpr int kAttentionTile = 64;
struct AttentionBounds {
    int64_t key_tiles, distance_tiles;
    const float* norm;                               // (B, K, key_tiles) greatest |k|; null: nothing is left out
    const float* norm_before;                        // of this tile and those before it
    const float *bias_max, *bias_min;                // (H, distance_tiles)
    const float *bias_max_beyond, *bias_min_beyond;  // of this tile and those beyond it
};

// One attention call, forward or backward; see Attention and AttentionBackward in backend.h.
struct AttentionCall {
    int T;
    int64_t S;
    int H, K, D;
    bool low;           // q, k, v, out, dout and their gradients are bf16
    bool scale_scores;  // c*qk + bias instead of c*(qk + bias)
    const void *q, *k, *v;
    int64_t q_batch, q_token, k_batch, k_token, v_batch, v_token;  // strides in elements
    void* out;                                                     // (B, T, H*D)
    float* lse;                                                    // (B, H, T) or null
    const int32_t* key_begin;                                      // (B, T)
    const int32_t* offset;                                         // (B) or null
    const float* log_n;                                            // (B, T)
    const float* seq_scale;                                        // (H) or null
    const float* bias;                                             // (H, distances) or null
    int64_t distances;
    float skip_below;  // tiles whose weight stays below this share of a row's sum may be left out
    AttentionBounds bounds;
    // Backward.
    const void* dout;    // (B, T, H*D)
    void *dq, *dk, *dv;  // of q's, k's and v's strides, or their own:
    int64_t dq_batch, dq_token, dk_batch, dk_token, dv_batch, dv_token;
    const float* tables[kMaxTables];  // (H, distances): the sums over keys of dbias * table[d] are wanted
    bool score_sum;                   // so is dseq_scale; with the bias inside the scale, tables[0] is the bias
};

// What one thread does of a call: the queries [begin, end) of row b, for all query heads of key/value head kv.
// Backward: dq of these queries and, with keys_end > keys_begin, dk and dv of those keys.
struct AttentionTask {
    int b, kv;
    int64_t begin, end;
    int64_t keys_begin, keys_end;
    bool want_dq;
    double* sums;   // (H/K, kMaxTables + 1) per-head sums of this task: by tables, then dseq_scale; =
    char* scratch;  // attention_*_scratch() bytes, 64-byte aligned
};

struct UpdateArgs {
    float *p, *m, *v;
    const float* g;
    int64_t n;
    float lr, weight_decay, beta1, beta2, rest1, rest2, eps, c1, c2, grad_scale;
    bool adaptive;
};

struct NormBackwardArgs {
    float* dx;     // (rows, C) +=
    void* dx_low;  // (rows, C) bf16 or null
    float* dw;     // (C) +=
    const void* dy;
    bool low;
    const float *x, *rstd, *w;
    int64_t rows, C;
};

struct Kernels {
    Isa isa;
    int lanes;  // fp32 numbers in a vector

    void (*to_bf16)(uint16_t* y, const float* x, int64_t n);
    void (*to_fp32)(float* y, const uint16_t* x, int64_t n);
    void (*round_to_bf16)(float* y, const float* x, int64_t n);  // fp32 numbers that bf16 can hold
    // y (columns, rows) = x (rows, columns) transposed.
    void (*transpose16)(uint16_t* y, const uint16_t* x, int64_t rows, int64_t columns, int64_t y_stride,
                        int64_t x_stride, bool far);
    // `far`: the result is too large to stay in a cache.
    // A column of oneDNN's blocks for the second operand (k, n) of a bf16 product, see isa/pack.cpp: from (rows,
    // columns), bf16 or fp32, with k along the rows, or from fp32 (columns, rows). columns <= kPackN.
    void (*pack_kn)(uint16_t* y, const void* x, bool low, int64_t rows, int64_t stride, int columns, bool far);
    void (*pack_nk)(uint16_t* y, const float* x, int64_t rows, int64_t stride, int columns, bool far);
    void (*add)(float* y, const float* x, int64_t n);  // y +=
    double (*sum_squares)(const float* x, int64_t n);
    void (*exp)(float* y, const float* x, int64_t n);  // for tests

    void (*norm_forward)(void* y, bool low, float* rstd, float* x_out, const float* x_in, const void* delta,
                         bool delta_low, const float* w, int64_t rows, int64_t C, float eps);
    void (*norm_backward)(const NormBackwardArgs& a);
    void (*rope)(void* x, bool low, const float* table, int heads, int D, bool half, bool inverse);  // one token
    void (*swiglu_forward)(void* y, bool low, const void* gate_up, int64_t rows, int64_t F);
    void (*swiglu_backward)(void* dgate_up, bool low, const void* dy, const void* gate_up, int64_t rows, int64_t F);
    // One row; with dlogits the logits are used up.
    float (*cross_entropy)(void* dlogits, bool low, float* logits, int64_t V, int32_t target, float scale);
    void (*update)(const UpdateArgs& a);

    // By tile of kAttentionTile: greatest |k| of keys of stride elements; greatest and least value.
    void (*tile_norms)(float* norms, const void* k, bool low, int64_t keys, int64_t stride, int D);
    void (*tile_ranges)(float* max, float* min, const float* x, int64_t n);
    int64_t (*attention_forward_scratch)(const AttentionCall& c, int64_t queries);
    void (*attention_forward)(const AttentionCall& c, const AttentionTask& t);
    int64_t (*attention_backward_scratch)(const AttentionCall& c, int64_t queries);
    void (*attention_backward)(const AttentionCall& c, const AttentionTask& t);
};

const Kernels& kernels_for(Isa isa);  // isa must be in machine_isas()
bool machine_has(Isa isa);
// The best the machine has, or what BAM_ISA names; Error(kExitUsage) for an unknown name or one the machine lacks.
Isa choose_isa();
const char* name_of(Isa isa);

}  // namespace bam
