#include "eval/passkey.h"

#include <gtest/gtest.h>

#include <set>

#include "check.h"
#include "random.h"
#include "stand_in.h"

namespace bam {
namespace {

using test::run;
using test::StandIn;

const std::string kIntro =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about the important information there.";
const std::string kFiller = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
const std::string kQuestion = "What is the pass key? The pass key is";

// The sentences' lengths in bytes, counted by hand: 148, 89 and 37; the statement with a 5-digit key 58.
TEST(Passkey, PaperPromptIsPinnedInBytes) {
    const auto tokenizer = make_byte_tokenizer();
    const PasskeyText text(*tokenizer);
    const std::string statement = "The pass key is 12345. Remember it. 12345 is the pass key.";
    EXPECT_EQ(tokenizer->decode(text.statement(12345)), statement);
    EXPECT_EQ(tokenizer->decode(text.prompt(12345, 3, 1)), kIntro + kFiller + statement + kFiller + kFiller + kQuestion);
    EXPECT_EQ(tokenizer->decode(text.prompt(12345, 0, 0)), kIntro + statement + kQuestion);
    EXPECT_EQ(text.fixed(), 148 + 58 + 37);
    EXPECT_EQ(text.fillers(243), 0);
    EXPECT_EQ(text.fillers(243 + 89), 1);
    EXPECT_EQ(text.fillers(243 + 89 * 2 - 1), 1);
    EXPECT_EQ(tokenizer->decode(text.answer(12345)), " 12345");
    EXPECT_THROW(text.fillers(241), Error);
}

TEST(Passkey, LandmarkPromptIsPinned) {
    EXPECT_EQ(landmark_prompt(77, 95, 5),
              kIntro + "\nThe g\nThe pass key is 77. Remember it. 77 is the pass key.\n" + kFiller + " \n" + kQuestion);
    EXPECT_EQ(first_integer("is 12, 13"), "12");
    EXPECT_EQ(first_integer("none"), "");
    EXPECT_EQ(first_integer("007."), "007");
}

TEST(Passkey, ItemsStandAtTheDepthsOfTheTask) {
    const auto tokenizer = make_byte_tokenizer();
    PasskeyOptions o;
    o.lengths = {243 + 89 * 10 + 3};
    const Suite s = make_passkey("paper", o, *tokenizer);
    ASSERT_EQ(s.items.size(), 20u);
    for (int i = 0; i < 20; ++i) {
        StandIn reader = test::uniform(257);
        const Json r = s.items[size_t(i)].run(reader);
        const std::string text = tokenizer->decode(reader.row(0));
        const size_t at = text.find("The pass key is");
        EXPECT_EQ((at - 148) / 89, size_t(10 * i / 19)) << i;  // fillers before the statement
        EXPECT_EQ((at - 148) % 89, 0u);
        EXPECT_EQ(r["reached_tokens"], 243 + 890);
        EXPECT_GE(r["passkey"].get<int>(), 10000);
        EXPECT_LE(r["passkey"].get<int>(), 99999);
        EXPECT_DOUBLE_EQ(s.items[size_t(i)].key["depth"], i / 19.0);
    }
}

TEST(Passkey, CopierScoresAllAndUniformNothing) {
    const auto tokenizer = make_byte_tokenizer();
    PasskeyOptions o;
    o.lengths = {300, 600};
    o.samples = 6;
    for (const char* variant : {"paper", "landmark"}) {
        const Suite s = make_passkey(variant, o, *tokenizer);
        StandIn copier = test::copier(257);
        for (const Json& r : run(s, copier).results) {
            EXPECT_EQ(r["accuracy"], 1.0) << variant;
            EXPECT_EQ(r["stderr"], 0.0);
            EXPECT_EQ(r["samples"], 6);
        }
        StandIn uniform = test::uniform(257);  // its likeliest token is id 0, never a digit
        for (const Json& r : run(s, uniform).results) EXPECT_EQ(r["accuracy"], 0.0);
    }
}

// A model that guesses digits: 1 in 10 of each, and the reported chance is what it scores on average.
TEST(Passkey, GuesserScoresChance) {
    const auto tokenizer = make_byte_tokenizer();
    PasskeyOptions o;
    o.lengths = {243};
    o.samples = 2000;
    const Suite s = make_passkey("paper", o, *tokenizer);
    uint64_t draws = 0;
    StandIn guesser(257, [&](const std::vector<int>&, std::vector<float>& logits) {
        logits[size_t('0' + random_below(1, 2, draws++, 10))] = 5;
    });
    const Json r = run(s, guesser).results[0];
    EXPECT_NEAR(r["digit_accuracy"], 0.1, 4 * 0.3 / std::sqrt(2000.0 * 5));
    EXPECT_EQ(r["digit_chance"], 0.1);
    EXPECT_DOUBLE_EQ(r["chance"], 1.0 / 90000);
    EXPECT_NEAR(r["digit_stderr"].get<double>(), 0.3 / std::sqrt(2000.0 * 5), 5e-4);
}

// One digit wrong: the answer is wrong, four fifths of its digits are right; the space before it is not scored.
TEST(Passkey, ScoresAreThoseWorkedByHand) {
    const auto tokenizer = make_byte_tokenizer();
    PasskeyOptions o;
    o.lengths = {243};
    o.samples = 1;
    const Suite s = make_passkey("paper", o, *tokenizer);
    StandIn copier = test::copier(257);
    const int key = s.items[0].run(copier)["passkey"];
    const std::string answer = " " + std::to_string(key);
    StandIn nearly(257, [&](const std::vector<int>& ids, std::vector<float>& logits) {
        const size_t said = ids.size() - 243;  // answer tokens so far; the first is the space
        logits[size_t(said == 0 ? 'x' : said == 3 ? (answer[3] == '0' ? '1' : '0') : answer[said])] = 3;
    });
    const Json r = s.items[0].run(nearly);
    EXPECT_EQ(r["digits"], 5);
    EXPECT_EQ(r["digits_right"], 4);
    EXPECT_EQ(r["correct"], false);
    const double right = 3 - std::log(256 + std::exp(3.0)), wrong = -std::log(256 + std::exp(3.0));
    EXPECT_NEAR(r["logprob"].get<double>(), 4 * right + wrong, 1e-5);
    const Json summary = run(s, nearly).results[0];
    EXPECT_EQ(summary["accuracy"], 0.0);
    EXPECT_DOUBLE_EQ(summary["digit_accuracy"], 0.8);
    EXPECT_TRUE(summary["stderr"].is_null());
    EXPECT_EQ(summary["by_depth"][0]["correct"], 0);
}

TEST(Passkey, KeysFollowSeedAndPermission) {
    const auto tokenizer = make_byte_tokenizer();
    PasskeyOptions o;
    o.lengths = {243};
    o.allowed = [](int key) { return key % 10 == 7; };
    auto keys = [&] {
        std::set<int> all;
        const Suite s = make_passkey("paper", o, *tokenizer);
        for (const SuiteItem& item : s.items) {
            StandIn reader = test::uniform(257);
            all.insert(item.run(reader)["passkey"].get<int>());
        }
        return all;
    };
    const std::set<int> first = keys();
    EXPECT_GT(first.size(), 15u);
    for (int key : first) EXPECT_EQ(key % 10, 7);
    EXPECT_EQ(keys(), first);
    o.seed = 43;
    EXPECT_NE(keys(), first);
    StandIn copier = test::copier(257);
    EXPECT_DOUBLE_EQ(run(make_passkey("paper", o, *tokenizer), copier).results[0]["chance"], 1.0 / 9000);
}

TEST(Passkey, PositionsBeginningEndRandom) {
    const auto tokenizer = make_byte_tokenizer();
    PasskeyOptions o;
    o.lengths = {243 + 89 * 40};
    auto depths = [&](KeyPosition p) {
        o.position = p;
        std::set<double> all;
        for (const SuiteItem& item : make_passkey("paper", o, *tokenizer).items) all.insert(item.key["depth"].get<double>());
        return all;
    };
    EXPECT_EQ(depths(KeyPosition::beginning), std::set<double>{0});
    EXPECT_EQ(depths(KeyPosition::end), std::set<double>{1});
    EXPECT_GT(depths(KeyPosition::random).size(), 10u);
    EXPECT_THROW(parse_key_position("middle"), Error);
    EXPECT_THROW(make_passkey("needle", o, *tokenizer), Error);
}

}  // namespace
}  // namespace bam
