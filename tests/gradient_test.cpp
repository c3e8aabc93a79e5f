// Gradients, for every variant, option and parameter: the double-precision reference against central differences of its
// own loss, then the product in fp32 against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>

#include "cases.h"
#include "product.h"
#include "random.h"
#include "test_support.h"

namespace bam::test {
namespace {

struct Differences {
    double step = 1e-4, relative = 1e-7, absolute = 1e-10;
    std::string only = "";     // names that contain this
    std::string without = "";  // but not those with this
};

// The derivative along one random direction in every tensor: wrong in any element, it is wrong.
void expect_central_differences(const std::string& name, const ModelConfig& m, std::vector<double> w,
                                const ReferenceBatch& batch, const Differences& how = {}) {
    const ParameterTable table = make_parameter_table(m);
    const std::vector<double> grads = reference_run(m, table, w, batch).grads;
    const std::vector<double> w0 = w;
    for (const Parameter& p : table.all) {
        if (p.name.find(how.only) == std::string::npos) continue;
        if (!how.without.empty() && p.name.find(how.without) != std::string::npos) continue;
        double by_gradient = 0, size = 0;
        std::vector<double> direction(size_t(p.numel()));
        for (size_t i = 0; i < direction.size(); ++i) {
            direction[i] = random_normal(7, stream_of(p.name), i);
            by_gradient += direction[i] * grads[size_t(p.offset) + i];
            size += std::fabs(grads[size_t(p.offset) + i]);
        }
        double x = 0;
        const double by_difference = central_difference(
            [&] {
                for (size_t i = 0; i < direction.size(); ++i)
                    w[size_t(p.offset) + i] = w0[size_t(p.offset) + i] + x * direction[i];
                return reference_run(m, table, w, batch, false).loss;
            },
            x, how.step);
        std::copy_n(w0.begin() + p.offset, p.numel(), w.begin() + p.offset);
        EXPECT_NEAR(by_gradient, by_difference, how.relative * size + how.absolute) << name << ": " << p.name;
    }
}

TEST(Reference, GradientsAreCentralDifferences) {
    for (const Case& c : all_cases()) {
        const ParameterTable table = make_parameter_table(c.model);
        expect_central_differences(c.name, c.model, reference_weights(c.model, table, 1), batch_of(c));
    }
}

// Parameters whose gradients come through the attention logits only.
bool acts_on_logits(const std::string& name) {
    for (const char* part : {"theta_", "seq_scale", ".wq.", ".wk."})
        if (name.find(part) != std::string::npos) return true;
    return false;
}

constexpr std::pair<double, double> kExtremes[] = {
    {0.0, -9.0}, {60.0, 0.5}, {60.0, -9.0}, {60.0, 3.0}, {-60.0, 3.0}};  // alpha, beta
constexpr double kBetas[] = {-3.0, -2.0, -1.0, -0.3, -0.1, 0.0, 0.5, 1.0, 2.0};

// The prior's singular point is d = 0 itself; theta_mu has a kink there.
TEST(Reference, GradientsAtDistanceZeroForEveryBeta) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (double beta : kBetas) {
            Case c{variant, model_for(variant), documents(beta != 0.5), 2, 9};
            const ParameterTable table = make_parameter_table(c.model);
            std::vector<double> w = reference_weights(c.model, table, 2);
            set_parameters(w, table, "theta_beta", beta);
            set_parameters(w, table, "theta_mu", 0.0);
            const std::string name = c.name + " beta " + std::to_string(beta);
            expect_central_differences(name, c.model, w, batch_of(c), {.step = 2e-5, .without = "theta_mu"});
            expect_central_differences(name, c.model, w, batch_of(c), {1e-8, 1e-4, 1e-7, "theta_mu", ""});
        }
}

// No |d + mu| near 0.
TEST(Reference, GradientsOfMuForEveryBeta) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (double beta : kBetas)
            for (double mu : {-3.5, -0.6, 0.4}) {
                Case c{variant, model_for(variant), documents(false), 2, 9};
                c.model.position.train_mu = true;
                const ParameterTable table = make_parameter_table(c.model);
                std::vector<double> w = reference_weights(c.model, table, 2);
                set_parameters(w, table, "theta_beta", beta);
                set_parameters(w, table, "theta_mu", std::asinh(mu / 2));
                const std::string name = c.name + " beta " + std::to_string(beta) + " mu " + std::to_string(mu);
                expect_central_differences(name, c.model, w, batch_of(c), {.step = 2e-5, .only = "theta"});
            }
}

// |d + mu| = 0 at d = 2: beta 3 makes the kink smooth enough for differences.
TEST(Reference, GradientsWhereMuCancelsTheDistance) {
    for (const char* variant : {"bam", "bam_ssmax"}) {
        Case c{variant, model_for(variant), documents(false), 2, 9};
        c.model.position.train_mu = true;
        const ParameterTable table = make_parameter_table(c.model);
        std::vector<double> w = reference_weights(c.model, table, 3);
        set_parameters(w, table, "theta_beta", 3.0);
        set_parameters(w, table, "theta_mu", std::asinh(-1.0));
        expect_central_differences(c.name, c.model, w, batch_of(c));
    }
}

