// What may not matter, does not: where a document stands in its row, what other documents hold, how rows are cut into
// micro-batches, what the forward pass keeps, which encoding shares the initial weights.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "cases.h"
#include "loader.h"
#include "product.h"
#include "test_support.h"

namespace bam::test {
namespace {

constexpr int kEnd = 2;  // the separator of documents()

std::vector<int32_t> document(int length, int vocab, uint64_t seed) {
    std::vector<int32_t> ids = random_tokens(length, vocab, seed, kEnd, 1 << 30);  // no separator inside
    ids.back() = kEnd;
    return ids;
}

std::vector<int32_t> joined(std::initializer_list<std::vector<int32_t>> parts) {
    std::vector<int32_t> all;
    for (const auto& p : parts) all.insert(all.end(), p.begin(), p.end());
    return all;
}

std::vector<float> weights_of(const ModelConfig& m, uint64_t seed = 1) {
    const ParameterTable table = make_parameter_table(m);
    return as_floats(reference_weights(m, table, seed));
}

// Rows of logits [begin, begin + count).
std::vector<float> rows_of(const std::vector<float>& logits, int vocab, int begin, int count) {
    return {logits.begin() + int64_t(begin) * vocab, logits.begin() + int64_t(begin + count) * vocab};
}

const Shape kShape = {.heads = 4, .kv_heads = 2, .head_dim = 6, .ffn = 13, .vocab = 51, .layers = 2};

TEST(Invariance, IdenticalDocumentsScoreAlike) {
    const std::vector<int32_t> text = document(23, kShape.vocab, 3), between = document(14, kShape.vocab, 4);
    const std::vector<int32_t> stream = joined({text, between, text, text, {5}});
    for (const Case& c : few_cases(kShape)) {
        Product p(c.model, weights_of(c.model));
        const std::vector<float> z =
            p.logits(reference_batch(stream, 1, int(stream.size()) - 1, documents(true, true)));
        const std::vector<float> first = rows_of(z, kShape.vocab, 0, 23);
        EXPECT_LE(max_abs_difference(rows_of(z, kShape.vocab, 37, 23), first), 1e-5) << c.name;
        EXPECT_LE(max_abs_difference(rows_of(z, kShape.vocab, 60, 23), first), 1e-5) << c.name;
        EXPECT_GT(max_abs(first), 0.1) << c.name;
    }
}

TEST(Invariance, OtherDocumentsDoNotMatterToTheBit) {
    const int T = 140;
    for (const Case& c : few_cases(kShape))
        for (DType dtype : {DType::f32, DType::bf16}) {
            Product p(c.model, weights_of(c.model), dtype);
            for (int first : {1, 7, 64, 70}) {
                const std::vector<int32_t> tail =
                    joined({document(9, kShape.vocab, 5), document(T + 1 - 9 - first, kShape.vocab, 6)});
                std::vector<float> z[2];
                for (int i : {0, 1}) {
                    const std::vector<int32_t> stream = joined({document(first, kShape.vocab, uint64_t(10 + i)), tail});
                    z[i] = rows_of(p.logits(reference_batch(stream, 1, T, documents(true, true))), kShape.vocab, first,
                                   T - first);
                }
                EXPECT_EQ(z[0], z[1]) << c.name << " " << name_of(dtype) << " after " << first;
            }
        }
}

TEST(Invariance, LaterTokensDoNotMatterToTheBit) {
    for (const Case& c : few_cases(kShape)) {
        Product p(c.model, weights_of(c.model));
        std::vector<std::vector<float>> z;
        for (uint64_t seed : {10, 11}) {
            const std::vector<int32_t> stream =
                joined({random_tokens(70, kShape.vocab, 1), random_tokens(31, kShape.vocab, seed)});
            z.push_back(rows_of(p.logits(reference_batch(stream, 1, 100, documents(false))), kShape.vocab, 0, 70));
        }
        EXPECT_EQ(z[0], z[1]) << c.name;
    }
}

void expect_same_gradients(const ParameterTable& table, const std::vector<float>& got, const std::vector<float>& wanted,
                           const std::string& name, double relative = 1e-5) {
    for (const Parameter& p : table.all) {
        if (p.group == ParameterGroup::frozen) continue;
        const std::vector<float> a(got.begin() + p.offset, got.begin() + p.offset + p.numel());
        const std::vector<float> b(wanted.begin() + p.offset, wanted.begin() + p.offset + p.numel());
        EXPECT_LE(max_abs_difference(a, b), relative * max_abs(b) + 1e-9) << name << ": " << p.name;
    }
}

TEST(Invariance, MicroBatchesGiveOneGradient) {
    Shape shape = kShape;
    shape.rows = 8, shape.length = 21;
    for (const Case& c : few_cases(shape)) {
        Product p(c.model, weights_of(c.model));
        const ReferenceBatch batch = batch_of(c);
        const ProductOutput whole = p.run(batch, 8);
        for (int rows : {1, 2, 3}) {
            const ProductOutput parts = p.run(batch, rows);
            EXPECT_NEAR(parts.loss(), whole.loss(), 1e-5);
            expect_same_gradients(p.model().table(), parts.grads, whole.grads, c.name + " by " + std::to_string(rows));
        }
    }
}

// To the bit but for a norm's statistics, which are summed in another order without the residual.
TEST(Invariance, RecomputedActivationsGiveTheSameGradient) {
    for (const Case& c : few_cases(kShape))
        for (DType dtype : {DType::f32, DType::bf16}) {
            Product p(c.model, weights_of(c.model), dtype);
            const ProductOutput kept = p.run(batch_of(c), 0, Keep::all);
            for (Keep keep : {Keep::no_attention, Keep::inputs}) {
                const ProductOutput made_again = p.run(batch_of(c), 0, keep);
                EXPECT_EQ(made_again.losses, kept.losses) << c.name << " " << name_of(dtype);
                expect_same_gradients(p.model().table(), made_again.grads, kept.grads, c.name,
                                      dtype == DType::f32 ? 1e-6 : 1e-2);
            }
        }
}

TEST(Invariance, RunsRepeatToTheBit) {
    Shape shape = kShape;
    shape.length = 100;
    for (const Case& c : few_cases(shape))
        for (DType dtype : {DType::f32, DType::bf16}) {
            if (c.name != "bam_ssmax, many options") continue;
            Product p(c.model, weights_of(c.model), dtype, 2), q(c.model, weights_of(c.model), dtype, 2);
            const ProductOutput a = p.run(batch_of(c)), b = p.run(batch_of(c)), other = q.run(batch_of(c));
            EXPECT_EQ(a.losses, b.losses) << c.name << " " << name_of(dtype);
            EXPECT_EQ(a.grads, b.grads) << c.name << " " << name_of(dtype);
            EXPECT_EQ(a.grads, other.grads) << c.name << " " << name_of(dtype);
        }
}

// Gradients in bf16 point where those in fp32 do.
TEST(Invariance, Bf16FollowsFp32) {
    Shape shape = kShape;
    shape.rows = 4, shape.length = 65;
    for (const Case& c : few_cases(shape)) {
        const std::vector<float> w = weights_of(c.model);
        Product exact(c.model, w), low(c.model, w, DType::bf16);
        const ProductOutput a = exact.run(batch_of(c)), b = low.run(batch_of(c));
        EXPECT_NEAR(a.loss(), b.loss(), 0.01 * a.loss()) << c.name;
        double aa = 0, dd = 0;
        for (size_t i = 0; i < a.grads.size(); ++i) {
            aa += double(a.grads[i]) * a.grads[i];
            dd += std::pow(double(a.grads[i]) - b.grads[i], 2);
        }
        EXPECT_LE(std::sqrt(dd / aa), 0.03) << c.name;
    }
}

// A prompt read in pieces through a cache gives the logits of the whole.
TEST(Invariance, CachedChunksScoreLikeTheWhole) {
    for (const Case& c : few_cases(kShape)) {
        const int T = 40;
        const ReferenceBatch whole = reference_batch(random_tokens(T + 1, kShape.vocab, 3, kEnd, 17), 1, T, c.data);
        Product p(c.model, weights_of(c.model));
        const std::vector<float> wanted = p.logits(whole);
        for (int chunk : {1, 7, 40}) {
            KvCache cache = p.model().make_cache(1, T + 3);
            for (int begin = 0; begin < T; begin += chunk) {
                const int n = std::min(chunk, T - begin);
                Batch b;
                b.B = 1, b.T = n, b.offset = {begin};
                b.ids.assign(whole.ids.begin() + begin, whole.ids.begin() + begin + n);
                b.key_begin.assign(whole.first.begin() + begin, whole.first.begin() + begin + n);
                b.positions.assign(whole.position.begin() + begin, whole.position.begin() + begin + n);
                p.model().forward(b, &cache);
                std::vector<float> z(size_t(n * kShape.vocab));
                p.model().logits(0, n, z.data());
                EXPECT_LE(max_abs_difference(z, rows_of(wanted, kShape.vocab, begin, n)), 1e-5)
                    << c.name << " chunks of " << chunk;
            }
        }
    }
}

// ---- initial weights -----------------------------------------------------------------------------------------------

std::map<std::string, std::vector<float>> initial_weights(const ModelConfig& m, uint64_t seed) {
    const ParameterTable table = make_parameter_table(m);
    std::vector<float> w(size_t(table.total), NAN);
    init_weights(table, m, seed, w.data());
    std::map<std::string, std::vector<float>> by_name;
    for (const Parameter& p : table.all) by_name[p.name] = {w.begin() + p.offset, w.begin() + p.offset + p.numel()};
    return by_name;
}

TEST(InitialWeights, AreTheSameForEveryEncoding) {
    for (const char* init : {"pytorch", "gpt2"}) {
        ModelConfig first = model_for("nope", kShape);
        first.init = init;
        const auto shared = initial_weights(first, 7);
        for (const std::string& variant : variant_names())
            for (bool global : {false, true}) {
                ModelConfig m = model_for(variant, kShape);
                m.init = init;
                m.position.bam_global = global;
                m.position.train_mu = global;
                const auto w = initial_weights(m, 7);
                for (const auto& [name, values] : shared) EXPECT_EQ(w.at(name), values) << variant << " " << name;
                for (const auto& [name, values] : w)
                    EXPECT_TRUE(std::isfinite(max_abs(values))) << variant << " " << name;
            }
        EXPECT_NE(initial_weights(first, 8).at("output.weight"), shared.at("output.weight"));
        EXPECT_NE(shared.at("layers.0.feed_forward.w1.weight"), shared.at("layers.0.feed_forward.w3.weight"));
        EXPECT_NE(shared.at("layers.0.attention.wq.weight"), shared.at("layers.1.attention.wq.weight"));
    }
}

struct Moments {
    double mean = 0, deviation = 0, largest = 0;
};
Moments moments(const std::vector<float>& x) {
    Moments m;
    for (float v : x) m.mean += v / double(x.size());
    for (float v : x) m.deviation += (v - m.mean) * (v - m.mean) / double(x.size());
    m.deviation = std::sqrt(m.deviation);
    m.largest = max_abs(x);
    return m;
}

// DESIGN §2.1: uniform +-1/sqrt(fan_in) has deviation bound/sqrt(3).
TEST(InitialWeights, HaveTheDistributionsOfTheDesign) {
    ModelConfig m =
        model_for("bam_ssmax", {.heads = 4, .kv_heads = 4, .head_dim = 25, .ffn = 200, .vocab = 300, .layers = 2});
    const auto pytorch = initial_weights(m, 3);
    m.init = "gpt2";
    const auto gpt2 = initial_weights(m, 3);
    for (const auto& [name, values] : pytorch) {
        const Moments p = moments(values), g = moments(gpt2.at(name));
        if (name.ends_with("norm.weight") || name.ends_with("seq_scale")) {
            EXPECT_TRUE(values == std::vector<float>(values.size(), 1.0f) && gpt2.at(name) == values) << name;
        } else if (name.find("theta_") != std::string::npos) {
            EXPECT_EQ(p.largest, 0.0) << name;
        } else {
            const double fan_in = name.ends_with("w2.weight") ? 200 : 100;
            const bool embedding = name == "tok_embeddings.weight";
            EXPECT_NEAR(p.deviation, embedding ? 1 : 1 / std::sqrt(3 * fan_in), 0.03 * p.deviation) << name;
            EXPECT_NEAR(p.mean, 0, 4 * p.deviation / 100) << name;
            EXPECT_LE(p.largest, embedding ? 6.0f : float(1 / std::sqrt(fan_in))) << name;
            const bool residual = name.ends_with("wo.weight") || name.ends_with("w2.weight");
            EXPECT_NEAR(g.deviation, residual ? 0.01 : 0.02, 0.03 * g.deviation) << name;
        }
    }
    m.init = "pytorch";
    m.tie_embeddings = true;  // initialised as the output matrix would be
    EXPECT_LE(moments(initial_weights(m, 3).at("tok_embeddings.weight")).largest, 0.1001);
}

// ---- documents -----------------------------------------------------------------------------------------------------

TEST(Documents, AreFoundAsTheReferenceFindsThem) {
    for (bool mask : {false, true})
        for (bool by_document : {false, true})
            for (bool at_end : {false, true})
                for (int every : {1, 2, 5, 1 << 30})
                    for (int T : {1, 2, 29}) {
                        const DataConfig d = documents(mask, by_document, at_end);
                        const std::vector<int32_t> stream = random_tokens(T + 1, 9, uint64_t(every), kEnd, every);
                        const ReferenceBatch wanted = reference_batch(stream, 1, T, d);
                        std::vector<int32_t> first(static_cast<size_t>(T)), position(static_cast<size_t>(T));
                        find_documents(stream.data(), T, d, first.data(), position.data());
                        EXPECT_EQ(first, wanted.first);
                        EXPECT_EQ(position, wanted.position);
                    }
}

}  // namespace
}  // namespace bam::test
