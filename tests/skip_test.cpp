// Key tiles left out of attention: which ones, and what that changes, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "arena.h"
#include "backend.h"
#include "test_support.h"

namespace bam {
namespace {

constexpr float kShare = 1e-9f;

// One row of S keys and T queries at its end; values are NaN before key `nan_before`.
struct Call {
    int H = 2, D = 16, T = 70;
    int64_t S = 1000;
    double slope = 1.0;              // bias -slope * d
    double seq_scale = 0;            // 0: no SSMax
    int64_t nan_values_before = 0, nan_key = -1, loud_key = -1;  // loud: 60 times the last query, all heads
    float skip_below = kShare;

    std::vector<float> run(Backend& device) const {
        std::vector<float> q = test::random_normals(int64_t(T) * H * D, 1, 1), k = test::random_normals(S * H * D, 1, 2);
        std::vector<float> v = test::random_normals(S * H * D, 1, 3), bias(size_t(H * S)), log_n(size_t(T), 0.0f);
        const std::vector<float> s = std::vector<float>(size_t(H), float(seq_scale));
        const float nan = std::numeric_limits<float>::quiet_NaN();
        std::fill_n(v.begin(), nan_values_before * H * D, nan);
        if (nan_key >= 0) k[size_t(nan_key * H * D)] = nan;
        for (int i = 0; loud_key >= 0 && i < H * D; ++i) k[size_t(loud_key * H * D + i)] = 60 * q[size_t((T - 1) * H * D + i)];
        for (int h = 0; h < H; ++h)
            for (int64_t d = 0; d < S; ++d) bias[size_t(h * S + d)] = float(-slope * double(d));
        std::vector<int32_t> key_begin(size_t(T), 0), offset = {int32_t(S - T)};
        for (int t = 0; t < T; ++t) log_n[size_t(t)] = float(std::log(double(S - T + t + 1)));
        Arena memory;
        Tensor tq, tk, tv, tbias, tbegin, toffset, tlog, ts, out;
        memory = make_arena(device, [&](Arena& a) {
            tq = a.take(DType::f32, {T, H * D}), tk = a.take(DType::f32, {S, H * D}), tv = a.take(DType::f32, {S, H * D});
            tbias = a.take(DType::f32, {H, S}), tbegin = a.take(DType::i32, {1, T}), toffset = a.take(DType::i32, {1});
            tlog = a.take(DType::f32, {1, T}), ts = a.take(DType::f32, {H}), out = a.take(DType::f32, {1, T, H * D});
        });
        device.upload(tq, q.data()), device.upload(tk, k.data()), device.upload(tv, v.data()), device.upload(tbias, bias.data());
        device.upload(tbegin, key_begin.data()), device.upload(toffset, offset.data()), device.upload(tlog, log_n.data());
        device.upload(ts, s.data());
        Attention a;
        a.B = 1, a.T = T, a.S = S, a.H = a.K = H, a.D = D;
        a.key_begin = tbegin, a.offset = toffset, a.log_n = tlog, a.bias = tbias, a.skip_below = skip_below;
        if (seq_scale != 0) a.seq_scale = ts;
        const auto view = [&](Tensor t) { return HeadsView{t.data, DType::f32, t.numel(), int64_t(H) * D}; };
        device.attention_forward(out, {}, view(tq), view(tk), view(tv), a);
        std::vector<float> host(size_t(out.numel()));
        device.download(host.data(), out);
        return host;
    }
};

bool finite(const std::vector<float>& x) {
    for (float v : x)
        if (!std::isfinite(v)) return false;
    return true;
}

// A left-out tile's values are never read: a NaN there shows whether it was.
TEST(SkippedKeys, FarTilesOfALocalHeadAreNotRead) {
    const auto device = make_cpu_backend(1);
    Call call;
    call.nan_values_before = 700;
    EXPECT_TRUE(finite(call.run(*device)));
    call.skip_below = 0;
    EXPECT_FALSE(finite(call.run(*device)));
    call.skip_below = kShare, call.slope = 0.001;  // e^-1 at the far end: all of them count
    EXPECT_FALSE(finite(call.run(*device)));
    call.slope = 1, call.seq_scale = 1;            // ln n times steeper, and the scores ln n times as great
    EXPECT_TRUE(finite(call.run(*device)));
    call.seq_scale = -1;                           // s < 0: the farthest keys weigh most
    EXPECT_FALSE(finite(call.run(*device)));
}

TEST(SkippedKeys, NothingElseChanges) {
    const auto device = make_cpu_backend(2);
    for (const double slope : {0.02, 0.2, 2.0})
        for (const double scale : {0.0, 0.7, -0.7})
            for (const int T : {1, 70, 130}) {
                Call call;
                call.slope = slope, call.seq_scale = scale, call.T = T;
                const std::vector<float> skipping = call.run(*device);
                call.skip_below = 0;
                EXPECT_LT(test::max_abs_difference(skipping, call.run(*device)), 3e-7) << slope << " " << scale << " " << T;
            }
}

// A far key that scores enough to outweigh its bias (60 |q|^2 / 4 is some 240, the bias -90) must be seen: norms count.
TEST(SkippedKeys, ALoudFarKeyIsHeard) {
    const auto device = make_cpu_backend(1);
    Call call;
    call.slope = 0.1, call.loud_key = 99;
    const std::vector<float> skipping = call.run(*device);
    call.skip_below = 0;
    EXPECT_LT(test::max_abs_difference(skipping, call.run(*device)), 3e-7);
    call.loud_key = -1;
    EXPECT_GT(test::max_abs_difference(skipping, call.run(*device)), 0.1);
}

TEST(SkippedKeys, ANanKeyIsNeverHidden) {
    const auto device = make_cpu_backend(1);
    for (const int64_t key : {0, 100, 640}) {
        Call call;
        call.nan_key = key;
        EXPECT_FALSE(finite(call.run(*device))) << key;
    }
}

}  // namespace
}  // namespace bam