// DESIGN §2.2: a query that sees one key contributes exactly zero, although the prior is -1e10 there.
TEST(Reference, OneTokenDocumentsGiveThePriorNoGradient) {
    for (const char* variant : {"bam", "bam_ssmax"}) {
        Case c{variant, model_for(variant), documents(true), 2, 9};
        const ParameterTable table = make_parameter_table(c.model);
        std::vector<double> w = reference_weights(c.model, table, 4);
        set_parameters(w, table, "theta_beta", -2.0);
        set_parameters(w, table, "theta_mu", 0.0);
        const ReferenceBatch batch = reference_batch(std::vector<int32_t>(19, c.data.separator_id), 2, 9, c.data);
        const ReferenceOutput out = reference_run(c.model, table, w, batch);
        EXPECT_TRUE(std::isfinite(out.loss));
        for (const Parameter& p : table.all) {
            if (!acts_on_logits(p.name)) continue;
            for (int64_t i = 0; i < p.numel(); ++i)
                EXPECT_EQ(out.grads[size_t(p.offset + i)], 0.0) << variant << " " << p.name;
        }
    }
}

TEST(Reference, ExtremeThetasStayFinite) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (auto [alpha, beta] : kExtremes) {
            Case c{variant, model_for(variant), documents(true), 2, 9};
            const ParameterTable table = make_parameter_table(c.model);
            std::vector<double> w = reference_weights(c.model, table, 4);
            set_parameters(w, table, "theta_alpha", alpha);
            set_parameters(w, table, "theta_beta", beta);
            const ReferenceOutput out = reference_run(c.model, table, w, batch_of(c));
            EXPECT_TRUE(std::isfinite(out.loss)) << variant << alpha << beta;
            for (double g : out.grads) EXPECT_TRUE(std::isfinite(g)) << variant << alpha << beta;
        }
}

// ---- the product ---------------------------------------------------------------------------------------------------

struct Agreement {
    int threads = 1;
    double slack = 1;  // on the gradients: in long rows and wide heads terms of ds_h cancel (1.4 in PyTorch's fp32)
};

// DESIGN §2.5: logits and losses 1e-5, gradients 1e-5 max|g| of the tensor + 1e-7.
void expect_product_agrees(const std::string& name, const ModelConfig& m, const std::vector<double>& weights,
                           const ReferenceBatch& batch, Agreement how = {}) {
    const ParameterTable table = make_parameter_table(m);
    const ReferenceOutput wanted = reference_run(m, table, weights, batch);
    const ProductOutput got = Product(m, as_floats(weights), DType::f32, how.threads).run(batch);
    EXPECT_LE(max_abs_difference(got.logits, as_floats(wanted.logits)), 1e-5) << name;
    EXPECT_LE(max_abs_difference(got.losses, as_floats(wanted.losses)), 1e-5) << name;
    for (const Parameter& p : table.all) {
        if (p.group == ParameterGroup::frozen) continue;
        double worst = 0, largest = 0;
        for (int64_t i = p.offset; i < p.offset + p.numel(); ++i) {
            const double difference = std::fabs(double(got.grads[size_t(i)]) - wanted.grads[size_t(i)]);
            worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
            largest = std::max(largest, std::fabs(wanted.grads[size_t(i)]));
            const bool absent = p.name == "tok_embeddings.weight" && wanted.grads[size_t(i)] == 0;
            EXPECT_TRUE(!absent || got.grads[size_t(i)] == 0) << name << " element " << i;
        }
        EXPECT_LE(worst, how.slack * (1e-5 * largest + 1e-7)) << name << ": " << p.name << ", largest " << largest;
    }
}

void expect_cases_agree(const std::vector<Case>& cases, Agreement how = {}) {
    for (const Case& c : cases) {
        const ParameterTable table = make_parameter_table(c.model);
        expect_product_agrees(c.name, c.model, reference_weights(c.model, table, 1), batch_of(c), how);
    }
}

TEST(ProductGradients, SmallOddShape) {
    expect_cases_agree(all_cases());
}

TEST(ProductGradients, LongerRows) {
    const Shape shape = {.heads = 4, .kv_heads = 2, .head_dim = 12, .ffn = 29, .vocab = 257, .layers = 1, .length = 65};
    expect_cases_agree(few_cases(shape), {.threads = 3});
}

TEST(ProductGradients, WiderHeads) {
    for (const Shape& shape :
         {Shape{.heads = 3, .head_dim = 48, .ffn = 65, .vocab = 33, .layers = 1, .rows = 1, .length = 130},
          Shape{.heads = 2, .head_dim = 17, .ffn = 16, .vocab = 64, .layers = 1, .rows = 3, .length = 64},
          Shape{.heads = 1, .head_dim = 128, .ffn = 3, .vocab = 5, .layers = 1, .rows = 1},
          Shape{.heads = 1, .head_dim = 255, .ffn = 3, .vocab = 5, .layers = 1, .rows = 1}})
        expect_cases_agree(few_cases(shape), {.slack = 3});
}

