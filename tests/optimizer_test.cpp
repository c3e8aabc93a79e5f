// RAdam and AdamW against DESIGN §2.4 worked in double from scratch.
#include "optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "arena.h"
#include "subjects.h"
#include "test_support.h"

namespace bam::test {
namespace {

struct Scalar {
    double p, m = 0, v = 0;
};

// One step of the formulas as the papers write them.
void formula_step(Scalar& s, double g, const OptimizerConfig& o, double lr, double decay, int t) {
    s.p *= 1 - lr * decay;
    s.m = o.beta1 * s.m + (1 - o.beta1) * g;
    s.v = o.beta2 * s.v + (1 - o.beta2) * g * g;
    const double m_hat = s.m / (1 - std::pow(o.beta1, t));
    if (o.name == OptimizerKind::adamw) {
        s.p -= lr * m_hat / (std::sqrt(s.v / (1 - std::pow(o.beta2, t))) + o.eps);
        return;
    }
    const double rho_inf = 2 / (1 - o.beta2) - 1;
    const double rho = rho_inf - 2 * t * std::pow(o.beta2, t) / (1 - std::pow(o.beta2, t));
    if (rho > 5) {
        const double r = std::sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho));
        s.p -= lr * m_hat * r * std::sqrt(1 - std::pow(o.beta2, t)) / (std::sqrt(s.v) + o.eps);
    } else {
        s.p -= lr * m_hat;
    }
}

double gradient_at(int t, int i) {
    return std::sin(1.7 * t + 0.9 * i) * std::pow(10.0, i - 2);
}

ModelConfig small_bam() {
    ModelConfig m;
    apply_variant(m.position, "bam_ssmax");
    m.dim = 4, m.n_layers = 2, m.n_heads = m.n_kv_heads = 2, m.ffn_hidden = 3, m.vocab_size = 5;
    return m;
}

// What UpdateStep promises (backend.h), in double.
void promised_step(Scalar& s, double g, const UpdateStep& u, float lr, float decay) {
    g *= u.grad_scale;
    s.p *= 1 - double(lr) * decay;
    s.m = u.beta1 * s.m + u.rest1 * g;
    s.v = u.beta2 * s.v + u.rest2 * g * g;
    s.p -= u.adaptive ? lr * u.c1 * s.m / (u.c2 * std::sqrt(s.v) + u.eps) : lr * u.c1 * s.m;
}

TEST(Optimizer, StepScalarsFollowTheFormulas) {
    for (OptimizerKind kind : {OptimizerKind::radam, OptimizerKind::adamw})
        for (double beta2 : {0.5, 0.95, 0.999})
            for (double eps : {1e-8, 1e-2}) {
                OptimizerConfig o;
                o.name = kind, o.beta2 = beta2, o.eps = eps;
                for (int i = 0; i < 5; ++i) {
                    Scalar wanted{0.3}, got{0.3};
                    double path = 0;
                    for (int t = 1; t <= 12; ++t) {
                        const double before = wanted.p;
                        formula_step(wanted, gradient_at(t, i), o, 0.01, 0.1, t);
                        promised_step(got, gradient_at(t, i), update_step(o, t, 1.0), 0.01f, 0.1f);
                        path += std::fabs(wanted.p - before);
                        EXPECT_NEAR(got.p, wanted.p, 1e-6 * path + 1e-8)
                            << int(kind) << " beta2 " << beta2 << " eps " << eps << " step " << t << " scalar " << i;
                    }
                }
            }
}

// rho_5 = 4.8, rho_6 = 5.7 at beta2 0.95 and 0.999 alike; at 0.5 rho_inf is 3, never.
TEST(Optimizer, RectificationBeginsWithRhoAboveFive) {
    OptimizerConfig o;
    for (double beta2 : {0.95, 0.999}) {
        o.beta2 = beta2;
        for (int t = 1; t <= 12; ++t) EXPECT_EQ(update_step(o, t, 1).adaptive, t >= 6) << beta2 << " step " << t;
    }
    o.beta2 = 0.5;
    for (int t : {1, 10, 100000}) EXPECT_FALSE(update_step(o, t, 1).adaptive);
    o.beta2 = 0.95;
    EXPECT_TRUE(update_step(o, 1000000, 1).adaptive);
    EXPECT_NEAR(update_step(o, 1000000, 1).c1, 1.0, 1e-6);
}

