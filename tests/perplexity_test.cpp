#include "eval/perplexity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check.h"
#include "eval/score.h"
#include "stand_in.h"
#include "test_support.h"

namespace bam {
namespace {

using test::run;
using test::StandIn;

TokenRange range_of(const test::TempDir& dir, const std::vector<int32_t>& ids) {
    test::write_shard(dir.file("a.bin"), ids);
    const auto stream = std::make_shared<const TokenStream>(std::vector<std::string>{dir.file("a.bin")});
    return {stream, 0, stream->size()};
}

TEST(Windows, ScoreEachTargetOnceWithEnoughContext) {
    for (int64_t n : {2, 3, 10, 11, 12, 97})
        for (int64_t context : {1, 2, 5, 10, 200})
            for (int64_t stride = 1; stride <= std::min<int64_t>(context, 12); ++stride) {
                std::vector<int> scored(size_t(n), 0);
                for (const Window& w : make_windows(n, context, stride)) {
                    EXPECT_LE(w.end - w.begin, context + 1);
                    EXPECT_GT(w.from, w.begin);
                    if (w.begin > 0) { EXPECT_GE(w.from - w.begin, context - stride + 1); }
                    for (int64_t i = w.from; i < w.end; ++i) ++scored[size_t(i)];
                }
                EXPECT_EQ(scored[0], 0);
                for (int64_t i = 1; i < n; ++i) EXPECT_EQ(scored[size_t(i)], 1) << n << " " << context << " " << stride;
            }
    EXPECT_TRUE(make_windows(1, 4, 2).empty());
}

// -ln p of a token is the number of tokens the model saw before it: the score shows the context that was used.
StandIn context_counter(int V) {
    return StandIn(V, [V](const std::vector<int>& ids, std::vector<float>& logits) {
        const double nll = double(ids.size());  // p = e^-n for the next id (n + 1), the rest spread evenly
        for (float& l : logits) l = float(std::log((1 - std::exp(-nll)) / (V - 1)));
        logits[size_t((ids.back() + 1) % V)] = float(-nll);
    });
}

TEST(Score, StrideAndContextDecideWhatIsSeen) {
    std::vector<int> ids(10);
    for (int i = 0; i < 10; ++i) ids[size_t(i)] = i;
    StandIn reader = context_counter(20);
    const auto nll = [&](int64_t context, int64_t stride) {
        std::vector<int> seen;
        for (double x : score_tokens(reader, ids, context, stride)) seen.push_back(std::isnan(x) ? -1 : int(std::lround(-x)));
        return seen;
    };
    EXPECT_EQ(nll(0, 0), (std::vector<int>{-1, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
    EXPECT_EQ(nll(4, 4), (std::vector<int>{-1, 1, 2, 3, 4, 1, 2, 3, 4, 1}));
    EXPECT_EQ(nll(4, 2), (std::vector<int>{-1, 1, 2, 3, 4, 3, 4, 3, 4, 3}));
    EXPECT_EQ(nll(4, 1), (std::vector<int>{-1, 1, 2, 3, 4, 4, 4, 4, 4, 4}));
    EXPECT_EQ(nll(1, 1), (std::vector<int>{-1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
    EXPECT_EQ(nll(100, 7), (std::vector<int>{-1, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(Perplexity, OfUniformLogitsIsTheVocabulary) {
    const test::TempDir dir;
    for (int V : {51, 4096}) {
        const TokenRange range = range_of(dir, test::random_tokens(700, 51, 1, 7, 60));
        PerplexityOptions o;
        o.lengths = {1, 16, 64};
        o.data.has_separator = true, o.data.separator_id = 7;
        for (const char* variant : {"windows", "sliding", "by_position"}) {
            StandIn reader = test::uniform(V);
            for (const Json& r : run(make_perplexity(variant, o, range, V), reader).results)
                EXPECT_NEAR(r["perplexity"].get<double>(), V, 1e-9 * V) << variant;
        }
    }
}

// Windows of 3 over 0..10: nll 1, 2, 3 in each of 3 windows (the 10th target would be alone); sliding by 2: 1 2 3, then 2 3 ...
TEST(Perplexity, MeansAreThoseWorkedByHand) {
    const test::TempDir dir;
    std::vector<int32_t> ids(11);
    for (int i = 0; i < 11; ++i) ids[size_t(i)] = i;
    const TokenRange range = range_of(dir, ids);
    PerplexityOptions o;
    o.lengths = {3};
    o.stride = 2;
    StandIn reader = context_counter(20);
    const Json windows = run(make_perplexity("windows", o, range, 20), reader).results[0];
    EXPECT_EQ(windows["tokens"], 9);
    EXPECT_NEAR(windows["nll"].get<double>(), 2.0, 1e-6);
    EXPECT_NEAR(windows["stderr"].get<double>(), 0, 1e-6);
    EXPECT_NEAR(windows["perplexity"].get<double>(), std::exp(2.0), 1e-5);
    const Json sliding = run(make_perplexity("sliding", o, range, 20), reader).results[0];
    EXPECT_EQ(sliding["tokens"], 10);  // 1 2 3 | 2 3 | 2 3 | 2 3 | 2
    EXPECT_NEAR(sliding["nll"].get<double>(), (6 + 3 * 5 + 2) / 10.0, 1e-6);
    o.tokens = 3;
    EXPECT_EQ(run(make_perplexity("windows", o, range, 20), reader).results[0]["tokens"], 3);
}

TEST(Perplexity, ByPositionTakesLongDocumentsOnly) {
    const test::TempDir dir;
    // Documents (separator 0 at the end) of 5, 3, 7 and, unended, 5 tokens.
    const TokenRange range = range_of(dir, {1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5});
    PerplexityOptions o;
    o.lengths = {4};
    o.bins = 2;
    o.data.has_separator = true, o.data.separator_id = 0;
    StandIn reader = context_counter(20);
    const Suite s = make_perplexity("by_position", o, range, 20);
    ASSERT_EQ(s.items.size(), 3u);
    const Json r = run(s, reader).results[0];
    EXPECT_EQ(r["documents"], 3);
    EXPECT_EQ(r["tokens"], 12);
    EXPECT_EQ(r["bins"][0]["begin"], 0);
    EXPECT_EQ(r["bins"][0]["end"], 2);
    // The first document ends 4, 0 and not 4, 5: that target's nll is ln of what is left over.
    const double odd = -std::log((1 - std::exp(-4.0)) / 19);
    EXPECT_NEAR(r["bins"][0]["nll"].get<double>(), 1.5, 1e-6);
    EXPECT_NEAR(r["bins"][1]["nll"].get<double>(), (3 * 3 + 4 + 4 + odd) / 6, 1e-5);
    o.data.separator_at_end = false;  // separator first: documents [1 2 3 4] [0 1 2] [0 1 ... 6] [0 1 2 3 4 5]
    EXPECT_EQ(make_perplexity("by_position", o, range, 20).items.size(), 2u);
    o.lengths = {10};
    EXPECT_THROW(make_perplexity("by_position", o, range, 20), Error);
}

TEST(Perplexity, WrongUseIsRefused) {
    const test::TempDir dir;
    const TokenRange range = range_of(dir, test::random_tokens(20, 50, 1));
    PerplexityOptions o;
    o.lengths = {20};
    EXPECT_THROW(make_perplexity("windows", o, range, 51), Error);
    o.lengths = {4};
    EXPECT_THROW(make_perplexity("middle", o, range, 51), Error);
    o.stride = 5;
    EXPECT_THROW(make_perplexity("sliding", o, range, 51), Error);
    StandIn reader = test::uniform(51);
    const Suite s = make_perplexity("windows", o, range, 3);  // ids reach 49
    try {
        run(s, reader);
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, kExitData);
        EXPECT_NE(std::string(e.what()).find("a.bin: token id"), std::string::npos) << e.what();
    }
    EXPECT_THROW(evaluation_tokens({}, {}), Error);
}

TEST(Score, TokenFiles) {
    const test::TempDir dir;
    test::write_shard(dir.file("a.bin"), {1, 2, 50});
    EXPECT_EQ(read_token_file(dir.file("a.bin"), 51), (std::vector<int>{1, 2, 50}));
    test::write_file(dir.file("a.txt"), "1 2\n50,\t3\n");
    EXPECT_EQ(read_token_file(dir.file("a.txt"), 51), (std::vector<int>{1, 2, 50, 3}));
    for (const char* bad : {"1 2 x", "1 51", "-1", "1.5", "", "99999999999"}) {
        test::write_file(dir.file("b.txt"), bad);
        EXPECT_THROW(read_token_file(dir.file("b.txt"), 51), Error) << bad;
    }
    EXPECT_THROW(read_token_file(dir.file("a.bin"), 50), Error);
    EXPECT_THROW(read_token_file(dir.file("none"), 50), Error);
}

}  // namespace
}  // namespace bam
