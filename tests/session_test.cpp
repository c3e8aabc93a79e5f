#include "eval/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "batches.h"
#include "check.h"
#include "eval/generate.h"
#include "reference_model.h"
#include "subjects.h"
#include "test_support.h"

namespace bam {
namespace {

constexpr int kSeparator = 5;

ModelConfig small_model(const std::string& variant, int kv_heads) {
    ModelConfig m;
    m.dim = 36, m.n_layers = 2, m.n_heads = 6, m.n_kv_heads = kv_heads, m.ffn_hidden = 40, m.vocab_size = 51;
    apply_variant(m.position, variant);
    m.position.init_alpha.values = {-1}, m.position.init_beta.values = {-0.5, 1};
    return m;
}

std::unique_ptr<Model> make_model(Backend& device, const ModelConfig& m, DType compute = DType::f32) {
    auto model = std::make_unique<Model>(device, m, compute);
    const std::vector<double> w = test::reference_weights(m, model->table(), 3);
    const std::vector<float> weights(w.begin(), w.end());
    model->fill_weights([&](float* values) { std::ranges::copy(weights, values); });
    return model;
}

DataConfig documents(bool at_end) {
    DataConfig d;
    d.has_separator = true, d.separator_id = kSeparator, d.separator_at_end = at_end;
    return d;
}

// Logits (T, V) of the training forward pass over one row.
std::vector<float> whole_row(Model& model, const std::vector<int>& ids, DataConfig d, bool mask) {
    const int T = int(ids.size());
    d.document_mask = mask;
    std::vector<int32_t> row(ids.begin(), ids.end());
    row.push_back(0);
    model.reserve(1, T, Keep::all);
    model.forward(make_batch(row, 1, T, d));
    std::vector<float> logits(size_t(T) * size_t(model.config().vocab_size));
    model.logits(0, T, logits.data());
    return logits;
}

struct Collected {
    std::vector<std::vector<float>> rows;
    LogitsSink sink(int V) {
        return [this, V](int r, int64_t, const float* logits) { rows[size_t(r)].insert(rows[size_t(r)].end(), logits, logits + V); };
    }
};

std::vector<std::vector<float>> read_all(Session& session, const std::vector<std::vector<int>>& rows) {
    Collected c;
    c.rows.resize(rows.size());
    std::vector<RowPart> parts;
    size_t longest = 0;
    for (const auto& ids : rows) parts.push_back({ids, 0}), longest = std::max(longest, ids.size());
    session.start(int(rows.size()), int64_t(longest));
    session.feed(parts, c.sink(session.vocab_size()));
    return c.rows;
}

std::vector<int> ids_of(int64_t n, uint64_t seed) {
    const std::vector<int32_t> ids = test::random_tokens(n, 51, seed, kSeparator, 20);
    return {ids.begin(), ids.end()};
}

class SessionOfVariant : public testing::TestWithParam<std::string> {};

TEST_P(SessionOfVariant, ChunksGiveTheTrainingForward) {
    const auto device = test::make_test_backend(1);
    const std::vector<int> ids = ids_of(150, 1);
    int kv = 6;
    for (const bool mask : {false, true}) {
        for (const bool at_end : {true, false}) {
            kv = kv == 6 ? 2 : 6;
            const auto model = make_model(*device, small_model(GetParam(), kv));
            const std::vector<float> expected = whole_row(*model, ids, documents(at_end), mask);
            for (const int chunk : {1, 7, 64, 512}) {
                SessionOptions o;
                o.chunk = chunk, o.document_mask = mask, o.data = documents(at_end);
                Session session(*model, o);
                EXPECT_LT(test::max_abs_difference(read_all(session, {ids})[0], expected), 1e-5)
                    << "chunk " << chunk << " mask " << mask << " at_end " << at_end;
            }
        }
    }
}

TEST_P(SessionOfVariant, RowsOfUnequalLengthGiveTheirOwnLogits) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model(GetParam(), 3));
    const std::vector<std::vector<int>> rows = {ids_of(40, 1), ids_of(1, 2), ids_of(97, 3), {}};
    for (const int chunk : {4, 36, 512}) {
        SessionOptions o;
        o.chunk = chunk, o.document_mask = true, o.data = documents(true);
        Session session(*model, o);
        const auto logits = read_all(session, rows);
        for (size_t r = 0; r < 3; ++r)
            EXPECT_LT(test::max_abs_difference(logits[r], whole_row(*model, rows[r], documents(true), true)), 1e-5) << r;
        EXPECT_TRUE(logits[3].empty());
    }
}

