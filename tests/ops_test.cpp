// Every op of every backend (subjects.h) against the double-precision reference: odd shapes, both dtypes, row-distinct
// random inputs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "check.h"
#include "cpu/backend.h"
#include "ops_reference.h"
#include "subjects.h"
#include "test_support.h"

namespace bam::test {
namespace {

using reference::Doubles;
using reference::Ints;

// ---- arrays
// ---------------------------------------------------------------------------------------------------------------

// A tensor's memory with its values as doubles, rounded as stored.
struct Array {
    std::vector<char> memory;
    DType dtype = DType::f32;
    std::vector<int64_t> shape;

    Array() = default;
    Array(DType t, std::vector<int64_t> dims, const Doubles& values = {}) : dtype(t), shape(std::move(dims)) {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        memory.resize(n * size_of(t) + 1);
        for (int64_t i = 0; i < n; ++i) {
            const double v = values.empty() ? 0.0 : values[i];
            if (t == DType::i32)
                reinterpret_cast<int32_t*>(memory.data())[i] = int32_t(v);
            else if (t == DType::f32)
                reinterpret_cast<float*>(memory.data())[i] = float(v);
            else
                reinterpret_cast<bf16*>(memory.data())[i] = to_bf16(float(v));
        }
    }
    operator Tensor() {
        Tensor t(memory.data(), dtype, {});
        for (int64_t d : shape) t.shape[t.rank++] = d;
        return t;
    }
    Doubles values() const {
        Doubles v;
        const int64_t n = int64_t(memory.size()) / size_of(dtype);
        for (int64_t i = 0; i < n; ++i) {
            if (dtype == DType::f32)
                v.push_back(reinterpret_cast<const float*>(memory.data())[i]);
            else if (dtype == DType::bf16)
                v.push_back(to_float(reinterpret_cast<const bf16*>(memory.data())[i]));
            else
                v.push_back(reinterpret_cast<const int32_t*>(memory.data())[i]);
        }
        return v;
    }
};

Array normals(DType t, std::vector<int64_t> shape, double scale, uint64_t seed) {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    const std::vector<float> x = random_normals(n, scale, seed);
    return Array(t, std::move(shape), Doubles(x.begin(), x.end()));
}

Array ints(const Ints& v, std::vector<int64_t> shape) {
    return Array(DType::i32, std::move(shape), Doubles(v.begin(), v.end()));
}

void add(Doubles& y, const Doubles& x) {
    for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
}

// fp32: the largest difference against the largest value; bf16: norms.
void expect_near(const Doubles& got, const Doubles& want, DType t, const std::string& what, double tolerance = 0) {
    ASSERT_EQ(got.size(), want.size()) << what;
    double worst = 0, largest = 0, difference = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double d = std::fabs(got[i] - want[i]);
        worst = d <= worst ? worst : d;  // keeps a NaN
        largest = std::fmax(largest, std::fabs(want[i]));
        difference += d * d, norm += want[i] * want[i];
    }
    const double limit = tolerance > 0 ? tolerance : t == DType::bf16 ? 6e-3 : 1e-5;
    if (t == DType::bf16)
        EXPECT_LE(std::sqrt(difference), limit * std::sqrt(norm) + 1e-12) << what;
    else
        EXPECT_LE(worst, limit * largest + 1e-12) << what;
}

std::vector<Isa> machine_isas() {
    std::vector<Isa> v;
    for (Isa i : {Isa::base, Isa::avx2, Isa::avx512, Isa::avx512bf16, Isa::amx})
        if (machine_has(i)) v.push_back(i);
    return v;
}

class Ops : public testing::TestWithParam<Subject> {
protected:
    std::unique_ptr<Backend> owned = GetParam().make();
    Backend& device = *owned;
};

INSTANTIATE_TEST_SUITE_P(Machine, Ops, testing::ValuesIn(subjects()), [](const auto& info) { return info.param.name; });

class CpuOps : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(Machine, CpuOps, testing::ValuesIn(machine_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

const DType kFloats[] = {DType::f32, DType::bf16};

// ---- plain ops
// ------------------------------------------------------------------------------------------------------------

TEST_P(CpuOps, ConversionsRoundToNearestEvenAndKeepNan) {
    const Kernels& k = kernels_for(GetParam());
    std::vector<float> x = random_floats(37, -3, 3, 1);
    const float special[] = {0.0f, -0.0f,   1.0f,        INFINITY,    -INFINITY,
                             NAN,  3.3e38f, 1.00390625f, 1.01171875f, -1.00390625f};
    x.insert(x.end(), std::begin(special), std::end(special));
    std::vector<uint16_t> low(x.size());
    std::vector<float> back(x.size()), rounded(x.size());
    k.to_bf16(low.data(), x.data(), x.size());
    k.to_fp32(back.data(), low.data(), x.size());
    k.round_to_bf16(rounded.data(), x.data(), x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        if (std::isnan(x[i]))
            EXPECT_TRUE(std::isnan(back[i]));
        else
            EXPECT_EQ(low[i], to_bf16(x[i]).bits) << x[i];
        EXPECT_EQ(std::memcmp(&rounded[i], &back[i], 4), 0) << x[i];
    }
}

TEST_P(CpuOps, Exp) {
    std::vector<float> x = {0.0f, -INFINITY, INFINITY, NAN, -1e30f, -87.3f, -87.4f, 88.7f, 88.72f, 89.0f, 1e30f};
    for (float v : random_floats(4001, -88, 89, 3)) x.push_back(v);
    std::vector<float> y(x.size());
    kernels_for(GetParam()).exp(y.data(), x.data(), x.size());
    EXPECT_EQ(y[0], 1.0f);
    EXPECT_EQ(y[1], 0.0f);
    EXPECT_TRUE(std::isinf(y[2]) && std::isnan(y[3]) && std::isinf(y[9]) && std::isinf(y[10]));
    EXPECT_EQ(y[4], 0.0f);
    for (size_t i = 5; i < x.size(); ++i) {
        const double want = std::exp(double(x[i]));
        if (want < 1.2e-38 || want > 3.4e38) continue;
        EXPECT_LE(std::fabs(y[i] - want), 2.5e-7 * want) << x[i];
    }
}

TEST_P(CpuOps, PackedAndTransposedMatrices) {
    const Kernels& k = kernels_for(GetParam());
    for (const auto& [rows, columns] : {std::pair{1, 1}, {7, 64}, {32, 3}, {33, 17}, {64, 63}, {65, 50}}) {
        const int stride = columns + 5, row_blocks = (rows + kPackK - 1) / kPackK;
        std::vector<float> x = random_normals(rows * stride, 1, 1), x_t(columns * (rows + 3), NAN);
        std::vector<uint16_t> low(x.size());
        for (size_t i = 0; i < x.size(); ++i) low[i] = to_bf16(x[i]).bits;
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; ++j) x_t[j * (rows + 3) + i] = x[i * stride + j];
        std::vector<uint16_t> want(row_blocks * kPackK * kPackN), got[3];
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; ++j) want[i / 2 * 2 * kPackN + 2 * j + i % 2] = low[i * stride + j];
        const bool far = columns % 2;
        for (auto& g : got) g.assign(want.size(), 0xffff);
        k.pack_kn(got[0].data(), x.data(), false, rows, stride, columns, far);
        k.pack_kn(got[1].data(), low.data(), true, rows, stride, columns, far);
        k.pack_nk(got[2].data(), x_t.data(), rows, rows + 3, columns, far);
        for (const auto& g : got) EXPECT_EQ(g, want) << rows << "x" << columns;
        std::vector<uint16_t> y(columns * (rows + 2), 0xffff), transposed = y;
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; ++j) transposed[j * (rows + 2) + i] = low[i * stride + j];
        k.transpose16(y.data(), low.data(), rows, columns, rows + 2, stride, far);
        EXPECT_EQ(y, transposed) << rows << "x" << columns;
    }
}

