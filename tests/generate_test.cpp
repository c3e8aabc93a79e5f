#include "eval/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "check.h"
#include "random.h"
#include "stand_in.h"

namespace bam {
namespace {

using test::StandIn;

// Shares of the ids drawn at evenly spread u.
std::map<int, double> shares(const std::vector<float>& logits, const SampleOptions& o, const std::vector<int>& seen = {}) {
    constexpr int kDraws = 20000;
    std::map<int, double> share;
    for (int i = 0; i < kDraws; ++i)
        share[pick_token(logits.data(), int(logits.size()), seen, o, (i + 0.5) / kDraws)] += 1.0 / kDraws;
    return share;
}

std::set<int> ids_in(const std::map<int, double>& share) {
    std::set<int> ids;
    for (const auto& [id, s] : share) ids.insert(id);
    return ids;
}

// Probabilities 0.4, 0.1, 0.3, 0.2 of ids 0 .. 3.
const std::vector<float> kLogits = {std::log(0.4f), std::log(0.1f), std::log(0.3f), std::log(0.2f)};

TEST(Sampling, FollowsTheDistribution) {
    SampleOptions o;
    o.temperature = 1;
    auto s = shares(kLogits, o);
    EXPECT_NEAR(s[0], 0.4, 1e-3);
    EXPECT_NEAR(s[1], 0.1, 1e-3);
    EXPECT_NEAR(s[2], 0.3, 1e-3);
    o.temperature = 0.5;  // squares: 16, 1, 9, 4 of 30
    s = shares(kLogits, o);
    EXPECT_NEAR(s[0], 16.0 / 30, 1e-3);
    EXPECT_NEAR(s[1], 1.0 / 30, 1e-3);
    o.temperature = 0;
    EXPECT_EQ(ids_in(shares(kLogits, o)), std::set<int>{0});
}

TEST(Sampling, CutsWhatIsUnlikely) {
    SampleOptions o;
    o.temperature = 1, o.top_k = 2;
    auto s = shares(kLogits, o);
    EXPECT_EQ(ids_in(s), (std::set<int>{0, 2}));
    EXPECT_NEAR(s[0], 4.0 / 7, 1e-3);
    o.top_k = 0, o.top_p = 0.69;
    EXPECT_EQ(ids_in(shares(kLogits, o)), (std::set<int>{0, 2}));
    o.top_p = 0.71;
    EXPECT_EQ(ids_in(shares(kLogits, o)), (std::set<int>{0, 2, 3}));
    o.top_p = 1e-6;
    EXPECT_EQ(ids_in(shares(kLogits, o)), std::set<int>{0});
    o.top_p = 1, o.min_p = 0.45;  // at least 0.18
    EXPECT_EQ(ids_in(shares(kLogits, o)), (std::set<int>{0, 2, 3}));
    o.min_p = 1;
    EXPECT_EQ(ids_in(shares(kLogits, o)), std::set<int>{0});
}

TEST(Sampling, PenalizesRepetition) {
    SampleOptions o;
    o.repetition_penalty = 2;
    const std::vector<float> logits = {3, 2, -1, -1.5};
    EXPECT_EQ(pick_token(logits.data(), 4, {}, o, 0), 0);
    EXPECT_EQ(pick_token(logits.data(), 4, {0, 0, 0}, o, 0), 1);     // 1.5 < 2, counted once
    EXPECT_EQ(pick_token(logits.data(), 4, {0, 1}, o, 0), 0);        // 1.5 > 1
    const std::vector<float> negative = {-1, -1.5};
    EXPECT_EQ(pick_token(negative.data(), 2, {0}, o, 0), 1);         // -2 < -1.5
    EXPECT_EQ(pick_token(negative.data(), 2, {0, 77, -1}, o, 0), 1);  // foreign ids are ignored
}

TEST(Sampling, HugeLogitsAreFinite) {
    SampleOptions o;
    o.temperature = 1;
    const std::vector<float> logits = {1e30f, -1e30f, 200, 1e30f};
    EXPECT_EQ(ids_in(shares(logits, o)), (std::set<int>{0, 3}));
    o.temperature = 1e-6;
    EXPECT_EQ(ids_in(shares({1, 1.001f, 0.5f}, o)), std::set<int>{1});
}

TEST(Sampling, WrongOptionsAreNamed) {
    SampleOptions o;
    const auto refused = [&](auto change, const char* name) {
        SampleOptions bad = o;
        change(bad);
        try {
            check_sampling(bad);
            ADD_FAILURE() << name;
        } catch (const Error& e) {
            EXPECT_EQ(e.code, kExitUsage);
            EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
        }
    };
    refused([](auto& x) { x.temperature = -1; }, "temperature");
    refused([](auto& x) { x.temperature = NAN; }, "temperature");
    refused([](auto& x) { x.top_k = -1; }, "top-k");
    refused([](auto& x) { x.top_p = 0; }, "top-p");
    refused([](auto& x) { x.min_p = 1.5; }, "min-p");
    refused([](auto& x) { x.repetition_penalty = 0; }, "repetition penalty");
    refused([](auto& x) { x.max_tokens = 0; }, "number of tokens");
    refused([](auto& x) { x.stop = {""}; }, "stop");
}

// Says `text` after the prompt, then the separator.
StandIn reciter(const std::string& text, size_t prompt) {
    return StandIn(257, [text, prompt](const std::vector<int>& ids, std::vector<float>& logits) {
        const size_t at = ids.size() - prompt;
        logits[at < text.size() ? size_t(static_cast<unsigned char>(text[at])) : 256] = 9;
    });
}

struct Told {
    std::vector<std::string> pieces;
    TextSink sink() {
        return {[this](int, const std::string& text) { pieces.push_back(text); }, {}};
    }
    std::string all() const {
        std::string text;
        for (const std::string& p : pieces) text += p;
        return text;
    }
};

const Separator kEnd = {256, true};

std::vector<Generated> continue_text(Reader& reader, const Separator& separator, const std::vector<std::string>& prompts,
                                     const SampleOptions& o, const TextSink& sink = {}) {
    const auto tokenizer = make_byte_tokenizer();
    std::vector<std::vector<int>> ids;
    for (const std::string& p : prompts) ids.push_back(prompt_ids(*tokenizer, separator, p));
    return generate(reader, *tokenizer, separator, ids, o, sink);
}

TEST(Generate, TellsWholeCharactersAndEndsAtTheSeparator) {
    const std::string text = "na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80!";
    StandIn reader = reciter(text, 2);
    Told told;
    const Generated g = continue_text(reader, kEnd, {"Hi"}, {}, told.sink())[0];
    EXPECT_EQ(g.text, text);
    EXPECT_EQ(g.stopped_by, "separator");
    EXPECT_EQ(g.ids.size(), text.size());
    EXPECT_EQ(told.all(), text);
    for (const std::string& piece : told.pieces) EXPECT_NE(piece[0] & 0xc0, 0x80) << "piece begins inside a character";
    EXPECT_EQ(told.pieces.size(), 10u);  // one a character
}

TEST(Generate, StopsAtTextAndNeverTellsIt) {
    StandIn reader = reciter("one two END three", 2);
    SampleOptions o;
    o.stop = {"END", "three"};
    Told told;
    const Generated g = continue_text(reader, kEnd, {"Hi"}, o, told.sink())[0];
    EXPECT_EQ(g.text, "one two ");
    EXPECT_EQ(g.stopped_by, "stop");
    EXPECT_EQ(told.all(), "one two ");
    StandIn almost = reciter("EN ENTER EN", 2);
    Told all;
    EXPECT_EQ(continue_text(almost, kEnd, {"Hi"}, o, all.sink())[0].text, "EN ENTER EN");
    EXPECT_EQ(all.all(), "EN ENTER EN");
}

TEST(Generate, EndsAtTheLengthAndReadsNoMore) {
    StandIn reader = reciter("abcdefgh", 2);
    SampleOptions o;
    o.max_tokens = 3;
    const Generated g = continue_text(reader, kEnd, {"Hi"}, o)[0];
    EXPECT_EQ(g.text, "abc");
    EXPECT_EQ(g.stopped_by, "length");
    EXPECT_EQ(reader.tokens_read, 2 + 2);
    StandIn torn = reciter("ab\xe2\x82\xac", 2);
    o.max_tokens = 4;
    EXPECT_EQ(continue_text(torn, kEnd, {"Hi"}, o)[0].text, "ab\xe2\x82");
}

TEST(Generate, PromptsDoNotDisturbEachOther) {
    const auto random = [](const std::vector<int>& ids, std::vector<float>& logits) {
        for (size_t v = 0; v < logits.size(); ++v) logits[v] = float(3 * random_uniform(uint64_t(ids.back()), ids.size(), v));
    };
    SampleOptions o;
    o.temperature = 1, o.max_tokens = 20;
    StandIn a(257, random), b(257, random);
    const auto one = continue_text(a, {-1, true}, {"first"}, o);
    const auto three = continue_text(b, {-1, true}, {"first", "a longer second one", "first"}, o);
    EXPECT_EQ(one[0].ids, three[0].ids);
    EXPECT_NE(three[0].ids, three[2].ids);  // alike prompts get different draws
    o.seed = 7;
    EXPECT_NE(continue_text(a, {-1, true}, {"first"}, o)[0].ids, one[0].ids);
}

TEST(Generate, DocumentsBeginAsInTraining) {
    SampleOptions o;
    o.max_tokens = 1;
    StandIn reader = test::uniform(257);
    continue_text(reader, {256, false}, {"Hi"}, o);
    EXPECT_EQ(reader.row(0), (std::vector<int>{256, 'H', 'i'}));
    continue_text(reader, {256, true}, {"Hi"}, o);
    EXPECT_EQ(reader.row(0), (std::vector<int>{'H', 'i'}));
    continue_text(reader, {256, true}, {""}, o);
    EXPECT_EQ(reader.row(0), std::vector<int>{256});
    EXPECT_THROW(continue_text(reader, {-1, true}, {""}, o), Error);
}

}  // namespace
}  // namespace bam
