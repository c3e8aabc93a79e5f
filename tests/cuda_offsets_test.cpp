// Ops on tensors of more than 2^31 elements, whose first and last block run on the emulation: what an int cannot count.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda_support.h"
#include "ops_reference.h"
#include "src/backend.h"
#include "test_support.h"

namespace bam::test {
namespace {

#if !defined(__SANITIZE_THREAD__)  // TSan's shadow memory is real memory

using reference::Doubles;

constexpr int64_t kRows = (1 << 16) + 1, kWidth = 33000;  // 2.16e9 elements: their memory stays virtual where nothing writes

class CudaOffsets : public testing::Test {
protected:
    CudaOffsets() {
        emu::options().memory = 60ll << 30;
        emu::options().ends_only = true;
        device = make_cuda_backend(0);
    }
    ~CudaOffsets() override {
        for (void* p : owned) device->release(p);
    }
    Tensor make(DType t, std::initializer_list<int64_t> dims) {
        Tensor x(nullptr, t, dims);
        x.data = device->allocate(x.bytes());
        owned.push_back(x.data);
        return x;
    }
    // Rows [begin, begin + n) from doubles, rounded to the type; and back.
    void put(Tensor x, int64_t begin, const Doubles& v) {
        const Tensor part = x.slice(begin, int64_t(v.size()) / (x.numel() / x.shape[0]));
        std::vector<float> f(v.begin(), v.end());
        if (x.dtype == DType::f32) return device->upload(part, f.data());
        std::vector<bf16> low(f.size());
        for (size_t i = 0; i < f.size(); ++i) low[i] = to_bf16(f[i]);
        device->upload(part, low.data());
    }
    Doubles get(Tensor x, int64_t begin, int64_t n) {
        const Tensor part = x.slice(begin, n);
        if (x.dtype == DType::f32) {
            std::vector<float> f(size_t(part.numel()));
            device->download(f.data(), part);
            return Doubles(f.begin(), f.end());
        }
        std::vector<bf16> low(size_t(part.numel()));
        device->download(low.data(), part);
        Doubles v;
        for (bf16 b : low) v.push_back(to_float(b));
        return v;
    }
    Tensor ints(const std::vector<int32_t>& v) {
        Tensor x = make(DType::i32, {int64_t(v.size())});
        device->upload(x, v.data());
        return x;
    }
    static Doubles random(int64_t n, uint64_t seed) {
        const std::vector<float> x = random_normals(n, 1, seed);
        Doubles v;
        for (float f : x) v.push_back(to_float(to_bf16(f)));  // exact in both types
        return v;
    }
    // The last elements, all that the last block has.
    static void expect_tail(const Doubles& got, const Doubles& want, size_t n, double relative, const char* what) {
        for (size_t i = got.size() - n; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], relative * (std::fabs(want[i]) + 1)) << what << " " << i;
    }