TEST_P(CpuOps, MatmulIsNeverAReferenceImplementation) {
    CpuBackend cpu(2, GetParam());
    for (DType t : kFloats)
        EXPECT_EQ(cpu.describe()[std::string("matmul ") + name_of(t)].find("ref"), std::string::npos);
    if (cpu.fast_bf16()) {
        EXPECT_EQ(cpu.describe()["matmul bf16"].find("brg:avx512_core_"), 0u);
    }
}

TEST_P(Ops, MatmulAndItsGradients) {
    const int64_t shapes[][3] = {{1, 1, 1}, {29, 51, 36}, {3, 257, 12}, {1, 64, 129}, {130, 96, 48}, {65, 1, 7}};
    for (auto [t, keep] : {std::pair(DType::f32, true), {DType::f32, false}, {DType::bf16, true}, {DType::bf16, false}})
        for (const auto& [N, out, in] : shapes) {
            Array w = normals(DType::f32, {out, in}, 1, 1), x = normals(t, {N, in}, 1, 2),
                  dy = normals(t, {N, out}, 1, 3);
            const Array w_used(t, {out, in}, w.values());
            const WeightId id = device.bind_weight(w, t, keep);
            const std::string what = std::to_string(N) + "x" + std::to_string(out) + "x" + std::to_string(in);
            const Doubles want = reference::matmul(x.values(), w_used.values(), N, out, in);
            for (DType result : {t, DType::f32}) {
                Array y(result, {N, out}), dx(result, {N, in});
                device.matmul_forward(y, x, id);
                expect_near(y.values(), want, t, what + " y");
                device.matmul_backward(dx, {}, dy, x, id);
                expect_near(dx.values(),
                            reference::matmul(dy.values(), reference::transposed(w_used.values(), out, in), N, in, out),
                            t, what + " dx");
            }
            Array dw = normals(DType::f32, {out, in}, 1, 4);
            Doubles dw_want = reference::matmul(reference::transposed(dy.values(), N, out),
                                                reference::transposed(x.values(), N, in), out, in, N);
            add(dw_want, dw.values());
            device.matmul_backward({}, dw, dy, x, id);
            expect_near(dw.values(), dw_want, DType::f32, what + " dw");
        }
}

