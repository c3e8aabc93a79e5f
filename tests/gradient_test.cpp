// Gradients: the double-precision reference against central differences of its own loss, for every variant, option and
// parameter.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "random.h"
#include "reference_model.h"
#include "test_support.h"

namespace bam::test {
namespace {

struct Case {
    std::string name;
    ModelConfig model;
    DataConfig data;
    int B = 2, T = 9;
};

ModelConfig small_model(const std::string& variant) {
    ModelConfig m;
    apply_variant(m.position, variant);
    m.n_layers = 2;
    m.n_heads = m.n_kv_heads = 3;
    m.dim = m.position.encoding == Encoding::rope ? 18 : 15;  // D 6 or 5
    m.ffn_hidden = 7;
    m.vocab_size = 11;
    return m;
}

DataConfig documents(bool mask, bool by_document = true, bool separator_at_end = true) {
    DataConfig d;
    d.has_separator = true;
    d.separator_id = 2;
    d.separator_at_end = separator_at_end;
    d.document_mask = mask;
    d.positions_by_document = by_document;
    return d;
}

// Every variant as it is, and with each option that it has.
std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (const std::string& variant : variant_names()) {
        auto add = [&](const char* option, auto change) {
            Case c{variant + " " + option, small_model(variant), documents(false)};
            change(c);
            cases.push_back(c);
        };
        add("plain", [](Case&) {});
        add("gqa", [](Case& c) { c.model.n_kv_heads = 1; });
        add("tied", [](Case& c) { c.model.tie_embeddings = true; });
        add("documents", [](Case& c) { c.data = documents(true); });
        add("documents, positions by row", [](Case& c) { c.data = documents(true, false); });
        add("documents, separator at start", [](Case& c) { c.data = documents(true, true, false); });
        add("gqa tied documents", [](Case& c) {
            c.model.n_kv_heads = 1;
            c.model.tie_embeddings = true;
            c.data = documents(true);
        });
        add("one token", [](Case& c) { c.T = 1; });
        const PositionConfig p = small_model(variant).position;
        if (p.ssmax) {
            add("scale_bias", [](Case& c) { c.model.position.ssmax_order = SsmaxOrder::scale_bias; });
            add("scale_scores", [](Case& c) { c.model.position.ssmax_order = SsmaxOrder::scale_scores; });
            add("scale_scores documents", [](Case& c) {
                c.model.position.ssmax_order = SsmaxOrder::scale_scores;
                c.data = documents(true);
            });
        }
        if (p.encoding == Encoding::bam) {
            add("global", [](Case& c) { c.model.position.bam_global = true; });
            add("train mu", [](Case& c) { c.model.position.train_mu = true; });
            add("global, mu, scale_scores, gqa, documents", [](Case& c) {
                c.model.position.bam_global = c.model.position.train_mu = true;
                c.model.position.ssmax_order = SsmaxOrder::scale_scores;
                c.model.n_kv_heads = 1;
                c.data = documents(true);
            });
        }
        if (p.encoding == Encoding::rope) add("half", [](Case& c) { c.model.position.rope_layout = RopeLayout::half; });
        if (p.encoding == Encoding::sinusoidal)
            add("variant bam", [](Case& c) { c.model.position.sinusoidal_variant = SinusoidalVariant::bam; });
    }
    return cases;
}

ReferenceBatch batch_of(const Case& c) {
    return reference_batch(random_tokens(c.B * c.T + 1, c.model.vocab_size, 5, 2, 4), c.B, c.T, c.data);
}

void set_thetas(std::vector<double>& w, const ParameterTable& table, const char* which, double value) {
    for (const Parameter& p : table.all)
        if (p.name.ends_with(which)) std::fill_n(w.begin() + p.offset, p.numel(), value);
}

struct Differences {
    double step = 1e-4, relative = 1e-7, absolute = 1e-10;
    std::string only = "";     // names that contain this
    std::string without = "";  // but not those with this
};

// The derivative along one random direction in every tensor: wrong in any element, it is wrong.
void expect_central_differences(const std::string& name, const ModelConfig& m, std::vector<double> w, const ReferenceBatch& batch,
                                const Differences& how = {}) {
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
                for (size_t i = 0; i < direction.size(); ++i) w[size_t(p.offset) + i] = w0[size_t(p.offset) + i] + x * direction[i];
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

constexpr double kBetas[] = {-3.0, -2.0, -1.0, -0.3, -0.1, 0.0, 0.5, 1.0, 2.0};

// The prior's singular point is d = 0 itself; theta_mu has a kink there.
TEST(Reference, GradientsAtDistanceZeroForEveryBeta) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (double beta : kBetas) {
            Case c{variant, small_model(variant), documents(beta != 0.5)};
            const ParameterTable table = make_parameter_table(c.model);
            std::vector<double> w = reference_weights(c.model, table, 2);
            set_thetas(w, table, "theta_beta", beta);
            set_thetas(w, table, "theta_mu", 0.0);
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
                Case c{variant, small_model(variant), documents(false)};
                c.model.position.train_mu = true;
                const ParameterTable table = make_parameter_table(c.model);
                std::vector<double> w = reference_weights(c.model, table, 2);
                set_thetas(w, table, "theta_beta", beta);
                set_thetas(w, table, "theta_mu", std::asinh(mu / 2));
                const std::string name = c.name + " beta " + std::to_string(beta) + " mu " + std::to_string(mu);
                expect_central_differences(name, c.model, w, batch_of(c), {.step = 2e-5, .only = "theta"});
            }
}

// |d + mu| = 0 at d = 2: beta 3 makes the kink smooth enough for differences.
TEST(Reference, GradientsWhereMuCancelsTheDistance) {
    for (const char* variant : {"bam", "bam_ssmax"}) {
        Case c{variant, small_model(variant), documents(false)};
        c.model.position.train_mu = true;
        const ParameterTable table = make_parameter_table(c.model);
        std::vector<double> w = reference_weights(c.model, table, 3);
        set_thetas(w, table, "theta_beta", 3.0);
        set_thetas(w, table, "theta_mu", std::asinh(-1.0));
        expect_central_differences(c.name, c.model, w, batch_of(c));
    }
}

// DESIGN §2.2: a query that sees one key contributes exactly zero, although the prior is -1e10 there.
TEST(Reference, OneTokenDocumentsGiveThePriorNoGradient) {
    for (const char* variant : {"bam", "bam_ssmax"}) {
        Case c{variant, small_model(variant), documents(true)};
        const ParameterTable table = make_parameter_table(c.model);
        std::vector<double> w = reference_weights(c.model, table, 4);
        set_thetas(w, table, "theta_beta", -2.0);
        set_thetas(w, table, "theta_mu", 0.0);
        const ReferenceBatch batch = reference_batch(std::vector<int32_t>(size_t(c.B * c.T + 1), c.data.separator_id), c.B, c.T, c.data);
        const ReferenceOutput out = reference_run(c.model, table, w, batch);
        EXPECT_TRUE(std::isfinite(out.loss));
        for (const Parameter& p : table.all) {
            const bool logits_only = p.name.find("theta") != std::string::npos || p.name.find("seq_scale") != std::string::npos ||
                                     p.name.find(".wq.") != std::string::npos || p.name.find(".wk.") != std::string::npos;
            if (!logits_only) continue;
            for (int64_t i = 0; i < p.numel(); ++i) EXPECT_EQ(out.grads[size_t(p.offset + i)], 0.0) << variant << " " << p.name;
        }
    }
}

TEST(Reference, ExtremeThetasStayFinite) {
    for (const char* variant : {"bam", "bam_ssmax"})
        for (auto [alpha, beta] : {std::pair{0.0, -9.0}, {60.0, 0.5}, {60.0, -9.0}, {-60.0, 3.0}}) {
            Case c{variant, small_model(variant), documents(true)};
            const ParameterTable table = make_parameter_table(c.model);
            std::vector<double> w = reference_weights(c.model, table, 4);
            set_thetas(w, table, "theta_alpha", alpha);
            set_thetas(w, table, "theta_beta", beta);
            const ReferenceOutput out = reference_run(c.model, table, w, batch_of(c));
            EXPECT_TRUE(std::isfinite(out.loss)) << variant << alpha << beta;
            for (double g : out.grads) EXPECT_TRUE(std::isfinite(g)) << variant << alpha << beta;
        }
}

}  // namespace
}  // namespace bam::test
