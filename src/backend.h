// All a device must do. Model, trainer and evaluation are written once against this class; src/cpu and cuda implement it.
// A new op is one pair of lines here and one function per backend; the compiler finds the rest.
//
// Conventions, stated once: outputs come first, then inputs, then sizes and options. Activations are written with `=`,
// parameter gradients accumulate with `+=`, and so does the residual gradient `dx` of norm_backward. N = B*T tokens. Every
// shape is accepted. Ops run in order; results may be read after download() or synchronize(). Same inputs, same thread
// count: bitwise the same outputs.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "position.h"
#include "tensor.h"

namespace bam {

// A (B, T, heads, D) part of a larger buffer; the heads of one token are dense.
struct HeadsView {
    void* data = nullptr;      // first element of token (0, 0)
    DType dtype = DType::f32;
    int64_t batch_stride = 0;  // elements from row b to row b + 1
    int64_t token_stride = 0;  // elements from token t to token t + 1
};

// What one attention call is about, besides q, k and v (DESIGN §2.2). Query t of row b stands at key index
// offset[b] + t and sees the keys [key_begin[b][t], offset[b] + t]; d is their distance in that index.
// key_begin does not decrease along a row.
struct Attention {
    int B = 0, T = 0;           // rows, queries a row
    int64_t S = 0;              // keys a row; T in training
    int H = 0, K = 0, D = 0;    // query heads, key/value heads, head size <= 256
    SsmaxOrder order = SsmaxOrder::scale_bias;
    Tensor key_begin;           // (B, T) i32
    Tensor offset;              // (B) i32; empty: all 0
    Tensor log_n;               // (B, T) f32, ln of the number of keys the query sees; used with seq_scale
    Tensor seq_scale;           // (H) f32 s_h; empty without SSMax
    Tensor bias;                // (H, >= S) f32 over distances; empty without a prior
    Tensor dbias[kMaxThetas];   // (H, >= S) f32 derivatives of the bias; empty where not wanted (backward only)
    float skip_below = 0;       // > 0: key blocks whose weights an upper bound keeps below this share may be skipped
};

// Per-head sums over all rows and queries, each += into (H) f32; an empty one is not computed. dbias = dlogits * c
// (scale_bias) or dlogits (scale_scores). Rows are summed in fp32, across rows by one fixed tree in double.
struct AttentionGrads {
    Tensor dseq_scale;           // sum of dlogits * ln n * (qk/sqrt(D) [+ bias])
    Tensor dscale;               // sum of dbias * bias: the gradient of a theta that scales the bias
    Tensor dtheta[kMaxThetas];   // sum of dbias * dbias[p]
};

enum class OptimizerKind : uint8_t { radam, adamw };

// One optimizer step's scalars (DESIGN §2.4): m, v updated with betas; p = p (1 - lr wd) - lr c1 m / (c2 sqrt(v) + eps),
// or p (1 - lr wd) - lr c1 m when not adaptive.
struct UpdateStep {
    float beta1, beta2, eps;
    float rest1, rest2;  // 1 - beta1, 1 - beta2, rounded once: 1 - float(0.999) is off by 1e-5
    float c1, c2;
    bool adaptive;
    float grad_scale;  // clip factor
};
struct UpdateGroup {
    int64_t begin, end;  // elements of the arenas
    float lr, weight_decay;
};

// A weight matrix as matmuls use it; made by bind_weight.
using WeightId = int;

class Backend {
public:
    virtual ~Backend() = default;

    // ---- device and memory ------------------------------------------------------------------------------------------
    virtual std::string name() const = 0;                                     // "cpu", "cuda"
    virtual std::map<std::string, std::string> describe() const = 0;          // for `bam info`: isa, threads, library, ...
    virtual bool fast_bf16() const = 0;                                       // bf16 matmuls are at least as fast as fp32
    virtual bool host_memory() const = 0;                                     // its pointers can be read by the host
    virtual int64_t total_memory() const = 0;                                 // bytes of the device, used or not
    virtual int64_t used_memory() const = 0;  // bytes: the most that this process had (CPU); what all have now (GPU)
    virtual void* allocate(int64_t bytes) = 0;                                // 64-byte aligned, contents undefined
    virtual void release(void* p) = 0;
    virtual void upload(Tensor dst, const void* src) = 0;                     // host -> device, dst.bytes()
    virtual void download(void* dst, Tensor src) = 0;                         // device -> host, waits
    virtual void copy(Tensor dst, Tensor src) = 0;                            // same device, same dtype and size
    virtual void zero(Tensor x) = 0;
    virtual void synchronize() = 0;

    // ---- weights and matmul -----------------------------------------------------------------------------------------
    // Registers master (out, in) f32, which must outlive the backend's use of it. With keep_copies the backend keeps
    // whatever copies it wants (bf16, transposed, packed; those for backward on first need), and refresh_weights()
    // remakes them after a change. Without, it makes them at each use: less memory, more time, the same results.
    virtual WeightId bind_weight(Tensor master, DType compute, bool keep_copies) = 0;
    virtual void refresh_weights() = 0;
    virtual int64_t weight_bytes(int64_t out, int64_t in, DType compute) const = 0;  // of the copies
    // y (N, out) = x (N, in) W^T; x in the compute dtype, y in it or f32.
    virtual void matmul_forward(Tensor y, Tensor x, WeightId w) = 0;
    // dx (N, in) = dy W, in compute dtype or f32, empty: not wanted; dw (out, in) f32 += dy^T x, empty: not wanted.
    virtual void matmul_backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, WeightId w) = 0;