TEST_P(Ops, RefreshedWeightsAreUsedByBothDirections) {
    Array masters[2];  // outlive the backend's use of them
    for (DType t : kFloats) {
        Array& w = masters[t == DType::bf16] = normals(DType::f32, {24, 16}, 1, 1);
        Array x = normals(t, {5, 16}, 1, 2), dy = normals(t, {5, 24}, 1, 3);
        Array y(t, {5, 24}), dx(t, {5, 16});
        const WeightId id = device.bind_weight(w, t, true), made = device.bind_weight(w, t, false);
        device.matmul_backward(dx, {}, dy, x, id);
        device.matmul_backward(dx, {}, dy, x, made);
        const Array other = normals(DType::f32, {24, 16}, 1, 9);
        std::memcpy(w.memory.data(), other.memory.data(), 24 * 16 * 4);
        device.refresh_weights();
        const Doubles used = Array(t, {24, 16}, other.values()).values();
        for (WeightId w : {id, made}) {
            device.matmul_forward(y, x, w);
            device.matmul_backward(dx, {}, dy, x, w);
            expect_near(y.values(), reference::matmul(x.values(), used, 5, 24, 16), t, "y");
            expect_near(dx.values(), reference::matmul(dy.values(), reference::transposed(used, 24, 16), 5, 16, 24), t,
                        "dx");
        }
    }
}

TEST_P(Ops, NormWithResidual) {
    for (DType t : kFloats)
        for (const auto& [N, C] : {std::pair{1, 1}, {3, 12}, {70, 36}, {129, 768}}) {
            Array x = normals(DType::f32, {N, C}, 1, 1), delta = normals(t, {N, C}, 1, 2),
                  w = normals(DType::f32, {C}, 1, 3);
            Array y(t, {N, C}), rstd(DType::f32, {N}), sum(DType::f32, {N, C});
            const auto want = reference::norm(x.values(), delta.values(), w.values(), C, 1e-5);
            const std::string what = std::to_string(N) + "x" + std::to_string(C);
            device.norm_forward(y, rstd, sum, x, delta, w, 1e-5f);
            expect_near(sum.values(), want.x, DType::f32, what + " x_out");
            expect_near(rstd.values(), want.rstd, DType::f32, what + " rstd");
            expect_near(y.values(), want.y, t, what + " y");
            device.norm_forward(y, rstd, {}, x, {}, w, 1e-5f);
            expect_near(y.values(), reference::norm(x.values(), {}, w.values(), C, 1e-5).y, t, what + " y alone");
            Array in_place = x;
            device.norm_forward(y, rstd, in_place, in_place, delta, w, 1e-5f);
            EXPECT_EQ(in_place.memory, sum.memory);

            Array dy = normals(t, {N, C}, 1, 4), dx = normals(DType::f32, {N, C}, 1, 5), low(DType::bf16, {N, C});
            Array dw = normals(DType::f32, {C}, 1, 6);
            auto grads = reference::norm_backward(dy.values(), sum.values(), w.values(), C, 1e-5);
            add(grads.dx, dx.values());
            add(grads.dw, dw.values());
            device.norm_backward(dx, low, dw, dy, sum, rstd, w);
            expect_near(dx.values(), grads.dx, DType::f32, what + " dx");
            expect_near(low.values(), grads.dx, DType::bf16, what + " dx_low");
            expect_near(dw.values(), grads.dw, DType::f32, what + " dw");
        }
}

TEST_P(Ops, SwiGlu) {
    for (DType t : kFloats)
        for (const auto& [N, F] : {std::pair{1, 1}, {7, 29}, {65, 64}}) {
            Array gate_up = normals(t, {N, 2 * F}, 3, 1), dy = normals(t, {N, F}, 1, 2), y(t, {N, F}), d(t, {N, 2 * F});
            device.swiglu_forward(y, gate_up);
            device.swiglu_backward(d, dy, gate_up);
            expect_near(y.values(), reference::swiglu(gate_up.values(), F), t, "y");
            expect_near(d.values(), reference::swiglu_backward(dy.values(), gate_up.values(), F), t, "dgate_up");
        }
    Array huge(DType::f32, {1, 8}, {-200, 200, -1e30, 1e30, 1, 1, 1, 1}), y(DType::f32, {1, 4});
    device.swiglu_forward(y, huge);
    EXPECT_EQ(y.values(), (Doubles{0, 200, 0, double(1e30f)}));
}

TEST_P(Ops, RopeTurnsAndTurnsBack) {
    for (DType t : kFloats)
        for (bool half : {false, true})
            for (const auto& [heads, D, extra] : {std::tuple{1, 2, 0}, {3, 12, 12}, {4, 48, 96}, {5, 16, 5}}) {
                const int64_t N = 21, width = heads * D + extra;
                Ints positions;
                for (int i = 0; i < N; ++i) positions.push_back(i * 7 % 40);
                const std::vector<float> rows = rope_table(10000, D, 0, 40);
                Array table(DType::f32, {40, D}, Doubles(rows.begin(), rows.end()));
                Array x = normals(t, {N, width}, 1, 1), at = ints(positions, {N});
                const Doubles before = x.values();
                const RopeLayout layout = half ? RopeLayout::half : RopeLayout::interleaved;
                device.rope_forward(x, table, at, heads, layout);
                expect_near(x.values(), reference::rope(before, positions, width, heads, D, 10000, half, 1), t,
                            "forward");
                const Doubles turned = x.values();
                device.rope_backward(x, table, at, heads, layout);
                expect_near(x.values(), reference::rope(turned, positions, width, heads, D, 10000, half, -1), t,
                            "backward");
            }
}