TEST(Optimizer, GroupsCoverEveryTrainedWeightOnce) {
    ModelConfig m = small_bam();
    for (bool train_beta : {true, false}) {
        m.position.train_beta = train_beta;
        const ParameterTable table = make_parameter_table(m);
        OptimizerConfig o;
        o.lr = 0.5, o.prior_lr = 0.125, o.weight_decay = 0.25;
        const std::vector<UpdateGroup> groups = update_groups(table, o, 0.5);
        int64_t end = 0;
        for (const UpdateGroup& g : groups) {
            EXPECT_EQ(g.begin, end);
            end = g.end;
        }
        EXPECT_EQ(end, table.trained);
        for (const Parameter& p : table.all) {
            const bool theta = p.name.find("theta_") != std::string::npos;
            const bool frozen = p.name.ends_with("theta_mu") || (p.name.ends_with("theta_beta") && !train_beta);
            int holders = 0;
            for (const UpdateGroup& g : groups) {
                if (p.offset + p.numel() <= g.begin || p.offset >= g.end) continue;
                ++holders;
                EXPECT_LE(g.begin, p.offset);
                EXPECT_GE(g.end, p.offset + p.numel());
                EXPECT_EQ(g.lr, theta ? 0.0625f : 0.25f) << p.name;
                EXPECT_EQ(g.weight_decay, p.shape.size() == 2 ? 0.25f : 0.0f) << p.name;
            }
            EXPECT_EQ(holders, frozen ? 0 : 1) << p.name;
        }
    }
}

TEST(Optimizer, PriorsUseTheModelsRateUnlessTheyHaveTheirOwn) {
    const ParameterTable table = make_parameter_table(small_bam());
    OptimizerConfig o;
    o.lr = 0.5;
    for (const UpdateGroup& g : update_groups(table, o, 1)) EXPECT_EQ(g.lr, 0.5f);
    o.prior_lr = 0;  // held still, which is not "none given"
    EXPECT_EQ(update_groups(table, o, 1).back().lr, 0.0f);
}

TEST(Optimizer, ClippedNormIsTheSmallerOfNormAndClip) {
    EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
    EXPECT_EQ(clip_factor(0, 1.0), 1.0);
    EXPECT_EQ(clip_factor(1e9, 0), 1.0);
    EXPECT_NEAR(10 * clip_factor(10, 1.0), 1.0, 1e-6);
    EXPECT_DOUBLE_EQ(clip_factor(10, 0.5), 0.5 / (10 + 1e-6));
}

// Twelve updates of odd ranges on the CPU; what is in no group stays as it is.
TEST(Optimizer, CpuUpdateFollowsTheFormulas) {
    const int n = 37;
    const std::vector<UpdateGroup> groups = {{1, 18, 0.01f, 0.1f}, {18, 31, 0.003f, 0.0f}};
    const auto device = make_test_backend(2);
    for (OptimizerKind kind : {OptimizerKind::radam, OptimizerKind::adamw})
        for (double beta2 : {0.95, 0.999}) {
            OptimizerConfig o;
            o.name = kind, o.beta2 = beta2;
            Tensor p, m, v, g;
            const Arena memory = make_arena(*device, [&](Arena& a) {
                for (Tensor* t : {&p, &m, &v, &g}) *t = a.take(DType::f32, {n});
            });
            std::vector<float> start = random_floats(n, -1, 1, 3), gradients(n), zeros(n, 0.0f);
            std::vector<Scalar> wanted;
            for (float x : start) wanted.push_back({x});
            device->upload(p, start.data());
            for (Tensor t : {m, v}) device->upload(t, zeros.data());
            for (int t = 1; t <= 12; ++t) {
                for (int i = 0; i < n; ++i) gradients[size_t(i)] = float(gradient_at(t, i % 5));
                for (const UpdateGroup& group : groups)
                    for (int64_t i = group.begin; i < group.end; ++i)
                        formula_step(wanted[size_t(i)], 0.5 * gradients[size_t(i)], o, group.lr, group.weight_decay, t);
                device->upload(g, gradients.data());
                device->update(p, m, v, g, groups, update_step(o, t, 0.5));
            }
            std::vector<float> got_p(n), got_m(n), got_v(n);
            device->download(got_p.data(), p);
            device->download(got_m.data(), m);
            device->download(got_v.data(), v);
            for (int i = 0; i < n; ++i) {
                const Scalar& w = wanted[size_t(i)];
                EXPECT_NEAR(got_p[size_t(i)], w.p, 1e-6) << int(kind) << " beta2 " << beta2 << " element " << i;
                EXPECT_NEAR(got_m[size_t(i)], w.m, 2e-6 * std::fabs(w.m) + 1e-9) << i;
                EXPECT_NEAR(got_v[size_t(i)], w.v, 2e-6 * w.v) << int(kind) << " beta2 " << beta2 << " element " << i;
            }
            EXPECT_EQ(got_p[0], start[0]);
            EXPECT_EQ(got_p[n - 1], start[n - 1]);
        }
}

}  // namespace
}  // namespace bam::test