    // ---- embedding --------------------------------------------------------------------------------------------------
    // x (N, C) f32 = table[ids] (+ added[positions]); table (V, C) f32, ids (N) i32, added (P, C) f32 or empty.
    virtual void embedding_forward(Tensor x, Tensor table, Tensor ids, Tensor added, Tensor positions) = 0;
    virtual void embedding_backward(Tensor dtable, Tensor dx, Tensor ids) = 0;  // rows of absent tokens stay untouched

    // ---- RMSNorm with the residual ------------------------------------------------------------------------------------
    // x_out = x_in + delta; y = x_out * rstd * w; rstd (N) f32. delta in compute dtype; empty: y is of x_in, x_out
    // unused. x_out may be x_in.
    virtual void norm_forward(Tensor y, Tensor rstd, Tensor x_out, Tensor x_in, Tensor delta, Tensor w, float eps) = 0;
    // dx (N, C) f32 += gradient through the norm; dx_low = dx rounded to its dtype (empty: not wanted); dw (C) +=.
    virtual void norm_backward(Tensor dx, Tensor dx_low, Tensor dw, Tensor dy, Tensor x, Tensor rstd, Tensor w) = 0;

    // ---- RoPE, in place -----------------------------------------------------------------------------------------------
    // Rotates the first `heads` heads (q and k) of every row of qkv (N, (H+2K)*D) by table[positions];
    // table (P, D) f32 as rope_table() makes it. Backward rotates the gradient back.
    virtual void rope_forward(Tensor qkv, Tensor table, Tensor positions, int heads, RopeLayout layout) = 0;
    virtual void rope_backward(Tensor dqkv, Tensor table, Tensor positions, int heads, RopeLayout layout) = 0;

    // ---- attention ----------------------------------------------------------------------------------------------------
    // Keys and values of qkv (B*T, (H+2K)*D) into a cache at token offset[b] + t of row b, converted to its dtype.
    virtual void cache_append(HeadsView k_cache, HeadsView v_cache, Tensor qkv, Tensor offset, int H, int K, int D) = 0;
    // Tables of a prior over distances 0 .. bias.last()-1: bias (H, P), dbias[p] (H, P) where given; theta[p] (H) f32.
    virtual void prior_tables(Tensor bias, const Tensor dbias[kMaxThetas], Encoding e, const Tensor theta[kMaxThetas]) = 0;
    // out (B, T, H*D) in q's dtype; lse (B, H, T) f32, natural log of the sum of exp(logits); empty: not wanted.
    virtual void attention_forward(Tensor out, Tensor lse, HeadsView q, HeadsView k, HeadsView v, const Attention& a) = 0;
    struct AttentionBackward {
        HeadsView dq, dk, dv;  // =
        AttentionGrads grads;  // +=
        Tensor dout, out, lse;
        HeadsView q, k, v;
    };
    virtual void attention_backward(const AttentionBackward& g, const Attention& a) = 0;  // offset empty, S = T

    // ---- SwiGLU -------------------------------------------------------------------------------------------------------
    // y (N, F) = silu(gate) * up; gate_up (N, 2F) holds gate (w1 x) then up (w3 x).
    virtual void swiglu_forward(Tensor y, Tensor gate_up) = 0;
    virtual void swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) = 0;

    // ---- loss ---------------------------------------------------------------------------------------------------------
    // losses (n) f32 = -ln softmax(logits)[target]; dlogits (n, V), compute dtype, = scale * (softmax - onehot), empty: not
    // wanted. logits (n, V) f32; targets (n) i32, a negative one gives loss 0 and gradient 0. dlogits may be
    // logits; where dlogits are wanted the logits are used up.
    virtual void cross_entropy(Tensor losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) = 0;

    // ---- optimizer ----------------------------------------------------------------------------------------------------
    // sqrt of the sum of squares of g, in double by one fixed tree; not finite if any element is not.
    virtual double global_norm(Tensor g) = 0;
    // p, m, v, g: whole arenas (f32). Elements outside every group are left alone.
    virtual void update(Tensor p, Tensor m, Tensor v, Tensor g, const std::vector<UpdateGroup>& groups, const UpdateStep& s) = 0;

    // ---- measuring ----------------------------------------------------------------------------------------------------
    // Best FLOP/s of y = x W^T at 2048 x 3072 x 768 over the weight layouts, all threads, warm, median of 10 (DESIGN §5).
    virtual double measure_gemm(DType compute) = 0;
    virtual void profile(bool on) = 0;                               // start (clearing) or stop timing every op
    virtual std::map<std::string, double> profile_seconds() = 0;     // seconds by op since profile(true)
};

// threads 0 = all the process may use. The CPU backend is always there.
std::unique_ptr<Backend> make_cpu_backend(int threads);
// Whether the build has CUDA and the machine a GPU, usable or not.
bool has_gpu();
// Throws Error(kExitUsage) when the build has no CUDA, Error(kExitFailure) when there is no usable device.
std::unique_ptr<Backend> make_cuda_backend(int device);

}  // namespace bam