TEST_P(Ops, EmbeddingLeavesAbsentTokensAlone) {
    const int V = 51, C = 36;
    const Ints tokens = {3, 50, 3, 0, 7, 3, 50}, where = {0, 1, 2, 0, 1, 2, 4};
    Array table = normals(DType::f32, {V, C}, 1, 1), added = normals(DType::f32, {5, C}, 1, 2), x(DType::f32, {7, C});
    Array ids = ints(tokens, {7}), positions = ints(where, {7});
    for (bool add : {false, true}) {
        device.embedding_forward(x, table, ids, add ? Tensor(added) : Tensor(), positions);
        const Doubles got = x.values(), rows = table.values(), more = added.values();
        for (int i = 0; i < 7; ++i)
            for (int c = 0; c < C; ++c)
                EXPECT_FLOAT_EQ(got[i * C + c], rows[tokens[i] * C + c] + (add ? more[where[i] * C + c] : 0));
    }
    Array grad(DType::f32, {V, C}), dx = normals(DType::f32, {7, C}, 1, 3);
    device.embedding_backward(grad, dx, ids);
    Doubles want(V * C);
    const Doubles rows = dx.values(), got = grad.values();
    for (int i = 0; i < 7; ++i)
        for (int c = 0; c < C; ++c) want[tokens[i] * C + c] += rows[i * C + c];
    expect_near(got, want, DType::f32, "dtable");
    for (int i = 0; i < V * C; ++i) {
        if (want[i] == 0) {
            EXPECT_EQ(got[i], 0.0);
        }
    }
}

TEST_P(Ops, CrossEntropy) {
    for (DType t : kFloats)
        for (int V : {1, 51, 257, 2500}) {
            const int N = 9;
            Array logits = normals(DType::f32, {N, V}, 30, 1), losses(DType::f32, {N}), d(t, {N, V});
            reinterpret_cast<float*>(logits.memory.data())[0] = 300;  // a spread past exp's range
            Ints targets;
            for (int i = 0; i < N; ++i) targets.push_back(i == 4 ? -1 : i * 11 % V);
            Array at = ints(targets, {N});
            const auto want = reference::cross_entropy(logits.values(), targets, V, 0.25);
            Array used_up = logits;
            device.cross_entropy(losses, d, used_up, at, 0.25f);
            expect_near(losses.values(), want.losses, DType::f32, "losses");
            expect_near(d.values(), want.dlogits, t, "dlogits");
            const Doubles got = d.values();
            for (int j = 0; j < V; ++j) EXPECT_EQ(got[4 * V + j], 0.0);
            device.cross_entropy(losses, {}, logits, at, 0.25f);
            expect_near(losses.values(), want.losses, DType::f32, "losses alone");
            if (t == DType::bf16) continue;
            device.cross_entropy(losses, logits, logits, at, 0.25f);
            EXPECT_EQ(logits.memory, d.memory) << "in place";
        }
    Array bad(DType::f32, {1, 3}, {1, NAN, 2}), loss(DType::f32, {1}), target = ints({0}, {1});
    device.cross_entropy(loss, {}, bad, target, 1);
    EXPECT_TRUE(std::isnan(loss.values()[0]));
}

TEST_P(Ops, UpdateIsTheFormulaInsideTheGroupsOnly) {
    const int n = 1000;
    Array p = normals(DType::f32, {n}, 1, 1), m = normals(DType::f32, {n}, 1, 2), g = normals(DType::f32, {n}, 1, 3);
    Array v(DType::f32, {n}, Doubles(n, 0.3));
    for (bool adaptive : {true, false}) {
        const Doubles p0 = p.values(), m0 = m.values(), v0 = v.values(), g0 = g.values();
        const UpdateStep s{0.9f, 0.95f, 1e-8f, 0.1f, 0.05f, 1.7f, 1.3f, adaptive, 0.5f};
        device.update(p, m, v, g, {{3, 500, 1e-2f, 0.1f}, {501, 997, 1e-3f, 0.0f}}, s);
        Doubles want_p = p0, want_m = m0, want_v = v0;
        for (int i = 0; i < n; ++i) {
            if (i < 3 || i == 500 || i >= 997) continue;
            const double lr = i < 500 ? 1e-2 : 1e-3, wd = i < 500 ? 0.1 : 0, grad = 0.5 * g0[i];
            want_m[i] = 0.9 * m0[i] + 0.1 * grad;
            want_v[i] = 0.95 * v0[i] + 0.05 * grad * grad;
            want_p[i] =
                p0[i] * (1 - lr * wd) - lr * 1.7 * want_m[i] / (adaptive ? 1.3 * std::sqrt(want_v[i]) + 1e-8 : 1);
        }
        expect_near(p.values(), want_p, DType::f32, "p", 1e-6);
        expect_near(m.values(), want_m, DType::f32, "m", 1e-6);
        expect_near(v.values(), want_v, DType::f32, "v", 1e-6);
        for (int i : {0, 2, 500, 997, 999}) EXPECT_EQ(p.values()[i], p0[i]);
    }
}

TEST_P(Ops, GlobalNorm) {
    for (int64_t n : {1, 1000, 200001}) {
        Array g = normals(DType::f32, {n}, 1, n);
        double squares = 0;
        for (double x : g.values()) squares += x * x;
        EXPECT_NEAR(device.global_norm(g), std::sqrt(squares), 1e-12 * std::sqrt(squares) * n);
        float* x = reinterpret_cast<float*>(g.memory.data());
        x[n - 1] = 1e30f;
        EXPECT_NEAR(device.global_norm(g), 1e30, 1e24);
        x[n / 2] = NAN;
        EXPECT_FALSE(std::isfinite(device.global_norm(g)));
        x[n / 2] = -INFINITY;
        EXPECT_FALSE(std::isfinite(device.global_norm(g)));
    }
}