// Three rows read in parts of different sizes, row 1 last: logits at the wanted tokens only, and the same.
TEST_P(SessionOfVariant, PartsContinueRows) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model(GetParam(), 6));
    const std::vector<std::vector<int>> rows = {ids_of(60, 1), ids_of(60, 2)};
    SessionOptions o;
    o.chunk = 16, o.document_mask = true, o.data = documents(false);
    Session session(*model, o);
    Collected c;
    c.rows.resize(2);
    const auto sink = c.sink(51);
    const auto part = [](const std::vector<int>& ids, int from, int to, int64_t wanted) {
        return RowPart{{ids.begin() + from, ids.begin() + to}, wanted};
    };
    session.start(2, 60);
    session.feed({part(rows[0], 0, 50, 49), {}}, sink);
    session.feed({part(rows[0], 50, 58, 3), part(rows[1], 0, 41, 40)}, sink);
    for (int t = 41; t < 60; ++t) session.feed({t < 43 ? part(rows[0], 17 + t, 18 + t, 0) : RowPart(), part(rows[1], t, t + 1, 0)}, sink);
    EXPECT_EQ(session.length(0), 60);
    EXPECT_EQ(session.length(1), 60);
    for (int r : {0, 1}) {
        const std::vector<float> all = whole_row(*model, rows[size_t(r)], documents(false), true);
        std::vector<float> expected;
        for (int t = 0; t < 60; ++t)
            if (r == 0 ? t == 49 || t >= 53 : t >= 40) expected.insert(expected.end(), all.begin() + t * 51, all.begin() + (t + 1) * 51);
        EXPECT_LT(test::max_abs_difference(c.rows[size_t(r)], expected), 1e-5) << r;
    }
}

TEST_P(SessionOfVariant, DecodesTokenByToken) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model(GetParam(), 2));
    const std::vector<int> ids = ids_of(80, 4);
    SessionOptions o;
    o.chunk = 8, o.document_mask = true, o.data = documents(true);
    Session session(*model, o);
    Collected c;
    c.rows.resize(1);
    session.start(1, 80);
    session.feed({{{ids.begin(), ids.begin() + 19}, 0}}, c.sink(51));
    for (size_t t = 19; t < 80; ++t) session.feed({{{ids[t]}, 0}}, c.sink(51));
    EXPECT_LT(test::max_abs_difference(c.rows[0], whole_row(*model, ids, documents(true), true)), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(All, SessionOfVariant, testing::ValuesIn(variant_names()), [](const auto& info) { return info.param; });

TEST(Session, LogprobsAreThoseOfTheLogits) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model("bam_ssmax", 6));
    SessionOptions o;
    o.chunk = 32;
    Session session(*model, o);
    const std::vector<ScoredRow> rows = {{ids_of(90, 1), 1}, {ids_of(17, 2), 10}, {ids_of(3, 3), 2}, {ids_of(1, 4), 1}};
    const auto own = session.logprobs(rows);
    const auto expected = static_cast<Reader&>(session).Reader::logprobs(rows);
    ASSERT_EQ(own.size(), expected.size());
    const size_t sizes[] = {89, 7, 1, 0};
    for (size_t r = 0; r < 4; ++r) {
        ASSERT_EQ(own[r].size(), sizes[r]);
        ASSERT_EQ(expected[r].size(), sizes[r]);
        for (size_t i = 0; i < sizes[r]; ++i) EXPECT_NEAR(own[r][i], expected[r][i], 2e-6);
    }
}

// A row that begins like the one before it: fewer tokens are read, and every bit is the same.
TEST(Session, ReusesWhatTheCacheHolds) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model("rope_ssmax", 2));
    int64_t read = 0;
    SessionOptions o;
    o.chunk = 16, o.document_mask = true, o.data = documents(true);
    o.on_chunk = [&](int64_t tokens) { read += tokens; };
    Session used(*model, o), fresh(*model, o);
    std::vector<int> first = ids_of(100, 1), second = first;
    for (size_t i = 50; i < second.size(); ++i) second[i] = (second[i] + 1) % 51;
    const auto last = [&](Session& s, const std::vector<int>& ids) {
        std::vector<float> logits;
        s.start(1, 100);
        s.feed({{ids, int64_t(ids.size()) - 1}}, [&](int, int64_t i, const float* l) {
            EXPECT_EQ(i, int64_t(ids.size()) - 1);
            logits.assign(l, l + 51);
        });
        return logits;
    };
    last(used, first);
    EXPECT_EQ(read, 100);
    read = 0;
    const std::vector<float> again = last(used, second);
    EXPECT_EQ(read, 100 - 48);
    EXPECT_EQ(again, last(fresh, second));
    read = 0;
    last(used, second);
    EXPECT_EQ(read, 100 - 96);  // the last token is always read
    read = 0;
    EXPECT_EQ(last(used, {second.begin(), second.begin() + 48}), last(fresh, {second.begin(), second.begin() + 48}));
    used.logprobs({{ids_of(70, 9), 1}});
    EXPECT_EQ(last(used, first), last(fresh, first));
}