    WithOptions restore;  // the options before
    std::unique_ptr<Backend> device;
    std::vector<void*> owned;
};

constexpr double kBf16 = 0x1p-7;

TEST_F(CudaOffsets, Pointwise) {
    const Doubles gate_up = random(2 * kWidth, 1), dy = random(kWidth, 2), want = reference::swiglu(gate_up, kWidth);
    Tensor g = make(DType::bf16, {kRows, 2 * kWidth}), y = make(DType::bf16, {kRows, kWidth}), d = make(DType::bf16, {kRows, kWidth});
    put(g, kRows - 1, gate_up);
    put(d, kRows - 1, dy);
    device->swiglu_forward(y, g);
    expect_tail(get(y, kRows - 1, 1), want, size_t(y.numel() % 256), kBf16, "swiglu");
    Tensor dg = make(DType::bf16, {kRows, 2 * kWidth});
    device->swiglu_backward(dg, d, g);
    expect_tail(get(dg, kRows - 1, 1), reference::swiglu_backward(dy, gate_up, kWidth), size_t(y.numel() % 256), 2 * kBf16, "swiglu backward");

    Tensor table = make(DType::f32, {3, kWidth}), x = make(DType::f32, {kRows, kWidth});
    const Doubles rows = random(3 * kWidth, 3);
    put(table, 0, rows);
    std::vector<int32_t> ids(size_t(kRows), 0);
    ids.back() = 2;
    device->embedding_forward(x, table, ints(ids), {}, ints(ids));
    expect_tail(get(x, kRows - 1, 1), Doubles(rows.end() - kWidth, rows.end()), size_t(x.numel() % 256), 0, "embedding");
}

TEST_F(CudaOffsets, Rope) {
    const int heads = 516, D = 64;
    const int64_t width = heads * D + 40;
    Tensor x = make(DType::bf16, {kRows, width}), table = make(DType::f32, {8, D});
    const std::vector<float> angles = rope_table(10000, D, 0, 8);
    device->upload(table, angles.data());
    const Doubles last = random(width, 5);
    put(x, kRows - 1, last);
    std::vector<int32_t> positions(size_t(kRows), 7);
    device->rope_forward(x, table, ints(positions), heads, RopeLayout::interleaved);
    const Doubles got = get(x, kRows - 1, 1), want = reference::rope(last, {7}, width, heads, D, 10000, false, 1);
    const int64_t pairs = kRows * heads * (D / 2) % 256;
    for (int64_t i = heads * D - 2 * (pairs ? pairs : 256); i < width; ++i) ASSERT_NEAR(got[size_t(i)], want[size_t(i)], 2 * kBf16) << i;
}

TEST_F(CudaOffsets, Norm) {
    Tensor x = make(DType::f32, {kRows, kWidth}), delta = make(DType::bf16, {kRows, kWidth}), y = make(DType::bf16, {kRows, kWidth});
    Tensor w = make(DType::f32, {kWidth}), rstd = make(DType::f32, {kRows});
    const Doubles xs = random(kWidth, 1), ds = random(kWidth, 2), ws = random(kWidth, 3);
    put(x, kRows - 1, xs);
    put(delta, kRows - 1, ds);
    std::vector<float> weights(ws.begin(), ws.end());
    device->upload(w, weights.data());
    device->norm_forward(y, rstd, x, x, delta, w, 1e-5f);
    const auto want = reference::norm(xs, ds, ws, kWidth, 1e-5);
    expect_tail(get(y, kRows - 1, 1), want.y, size_t(kWidth), kBf16, "y");
    expect_tail(get(x, kRows - 1, 1), want.x, size_t(kWidth), 1e-6, "x");

    Tensor dx = make(DType::f32, {kRows, kWidth}), dw = make(DType::f32, {kWidth});
    put(dx, kRows - 1, Doubles(kWidth));
    device->zero(dw);
    const Doubles dy = random(kWidth, 4);
    put(y, kRows - 1, dy);
    device->norm_backward(dx, {}, dw, y, x, rstd, w);
    const double s = want.rstd[0];
    double dot = 0;
    for (int64_t i = 0; i < kWidth; ++i) dot += dy[size_t(i)] * ws[size_t(i)] * want.x[size_t(i)];
    Doubles dx_want;
    for (int64_t i = 0; i < kWidth; ++i)
        dx_want.push_back(s * (dy[size_t(i)] * ws[size_t(i)] - want.x[size_t(i)] * dot * s * s / double(kWidth)));
    expect_tail(get(dx, kRows - 1, 1), dx_want, size_t(kWidth), 1e-5, "dx");
}

TEST_F(CudaOffsets, CrossEntropy) {
    Tensor logits = make(DType::f32, {kRows, kWidth}), losses = make(DType::f32, {kRows});
    const Doubles z = random(kWidth, 1);
    put(logits, kRows - 1, z);
    std::vector<int32_t> targets(size_t(kRows), 3);
    device->cross_entropy(losses, logits, logits, ints(targets), 2);
    const auto want = reference::cross_entropy(z, {3}, kWidth, 2);
    expect_tail(get(losses, kRows - 1, 1), want.losses, 1, 1e-5, "loss");
    expect_tail(get(logits, kRows - 1, 1), want.dlogits, size_t(kWidth), 1e-6, "dlogits");
}

TEST_F(CudaOffsets, OptimizerAndWeights) {
    const int64_t n = kRows * kWidth;
    Tensor p = make(DType::f32, {n}), m = make(DType::f32, {n}), v = make(DType::f32, {n}), g = make(DType::f32, {n});
    const Doubles zero(100), one(100, 1);
    for (Tensor t : {p, m, v}) put(t, n - 100, zero);
    put(g, n - 100, one);
    device->update(p, m, v, g, {{0, n, 0.5f, 0}}, {0.9f, 0.95f, 0, 0.1f, 0.05f, 1, 1, false, 1});
    for (double x : get(p, n - 100, 100)) EXPECT_FLOAT_EQ(float(x), -0.05f);

    const Tensor master = p.view({kRows, kWidth});
    const Doubles last = random(kWidth, 1);
    put(master, kRows - 1, last);
    const WeightId w = device->bind_weight(master, DType::bf16, true);
    (void)w;  // converted: what nothing can read but a product too large to emulate
}

TEST_F(CudaOffsets, AttentionAndCacheByStrides) {
    emu::options().ends_only = false;
    const int T = 5, H = 2, D = 16;
    const int64_t stride = (1ll << 31) + 64, width = 3 * H * D;
    const Doubles host = random(2 * T * width, 1);
    Tensor memory = make(DType::bf16, {stride + T * width});
    const auto part = [&](int b) { return Tensor(static_cast<bf16*>(memory.data) + b * stride, DType::bf16, {T, width}); };
    for (int b = 0; b < 2; ++b) put(part(b), 0, Doubles(host.begin() + b * T * width, host.begin() + (b + 1) * T * width));
    const auto heads = [&](int which) { return HeadsView{static_cast<bf16*>(memory.data) + which * H * D, DType::bf16, stride, width}; };

    Attention a;
    a.B = 2, a.T = T, a.S = T, a.H = H, a.K = H, a.D = D;
    a.key_begin = ints(std::vector<int32_t>(2 * T, 0)).view({2, T});
    a.log_n = make(DType::f32, {2, T});
    device->upload(a.log_n, std::vector<float>(2 * T, 1).data());
    Tensor out = make(DType::bf16, {2, T, H * D}), lse = make(DType::f32, {2, H, T});
    device->attention_forward(out, lse, heads(0), heads(1), heads(2), a);

    reference::AttentionCase want{2, T, T, H, H, D, false, {}, {}, {}, std::vector<int32_t>(2 * T, 0), {}, {}, {}, {}};
    for (int i = 0; i < 2 * T; ++i)
        for (int e = 0; e < int(width); ++e) (e < H * D ? want.q : e < 2 * H * D ? want.k : want.v).push_back(host[size_t(i * width + e)]);
    expect_tail(get(out, 0, 2), reference::attention(want).out, size_t(2 * T * H * D), kBf16, "out");

    Tensor dout = make(DType::bf16, {2, T, H * D});
    const Doubles ds = random(2 * T * H * D, 2);
    put(dout, 0, ds);
    Tensor gradient = make(DType::bf16, {stride + T * width});
    const auto views = [&](int which) { return HeadsView{static_cast<bf16*>(gradient.data) + which * H * D, DType::bf16, stride, width}; };
    Backend::AttentionBackward g;
    g.dq = views(0), g.dk = views(1), g.dv = views(2), g.q = heads(0), g.k = heads(1), g.v = heads(2);
    g.dout = dout, g.out = out, g.lse = lse;
    device->attention_backward(g, a);
    const auto grads = reference::attention_backward(want, ds);
    for (int b = 0; b < 2; ++b) {
        const Doubles got = get(Tensor(static_cast<bf16*>(gradient.data) + b * stride, DType::bf16, {T, width}), 0, T);
        for (int t = 0; t < T; ++t)
            for (int e = 0; e < H * D; ++e) {
                const size_t i = size_t((b * T + t) * H * D + e), row = size_t(t * width + e);
                ASSERT_NEAR(got[row], grads.dq[i], 0.03) << b << t << e;
                ASSERT_NEAR(got[row + H * D], grads.dk[i], 0.03) << b << t << e;
                ASSERT_NEAR(got[row + 2 * H * D], grads.dv[i], 0.03) << b << t << e;
            }
    }

    // The same memory as a cache: row 1 receives two tokens at places 1 and 2.
    Tensor qkv = make(DType::bf16, {2 * 2, width});
    const Doubles more = random(4 * width, 7);
    put(qkv, 0, more);
    device->cache_append(heads(1), heads(2), qkv, ints({1, 1}), H, H, D);
    const Doubles cached = get(part(1), 0, T);
    for (int e = H * D; e < int(width); ++e) {
        EXPECT_EQ(cached[size_t(0 * width + e)], host[size_t(T * width + e)]);
        EXPECT_EQ(cached[size_t(1 * width + e)], more[size_t(2 * width + e)]);
        EXPECT_EQ(cached[size_t(2 * width + e)], more[size_t(3 * width + e)]);
    }
}

#endif

}  // namespace
}  // namespace bam::test