TEST_P(Ops, PriorTables) {
    const int H = 3, P = 70;
    Array theta[3] = {Array(DType::f32, {H}, {0, -1, 60}), Array(DType::f32, {H}, {-9, 0.5, 2}),
                      Array(DType::f32, {H}, {0, -0.4, 1})};
    Array bias(DType::f32, {H, P}), d1(DType::f32, {H, P}), d2(DType::f32, {H, P});
    const Tensor thetas[3] = {theta[0], theta[1], theta[2]}, tables[3] = {{}, d1, d2};
    device.prior_tables(bias, tables, Encoding::bam, thetas);
    for (int h = 0; h < H; ++h)
        for (int d = 0; d < P; ++d) {
            const double t[3] = {theta[0].values()[h], theta[1].values()[h], theta[2].values()[h]};
            const PriorPoint p = bam_at(t, d);
            EXPECT_EQ(bias.values()[h * P + d], double(float(p.bias)));
            EXPECT_EQ(d1.values()[h * P + d], double(float(p.dtheta[1])));
            EXPECT_EQ(d2.values()[h * P + d], double(float(p.dtheta[2])));
        }
    const Tensor none[3] = {};
    device.prior_tables(bias, none, Encoding::alibi, none);
    EXPECT_FLOAT_EQ(bias.values()[P + 5], -5 * alibi_slope(1, H));
}

// ---- attention
// ------------------------------------------------------------------------------------------------------------

enum class Prior { none, small, decaying, huge, floor, all_floor };

struct Case {
    int B, T, H, K, D;
    Prior prior = Prior::small;
    double seq_scale = 1;  // of head 0; 0.25 more for each next one; NaN: no SSMax
    bool scale_scores = false;
    Ints documents = {};  // where documents begin in every row; row b's are b later
    int cached = 0;       // keys before the first query of row 0; row b has 3b more
    double qk = 1;        // standard deviation of q and k
};

const double kNone = NAN;

std::string describe(const Case& c) {
    return "B" + std::to_string(c.B) + " T" + std::to_string(c.T) + " H" + std::to_string(c.H) + " K" +
           std::to_string(c.K) + " D" + std::to_string(c.D) + " prior " + std::to_string(int(c.prior)) + " s " +
           std::to_string(c.seq_scale) + (c.scale_scores ? " scale_scores" : "") + " documents " +
           std::to_string(c.documents.size());
}

double prior_value(Prior p, int h, int d) {
    switch (p) {
        case Prior::small:
            return std::sin(0.7 * d + h);
        case Prior::decaying:
            return -(0.2 + 0.3 * h) * d;
        case Prior::huge:
            return d == 0 ? -1e6 : d % 5 == 0 ? -1e30 : -std::pow(d, 0.3);
        case Prior::floor:
            return d % 3 == 0 ? -1e30 : -0.1 * d;
        case Prior::all_floor:
            return -1e30;
        default:
            return 0;
    }
}

struct Built {
    Case c;
    DType t;
    int64_t S;
    Array q, k, v, key_begin, offset, log_n, seq_scale, bias, tables[2];
    reference::AttentionCase want;
    Attention a;

    Built(const Case& c, DType t) : c(c), t(t) {
        S = c.T + c.cached + (c.cached ? 3 * (c.B - 1) : 0);
        q = normals(t, {c.B, c.T, c.H, c.D}, c.qk, 1), k = normals(t, {c.B, S, c.K, c.D}, c.qk, 2),
        v = normals(t, {c.B, S, c.K, c.D}, 1, 3);
        Ints begins, offsets;
        Doubles logs, scales, prior[3];
        for (int b = 0; b < c.B; ++b) {
            offsets.push_back(c.cached ? c.cached + 3 * b : 0);
            for (int i = 0; i < c.T; ++i) {
                int begin = 0;
                for (int d : c.documents)
                    if (d + b <= offsets[b] + i) begin = d + b;
                begins.push_back(begin);
                logs.push_back(std::log(double(offsets[b] + i - begin + 1)));
            }
        }
        for (int h = 0; h < c.H; ++h) {
            scales.push_back(c.seq_scale + 0.25 * h);
            for (int d = 0; d < S; ++d) {
                prior[0].push_back(double(float(prior_value(c.prior, h, d))));
                const bool clamped = prior[0].back() < -1e29;
                prior[1].push_back(clamped ? 0 : prior[0].back() * std::log(d + 1e-5));
                prior[2].push_back(clamped ? 0 : std::cos(0.3 * d + h) * (c.prior == Prior::huge ? 1e3 : 1));
            }
        }
        key_begin = ints(begins, {c.B, c.T}), offset = ints(offsets, {c.B});
        log_n = Array(DType::f32, {c.B, c.T}, logs);
        a.B = c.B, a.T = c.T, a.S = S, a.H = c.H, a.K = c.K, a.D = c.D;
        a.order = c.scale_scores ? SsmaxOrder::scale_scores : SsmaxOrder::scale_bias;
        a.key_begin = key_begin, a.log_n = log_n;
        if (c.cached) a.offset = offset;
        want = {c.B,        c.T,    int(S), c.H, c.K, c.D, c.scale_scores, q.values(), k.values(),
                v.values(), begins, {},     {},  {},  {}};
        if (c.cached) want.offset = offsets;
        if (!std::isnan(c.seq_scale)) {
            seq_scale = Array(DType::f32, {c.H}, scales);
            a.seq_scale = seq_scale;
            want.seq_scale = seq_scale.values();
        }
        if (c.prior != Prior::none) {
            bias = Array(DType::f32, {c.H, S}, prior[0]);
            a.bias = bias;
            want.bias = bias.values();
            for (int p = 0; p < 2; ++p) {
                tables[p] = Array(DType::f32, {c.H, S}, prior[1 + p]);
                a.dbias[1 + p] = tables[p];
                want.tables.push_back(tables[p].values());
            }
        }
    }