TEST(Session, Bf16AgreesWithItselfOverChunks) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model("bam_ssmax", 2), DType::bf16);
    const std::vector<int> ids = ids_of(120, 1);
    SessionOptions o;
    o.chunk = 1;
    Session steps(*model, o);
    o.chunk = 50;
    Session chunks(*model, o);
    const std::vector<float> a = read_all(steps, {ids})[0], b = read_all(chunks, {ids})[0];
    EXPECT_LT(test::max_abs_difference(a, b), 0.05 * test::max_abs(a));
    EXPECT_LT(test::max_abs_difference(a, whole_row(*model, ids, {}, false)), 0.05 * test::max_abs(a));
}

// Leaving out key tiles that a bound shows to be negligible changes fp32 logits by less than 1e-6 of the greatest.
TEST(Session, SkippingNegligibleKeysKeepsTheLogits) {
    const auto device = make_cpu_backend(1);
    const std::vector<int> ids = ids_of(1500, 1);
    for (const std::string variant : {"alibi", "alibi_ssmax", "bam", "bam_ssmax"}) {
        const auto model = make_model(*device, small_model(variant, 2));
        SessionOptions o;
        o.chunk = 200;
        Session exact(*model, o);
        o.skip_below = kSkipBelow;
        Session skipping(*model, o);
        const std::vector<float> a = read_all(exact, {ids})[0], b = read_all(skipping, {ids})[0];
        EXPECT_LT(test::max_abs_difference(a, b), 1e-6 * test::max_abs(a)) << variant;
    }
}

// A model in training may be asked for a sample between steps: its gradients stay what they were.
TEST(Session, SamplingLeavesTrainingAlone) {
    const auto device = test::make_test_backend(1);
    ModelConfig m = small_model("bam_ssmax", 6);
    m.vocab_size = 257;
    const auto model = make_model(*device, m);
    Arena memory;
    Tensor losses, grads;
    memory = make_arena(*device, [&](Arena& a) {
        losses = a.take(DType::f32, {40}), grads = a.take(DType::f32, {model->table().trained});
    });
    const std::vector<int32_t> tokens = test::random_tokens(2 * 21, 257, 1);
    const Batch batch = make_batch(tokens, 2, 20, {});
    const auto gradients = [&] {
        device->zero(grads);
        model->reserve(2, 20, Keep::all);
        model->loss_and_gradients(batch, losses, grads, 1.0f / 40);
        std::vector<float> host(size_t(grads.numel()));
        device->download(host.data(), grads);
        return host;
    };
    const std::vector<float> before = gradients();
    SampleOptions s;
    s.max_tokens = 50;
    const std::string text = sample_text(*model, *make_byte_tokenizer(), "Once", s);
    EXPECT_TRUE(text.starts_with("Once"));
    EXPECT_EQ(text, sample_text(*model, *make_byte_tokenizer(), "Once", s));
    EXPECT_EQ(gradients(), before);
}

TEST(Session, RefusesWhatCannotBe) {
    const auto device = test::make_test_backend(1);
    const auto model = make_model(*device, small_model("alibi", 6));
    Session session(*model, {});
    session.start(1, 4);
    EXPECT_THROW(session.feed({{{1, 2, 51}, -1}}, {}), Error);
    session.start(1, 4);
    EXPECT_THROW(session.feed({{{1, 2, 3, 4, 5}, -1}}, {}), Error);
    const SessionMemory plan = plan_session(model->config(), *device, DType::f32, 1, int64_t(1) << 40, 512);
    EXPECT_EQ(plan.cache, (int64_t(1) << 40) * 2 * 2 * 36 * 4);
    try {
        require_memory(plan, *device, "passkey at 1099511627776 tokens");
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitFailure);
        EXPECT_TRUE(std::string(e.what()).starts_with("passkey at 1099511627776 tokens needs ")) << e.what();
    }
}

}  // namespace
}  // namespace bam