TEST(ProductGradients, PriorForEveryBeta) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (double beta : kBetas)
            for (double mu : {0.0, -2.0, 0.4}) {  // -2: |d + mu| is 0 at d = 2
                Case c{variant, model_for(variant, {.length = 33}), documents(beta > -2), 2, 33};
                c.model.position.train_mu = true;
                const ParameterTable table = make_parameter_table(c.model);
                std::vector<double> w = reference_weights(c.model, table, 2);
                set_parameters(w, table, "theta_beta", float(beta));
                set_parameters(w, table, "theta_mu", float(std::asinh(mu / 2)));
                expect_product_agrees(c.name + " beta " + std::to_string(beta) + " mu " + std::to_string(mu), c.model,
                                      w, batch_of(c));
            }
}

// s_h < 0 and beta < 0: a query sees next to nothing but itself, where the prior is -1e10, and only exact cancellation
// keeps that out of the gradient. alpha = 60 does the same at beta > 0.
TEST(ProductGradients, ScaleOfEitherSign) {
    for (const std::string& variant : variant_names()) {
        if (!variant.ends_with("_ssmax")) continue;
        for (SsmaxOrder order : {SsmaxOrder::scale_bias, SsmaxOrder::scale_scores})
            for (double s : {-1.0, -0.1, 0.0, 2.0})
                for (auto [alpha, beta] : {std::pair{-0.5, 0.4}, {0.0, -2.0}, {0.0, -9.0}, {60.0, 0.5}}) {
                    Case c{variant, model_for(variant), documents(true), 2, 33};
                    c.model.position.ssmax_order = order;
                    c.model.position.train_mu = true;
                    const ParameterTable table = make_parameter_table(c.model);
                    std::vector<double> w = reference_weights(c.model, table, 2);
                    set_parameters(w, table, "seq_scale", float(s));
                    set_parameters(w, table, "theta_alpha", alpha);
                    set_parameters(w, table, "theta_beta", float(beta));
                    set_parameters(w, table, "theta_mu", 0.0);
                    const std::string name =
                        c.name + " s " + std::to_string(s) + " alpha " + std::to_string(alpha) + " beta ";
                    expect_product_agrees(name + std::to_string(beta), c.model, w, batch_of(c));
                    if (c.model.position.encoding != Encoding::bam) break;
                }
    }
}

TEST(ProductGradients, OneTokenDocumentsGiveThePriorNoGradient) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (int separators : {1, 2, 1000}) {  // every token, every second, none but the row's first query
            Case c{variant, model_for(variant), documents(true), 2, 33};
            c.model.position.train_mu = true;
            const ParameterTable table = make_parameter_table(c.model);
            std::vector<double> w = reference_weights(c.model, table, 4);
            set_parameters(w, table, "theta_beta", -2.0);
            set_parameters(w, table, "theta_mu", 0.0);
            const ReferenceBatch batch = reference_batch(random_tokens(67, 11, 9, 2, separators), 2, 33, c.data);
            expect_product_agrees(c.name, c.model, w, batch);
            if (separators > 1) continue;
            const ProductOutput out = Product(c.model, as_floats(w)).run(batch);
            for (const Parameter& p : table.all) {
                if (!acts_on_logits(p.name)) continue;
                for (int64_t i = 0; i < p.numel(); ++i)
                    EXPECT_EQ(out.grads[size_t(p.offset + i)], 0.0f) << variant << " " << p.name;
            }
        }
}

TEST(ProductGradients, ExtremeThetasStayFinite) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (DType dtype : {DType::f32, DType::bf16})
            for (auto [alpha, beta] : kExtremes)
                for (double s : {1.0, -1.0, 0.0}) {
                    Case c{variant, model_for(variant), documents(true), 2, 33};
                    c.model.position.train_mu = true;
                    const ParameterTable table = make_parameter_table(c.model);
                    std::vector<double> w = reference_weights(c.model, table, 4);
                    set_parameters(w, table, "theta_alpha", alpha);
                    set_parameters(w, table, "theta_beta", beta);
                    set_parameters(w, table, "theta_mu", 0.0);
                    set_parameters(w, table, "seq_scale", s);
                    const ProductOutput out = Product(c.model, as_floats(w), dtype).run(batch_of(c));
                    EXPECT_TRUE(std::isfinite(max_abs(out.logits)))
                        << variant << " " << alpha << " " << beta << " " << s;
                    EXPECT_TRUE(std::isfinite(max_abs(out.grads)))
                        << variant << " " << alpha << " " << beta << " " << s;
                }
}

}  // namespace
}  // namespace bam::test