    static HeadsView view(Array& x, int64_t tokens, int64_t width) {
        return {x.memory.data(), x.dtype, tokens * width, width};
    }
    HeadsView q_view() { return view(q, c.T, c.H * c.D); }
    HeadsView k_view(Array& x) { return view(x, S, c.K * c.D); }
};

// Head gradients against the sum of the sizes of their row terms.
void expect_heads(Array& got, const reference::HeadGrad& want, DType t, const std::string& what) {
    const Doubles values = got.values();
    for (size_t h = 0; h < values.size(); ++h) {
        const double error = std::fabs(values[h] - 0.5 - want.value[h]);  // they start at 0.5
        EXPECT_LE(error, (t == DType::bf16 ? 1e-2 : 2e-5) * want.size[h] + 1e-6) << what << " head " << h;
    }
}

void check_attention(Backend& device, const Case& c, DType t) {
    SCOPED_TRACE(describe(c) + (t == DType::bf16 ? " bf16" : " fp32"));
    Built x(c, t);
    Array out(t, {c.B, c.T, c.H * c.D}), lse(DType::f32, {c.B, c.H, c.T});
    device.attention_forward(out, lse, x.q_view(), x.k_view(x.k), x.k_view(x.v), x.a);
    const auto want = reference::attention(x.want);
    expect_near(out.values(), want.out, t, "out");
    expect_near(lse.values(), want.lse, DType::f32, "lse", 3e-6);
    Array again(t, {c.B, c.T, c.H * c.D});
    device.attention_forward(again, {}, x.q_view(), x.k_view(x.k), x.k_view(x.v), x.a);
    EXPECT_EQ(again.memory, out.memory) << "not repeatable";
    if (c.cached) return;

    Array dout = normals(t, {c.B, c.T, c.H * c.D}, 1, 4);
    const auto grads = reference::attention_backward(x.want, dout.values());
    Array first[3];
    for (int run = 0; run < 2; ++run) {
        Array dq(t, {c.B, c.T, c.H, c.D}), dk(t, {c.B, c.T, c.K, c.D}), dv(t, {c.B, c.T, c.K, c.D});
        Array sums[4];
        for (Array& s : sums) s = Array(DType::f32, {c.H}, Doubles(c.H, 0.5));
        Backend::AttentionBackward g;
        g.dq = Built::view(dq, c.T, c.H * c.D), g.dk = x.k_view(dk), g.dv = x.k_view(dv);
        g.q = x.q_view(), g.k = x.k_view(x.k), g.v = x.k_view(x.v);
        g.dout = dout, g.out = out, g.lse = lse;
        if (x.a.seq_scale) g.grads.dseq_scale = sums[0];
        if (x.a.bias) g.grads.dscale = sums[1], g.grads.dtheta[1] = sums[2], g.grads.dtheta[2] = sums[3];
        device.attention_backward(g, x.a);
        if (run == 1) {
            EXPECT_EQ(dq.memory, first[0].memory);
            EXPECT_EQ(dk.memory, first[1].memory);
            EXPECT_EQ(sums[1].memory, first[2].memory);
            break;
        }
        first[0] = dq, first[1] = dk, first[2] = sums[1];
        const double loose = t == DType::bf16 ? 1.5e-2 : 0;
        expect_near(dq.values(), grads.dq, t, "dq", loose);
        expect_near(dk.values(), grads.dk, t, "dk", loose);
        expect_near(dv.values(), grads.dv, t, "dv", loose);
        // Keys at the floor that a negative scale makes the likeliest: 1e30 times rounding, but finite.
        if (c.seq_scale < 0 && c.prior == Prior::floor) {
            for (Array& s : sums)
                for (double v : s.values()) EXPECT_TRUE(std::isfinite(v));
            continue;
        }
        if (x.a.seq_scale) expect_heads(sums[0], grads.dseq_scale, t, "dseq_scale");
        if (!x.a.bias) continue;
        if (c.prior == Prior::all_floor)
            EXPECT_EQ(sums[1].values(), Doubles(c.H, 0.5)) << "a floor has no slope";
        else
            expect_heads(sums[1], grads.dscale, t, "dscale");
        expect_heads(sums[2], grads.dtables[0], t, "dbeta");
        expect_heads(sums[3], grads.dtables[1], t, "dmu");
    }
}

