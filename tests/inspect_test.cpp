#include "eval/inspect.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "check.h"
#include "reference_model.h"
#include "subjects.h"
#include "test_support.h"

namespace bam {
namespace {

ModelConfig small_model(const std::string& variant, int layers) {
    ModelConfig m;
    m.dim = 32, m.n_layers = layers, m.n_heads = 4, m.n_kv_heads = 2, m.ffn_hidden = 24, m.vocab_size = 51;
    apply_variant(m.position, variant);
    m.position.init_alpha.values = {-1}, m.position.init_beta.values = {-0.5, 1.1};
    return m;
}

std::vector<float> weights_of(const ModelConfig& m, const ParameterTable& t) {
    const std::vector<double> w = test::reference_weights(m, t, 5);
    return {w.begin(), w.end()};
}

std::vector<int> ids_of(int64_t n) {
    const std::vector<int32_t> ids = test::random_tokens(n, 51, 7);
    return {ids.begin(), ids.end()};
}

// With wq = 0 the scores are 0 and the prior alone decides: softmax(c bias) in closed form, in every layer.
TEST(Inspect, PriorAloneDecidesWhenQueriesAreZero) {
    const auto device = test::make_test_backend(1);
    constexpr int n = 37;
    for (const std::string variant : {"nope", "nope_ssmax", "alibi", "alibi_ssmax", "bam", "bam_ssmax"}) {
        const ModelConfig m = small_model(variant, 2);
        Model model(*device, m, DType::f32);
        std::vector<float> w = weights_of(m, model.table());
        for (int l = 0; l < 2; ++l) {
            const Parameter& q = model.table().at("layers." + std::to_string(l) + ".attention.wq.weight");
            std::fill_n(w.begin() + q.offset, q.numel(), 0.0f);
        }
        model.fill_weights([&](float* values) { std::ranges::copy(w, values); });
        const auto attention = last_token_attention(model, ids_of(n), {{3, 5}, {n - 1, n}}, 10);
        for (int l = 0; l < 2; ++l)
            for (int h = 0; h < 4; ++h) {
                const auto value = [&](const std::string& name) {
                    return double(w[size_t(model.table().at("layers." + std::to_string(l) + ".attention." + name).offset + h)]);
                };
                double c = 1, sum = 0, entropy = 0, marked = 0;
                if (m.position.ssmax && variant != "alibi_ssmax") c = value("seq_scale") * std::log(double(n));
                std::vector<double> p;
                for (int d = 0; d < n; ++d) {
                    double bias = 0;
                    if (m.position.encoding == Encoding::alibi) bias = -std::pow(2.0, -2.0 * (h + 1)) * d;
                    if (m.position.encoding == Encoding::bam) {
                        const double mu = 2 * std::sinh(value("prior.theta_mu"));
                        bias = -std::exp(value("prior.theta_alpha")) * std::pow(std::fabs(d + mu) + 1e-5, value("prior.theta_beta"));
                    }
                    p.push_back(std::exp(c * bias));
                    sum += p.back();
                }
                for (double& x : p) x /= sum, entropy -= x * std::log(x);
                marked = p[size_t(n - 1 - 3)] + p[size_t(n - 1 - 4)] + p[0];
                const HeadAttention& a = attention[size_t(l)][size_t(h)];
                EXPECT_NEAR(a.entropy, entropy, 1e-5) << variant << l << h;
                EXPECT_NEAR(a.span_mass, marked, 1e-6) << variant << l << h;
                ASSERT_EQ(a.by_distance.size(), 7u);  // 0, 1, 2-3, 4-7, 8-15, 16-31, 32-36
                EXPECT_EQ(a.by_distance[6].from, 32);
                EXPECT_EQ(a.by_distance[6].to, 37);
                EXPECT_NEAR(a.by_distance[2].mass, p[2] + p[3], 1e-6);
                double half = 0;
                int64_t d = 0;
                while ((half += p[size_t(d)]) < 0.5) ++d;
                EXPECT_EQ(a.distance_50, d) << variant << l << h;
                // The prior read from the weights says the same.
                if (m.position.encoding == Encoding::nope) continue;
                EXPECT_EQ(head_prior(m, model.table(), w.data(), l, h, n).distance_50, d) << variant << l << h;
            }
    }
}

// One layer by hand in double: embedding, norm, q and k, rotation, softmax; grouped heads share keys.
TEST(Inspect, AttentionAgreesWithPlainLoops) {
    const auto device = test::make_test_backend(1);
    constexpr int n = 29, C = 32, D = 8;
    const std::vector<int> ids = ids_of(n);
    for (const std::string variant : {"rope_ssmax", "nope", "bam_ssmax", "alibi_ssmax"}) {
        const ModelConfig m = small_model(variant, 1);
        Model model(*device, m, DType::f32);
        const std::vector<float> w = weights_of(m, model.table());
        model.fill_weights([&](float* values) { std::ranges::copy(w, values); });
        const auto at = [&](const std::string& name) { return w.data() + model.table().at(name).offset; };
        const float *E = at("tok_embeddings.weight"), *norm = at("layers.0.attention_norm.weight");
        const auto projected = [&](int token, const float* matrix, int head) {  // D values, rotated
            std::vector<double> x(C), y(D, 0.0);
            double squares = 0;
            for (int c = 0; c < C; ++c) x[size_t(c)] = E[ids[size_t(token)] * C + c], squares += x[size_t(c)] * x[size_t(c)];
            for (int i = 0; i < D; ++i)
                for (int c = 0; c < C; ++c)
                    y[size_t(i)] += double(matrix[(head * D + i) * C + c]) * norm[c] * x[size_t(c)] / std::sqrt(squares / C + 1e-5);
            if (m.position.encoding != Encoding::rope) return y;
            for (int i = 0; i < D; i += 2) {
                const double angle = token * std::pow(500000.0, -double(i) / D), a = y[size_t(i)], b = y[size_t(i) + 1];
                y[size_t(i)] = a * std::cos(angle) - b * std::sin(angle);
                y[size_t(i) + 1] = a * std::sin(angle) + b * std::cos(angle);
            }
            return y;
        };
        const auto attention = last_token_attention(model, ids, {{10, 13}}, 7);
        for (int h = 0; h < 4; ++h) {
            const std::vector<double> q = projected(n - 1, at("layers.0.attention.wq.weight"), h);
            const double c = m.position.ssmax ? at("layers.0.attention.seq_scale")[h] * std::log(double(n)) : 1.0;
            double sum = 0, entropy = 0, span = 0;
            std::vector<double> p;
            for (int j = 0; j < n; ++j) {
                const std::vector<double> k = projected(j, at("layers.0.attention.wk.weight"), h / 2);
                double score = 0, bias = 0;
                for (int i = 0; i < D; ++i) score += q[size_t(i)] * k[size_t(i)] / std::sqrt(double(D));
                const int d = n - 1 - j;
                if (m.position.encoding == Encoding::bam) {
                    const auto theta = [&](const char* name) { return double(at(std::string("layers.0.attention.prior.theta_") + name)[h]); };
                    bias = -std::exp(theta("alpha")) * std::pow(std::fabs(d + 2 * std::sinh(theta("mu"))) + 1e-5, theta("beta"));
                }
                if (m.position.encoding == Encoding::alibi) bias = -std::pow(2.0, -2.0 * (h + 1)) * d;
                p.push_back(std::exp(variant == "alibi_ssmax" ? c * score + bias : c * (score + bias)));
                sum += p.back();
            }
            for (int j = 0; j < n; ++j) {
                const double x = p[size_t(j)] / sum;
                entropy -= x * std::log(x);
                if (j >= 10 && j < 13) span += x;
            }
            EXPECT_NEAR(attention[0][size_t(h)].entropy, entropy, 2e-5) << variant << h;
            EXPECT_NEAR(attention[0][size_t(h)].span_mass, span, 1e-5) << variant << h;
        }
    }
}

TEST(Inspect, ClassesFollowTheShape) {
    const ModelConfig m = small_model("bam", 1);
    const ParameterTable t = make_parameter_table(m);
    std::vector<float> w = weights_of(m, t);
    float* beta = w.data() + t.at("layers.0.attention.prior.theta_beta").offset;
    const float betas[] = {-0.5f, 0.0f, 0.5f, 1.0f};
    std::copy(betas, betas + 4, beta);
    const char* classes[] = {"far-looking", "far-looking", "heavy-tailed", "local"};
    for (int h = 0; h < 4; ++h) EXPECT_EQ(head_prior(m, t, w.data(), 0, h, 100).shape, classes[h]);
    EXPECT_EQ(head_prior(small_model("alibi", 1), make_parameter_table(small_model("alibi", 1)), w.data(), 0, 1, 9).slope, 0.0625);
    const HeadPrior flat = head_prior(m, t, w.data(), 0, 1, 100);  // constant: half of the keys hold half of the mass
    EXPECT_EQ(flat.distance_50, 49);
    EXPECT_EQ(flat.distance_90, 89);
    EXPECT_EQ(flat.bias.size(), 8u);  // 0, 1, 2, 4, ... 64
    EXPECT_EQ(flat.bias.back().first, 64);
}

TEST(Inspect, SpansAreTokensOfTheText) {
    const auto tokenizer = make_byte_tokenizer();
    EXPECT_EQ(find_spans(*tokenizer, "a key, a key", "key"), (std::vector<TokenSpan>{{2, 5}, {9, 12}}));
    EXPECT_THROW(find_spans(*tokenizer, "abc", "x"), Error);
}

}  // namespace
}  // namespace bam