const Case kCases[] = {
    {1, 1, 1, 1, 12},
    {2, 29, 2, 1, 16, Prior::none, kNone},
    {1, 65, 3, 3, 32, Prior::small, kNone},
    {2, 127, 4, 2, 48, Prior::small, 1},
    {1, 129, 2, 2, 64, Prior::decaying, 1},
    {1, 129, 2, 2, 64, Prior::decaying, 1, true},
    {2, 129, 2, 1, 96, Prior::small, -0.5},
    {1, 66, 2, 2, 128, Prior::small, 0},
    {1, 66, 2, 1, 160, Prior::decaying, kNone, true},
    {1, 65, 1, 1, 256, Prior::none, 1},
    {3, 127, 2, 2, 20, Prior::small, 1, false, {0, 5, 61, 62, 63, 100}},
    {2, 129, 4, 4, 16, Prior::decaying, 1, true, {0, 64, 65}},
    {2, 200, 6, 2, 24, Prior::small, 1, false, {0, 63, 127, 128, 190}},
    {1, 127, 2, 2, 16, Prior::huge, kNone},
    {1, 127, 2, 2, 16, Prior::huge, 1, false, {0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 64, 65, 66, 67, 68}},
    {1, 129, 2, 2, 16, Prior::floor, kNone},
    {1, 129, 2, 2, 16, Prior::floor, -0.5, false, {0, 1, 2, 30}},
    {1, 70, 2, 2, 16, Prior::all_floor, kNone},
    {1, 70, 2, 2, 16, Prior::all_floor, kNone, true, {0, 1, 30}},
    {2, 33, 2, 2, 8, Prior::decaying, kNone},
    {1, 65, 2, 1, 40, Prior::small, 1},
    {1, 50, 2, 2, 72, Prior::small, 1, true},
    {1, 97, 2, 1, 33, Prior::small, 1, false, {0, 15, 16, 17, 31, 32, 33, 47, 48, 49}},
    {2, 80, 2, 2, 32, Prior::decaying, -0.5, true, {0, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79}},
};

TEST_P(Ops, AttentionFp32) {
    for (const Case& c : kCases) check_attention(device, c, DType::f32);
}

TEST_P(Ops, AttentionBf16) {
    for (const Case& c : kCases) check_attention(device, c, DType::bf16);
}

TEST_P(Ops, AttentionWithLargeScores) {
    for (DType t : kFloats) check_attention(device, {1, 130, 2, 2, 16, Prior::small, kNone, false, {}, 0, 5}, t);
}

TEST_P(Ops, AttentionIntoACache) {
    for (DType t : kFloats)
        for (Case c : {Case{2, 1, 4, 2, 48, Prior::decaying, 1},
                       {3, 5, 2, 2, 16, Prior::small, 1, true, {0, 70}},
                       {1, 70, 2, 1, 12, Prior::none, 1}}) {
            c.cached = 100;
            check_attention(device, c, t);
        }
}

// Many one-token documents with a table of 1e10 at distance 0: those queries must not leave rounding in the sums.
TEST_P(Ops, OneTokenDocumentsGiveNoPriorGradient) {
    for (DType t : kFloats) {
        Case c{2, 130, 2, 2, 16, Prior::none, kNone};
        for (int i = 0; i < 130; ++i) c.documents.push_back(i);
        Built x(c, t);
        Array bias(DType::f32, {2, 140}, Doubles(280, -1e10)), sums(DType::f32, {2}), out(t, {2, 130, 32}),
            lse(DType::f32, {2, 2, 130});
        x.a.bias = bias;
        x.a.dbias[1] = bias;
        device.attention_forward(out, lse, x.q_view(), x.k_view(x.k), x.k_view(x.v), x.a);
        EXPECT_EQ(out.values()[0], x.v.values()[0]);
        Array dq = x.q, dk = x.k, dv = x.v, dout = normals(t, {2, 130, 32}, 1, 4), theta(DType::f32, {2});
        Backend::AttentionBackward g;
        g.dq = Built::view(dq, 130, 32), g.dk = x.k_view(dk), g.dv = x.k_view(dv);
        g.q = x.q_view(), g.k = x.k_view(x.k), g.v = x.k_view(x.v);
        g.dout = dout, g.out = out, g.lse = lse;
        g.grads.dscale = sums, g.grads.dtheta[1] = theta;
        device.attention_backward(g, x.a);
        EXPECT_EQ(sums.values(), Doubles(2));
        EXPECT_EQ(theta.values(), Doubles(2));
        for (double d : dq.values()) EXPECT_EQ(d, 0.0);
        for (double d : dk.values()) EXPECT_EQ(d, 0.0);
        EXPECT_EQ(dv.memory, dout.memory);
    }
}

// More tasks than rows and heads: dq by queries, dk and dv by keys must give what one task a head gives.
TEST_P(CpuOps, SplitBackwardEqualsWhole) {
    CpuBackend alone(1, GetParam()), many(3, GetParam());
    for (DType t : kFloats) {
        const Case c{1, 700, 2, 1, 16, Prior::small, 1, false, {0, 130, 256, 500}};
        Built x(c, t);
        Array out(t, {1, 700, 32}), lse(DType::f32, {1, 2, 700}), dout = normals(t, {1, 700, 32}, 1, 4);
        alone.attention_forward(out, lse, x.q_view(), x.k_view(x.k), x.k_view(x.v), x.a);
        Array d[2][3], theta[2];
        for (int i = 0; i < 2; ++i) {
            d[i][0] = x.q, d[i][1] = x.k, d[i][2] = x.v, theta[i] = Array(DType::f32, {2});
            Backend::AttentionBackward g;
            g.dq = Built::view(d[i][0], 700, 32), g.dk = x.k_view(d[i][1]), g.dv = x.k_view(d[i][2]);
            g.q = x.q_view(), g.k = x.k_view(x.k), g.v = x.k_view(x.v);
            g.dout = dout, g.out = out, g.lse = lse, g.grads.dtheta[1] = theta[i];
            (i ? many : alone).attention_backward(g, x.a);
        }
        for (int j = 0; j < 3; ++j) EXPECT_EQ(d[0][j].memory, d[1][j].memory);
        EXPECT_FLOAT_EQ(theta[0].values()[0], theta[1].values()[0]);
    }
}

TEST_P(Ops, CacheAppendConverts) {
    const int B = 2, T = 3, H = 4, K = 2, D = 12, S = 9;
    for (DType from : kFloats)
        for (DType to : kFloats) {
            Array qkv = normals(from, {B * T, (H + 2 * K) * D}, 1, 1), k(to, {B, S, K, D}), v(to, {B, S, K, D}),
                  offset = ints({4, 6}, {B});
            device.cache_append(Built::view(k, S, K * D), Built::view(v, S, K * D), qkv, offset, H, K, D);
            const Array rounded(to, {B * T, (H + 2 * K) * D}, qkv.values());
            const Doubles all = rounded.values(), keys = k.values(), values = v.values();
            for (int b = 0; b < B; ++b)
                for (int s = 0; s < S; ++s)
                    for (int i = 0; i < K * D; ++i) {
                        const int t = s - (b ? 6 : 4);
                        const bool inside = t >= 0 && t < T;
                        const int64_t row = int64_t(b * T + t) * (H + 2 * K) * D;
                        EXPECT_EQ(keys[(b * S + s) * K * D + i], inside ? all[row + H * D + i] : 0);
                        EXPECT_EQ(values[(b * S + s) * K * D + i], inside ? all[row + (H + K) * D + i] : 0);
                    }
        }
}

// ---- the reference itself
// ---------------------------------------------------------------------------------------------------

// Central differences of sum(out * dout) in the double reference.
TEST(OpsReference, AttentionGradientsAreDerivatives) {
    for (Case c : {Case{1, 9, 2, 1, 4, Prior::small, 1},
                   {2, 7, 2, 2, 3, Prior::decaying, -0.5, true, {0, 3}},
                   {1, 8, 2, 2, 4, Prior::small, kNone, false, {0, 1, 4}}}) {
        Built x(c, DType::f32);
        reference::AttentionCase& a = x.want;
        const std::vector<float> weights = random_normals(int64_t(a.q.size()), 1, 9);
        const Doubles dout(weights.begin(), weights.end());
        auto loss = [&] {
            const Doubles out = reference::attention(a).out;
            double s = 0;
            for (size_t i = 0; i < out.size(); ++i) s += out[i] * dout[i];
            return s;
        };
        auto slope = [&](double& p) {
            const double h = 1e-5, at = p;
            p = at + h;
            const double up = loss();
            p = at - h;
            const double down = loss();
            p = at;
            return (up - down) / (2 * h);
        };
        const auto g = reference::attention_backward(a, dout);
        for (size_t i = 0; i < a.q.size(); ++i) EXPECT_NEAR(g.dq[i], slope(a.q[i]), 1e-7);
        for (size_t i = 0; i < a.k.size(); ++i) EXPECT_NEAR(g.dk[i], slope(a.k[i]), 1e-7);
        for (size_t i = 0; i < a.v.size(); ++i) EXPECT_NEAR(g.dv[i], slope(a.v[i]), 1e-7);
        for (size_t h = 0; h < a.seq_scale.size(); ++h) EXPECT_NEAR(g.dseq_scale.value[h], slope(a.seq_scale[h]), 1e-7);
        // The bias moved along a table, and along itself.
        for (int h = 0; h < a.H; ++h)
            for (size_t p = 0; p <= a.tables.size(); ++p) {
                const size_t P = a.bias.size() / a.H;
                const Doubles bias = a.bias, along = p < a.tables.size() ? a.tables[p] : a.bias;
                auto moved = [&](double step) {
                    for (size_t d = 0; d < P; ++d) a.bias[h * P + d] = bias[h * P + d] + step * along[h * P + d];
                    return loss();
                };
                const double slope_along = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                a.bias = bias;
                EXPECT_NEAR((p < a.tables.size() ? g.dtables[p] : g.dscale).value[h], slope_along, 1e-6);
            }
    }
}

TEST(CpuBackendTest, IsaIsChosenByName) {
    setenv("BAM_ISA", "base", 1);
    EXPECT_EQ(choose_isa(), Isa::base);
    setenv("BAM_ISA", "sse9", 1);
    EXPECT_THROW(choose_isa(), Error);
    unsetenv("BAM_ISA");
    EXPECT_EQ(choose_isa(), machine_isas().back());
}

// On AVX2 oneDNN refuses bf16, on AVX-512 without BF16 it is another implementation. Its limit is read once a process.
TEST(CpuBackendTest, MatmulOnOlderMachines) {
    for (const char* limit : {"AVX2", "AVX512_CORE"}) {
        RunOptions options;
        options.program = "/proc/self/exe";
        options.env["ONEDNN_MAX_CPU_ISA"] = limit;
        const RunResult r = run_bam({"--gtest_filter=*Ops.Matmul*:*Ops.Refreshed*-*cuda*"}, options);
        EXPECT_EQ(r.code, 0) << limit << "\n" << r.out;
    }
}

}  // namespace
}  // namespace bam::test
