#include "eval/choice.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check.h"
#include "stand_in.h"
#include "test_support.h"

namespace bam {
namespace {

using test::Outcome;
using test::run;
using test::StandIn;

// The toy model of tests/oracle/choice_oracle.py.
StandIn toy() {
    return StandIn(257, [](const std::vector<int>& ids, std::vector<float>& logits) {
        const int a = ids.size() > 1 ? ids[ids.size() - 2] : 0, b = ids.back();
        for (int v = 0; v < 257; ++v) logits[size_t(v)] = float((v * 31 + b * 17 + a * 7) % 101) / 10;
    });
}

// lm-evaluation-harness over the same items: every log-probability, accuracies and their errors.
TEST(Choice, AgreesWithLmEvaluationHarness) {
    const auto tokenizer = make_byte_tokenizer();
    const Json expected = Json::parse(test::read_file(test::test_data("choice_expected.json")));
    for (const std::string task : {"arc", "hellaswag", "mmlu", "mmlu_cloze"}) {
        const Json& e = expected[task];
        const std::string file = test::test_data("choice_" + (task == "mmlu_cloze" ? "mmlu" : task) + ".jsonl");
        StandIn reader = toy();
        const Outcome r = run(make_choice(task, {{file}, 0}, *tokenizer), reader);
        ASSERT_EQ(r.lines.size(), 50u);
        for (size_t i = 0; i < 50; ++i) {
            ASSERT_EQ(r.lines[i]["logprobs"].size(), e["logprobs"][i].size());
            for (size_t c = 0; c < e["logprobs"][i].size(); ++c)
                EXPECT_NEAR(r.lines[i]["logprobs"][c].get<double>(), e["logprobs"][i][c].get<double>(), 1e-4) << task << " item " << i;
        }
        EXPECT_EQ(r.results.size(), 1u);
        EXPECT_NEAR(r.results[0]["acc"].get<double>(), e["acc"].get<double>(), 1e-12) << task;
        EXPECT_NEAR(r.results[0]["acc_stderr"].get<double>(), e["acc_stderr"].get<double>(), 1e-9) << task;
        if (!e.contains("acc_norm")) continue;  // letters are all as long
        EXPECT_NEAR(r.results[0]["acc_norm"].get<double>(), e["acc_norm"].get<double>(), 1e-12) << task;
        EXPECT_NEAR(r.results[0]["acc_norm_stderr"].get<double>(), e["acc_norm_stderr"].get<double>(), 1e-9) << task;
    }
}

TEST(Choice, ContextsAreThePublicTasks) {
    const std::string arc = R"({"question":"Why?","choices":{"text":["so","no"],"label":["1","2"]},"answerKey":"2"})";
    ChoiceItem item = parse_choice(arc, "", "here");
    EXPECT_EQ(item.context, "Question: Why?\nAnswer:");
    EXPECT_EQ(item.choices, (std::vector<std::string>{"so", "no"}));
    EXPECT_EQ(item.gold, 1);
    const std::string hellaswag =
        R"({"activity_label":"Health","ctx_a":"[header] How to rest [title] Lie  down.","ctx_b":"a MAN then","endings":[" sleeps.","[step] eats [substeps] well."],"label":"0"})";
    item = parse_choice(hellaswag, "", "here");
    EXPECT_EQ(item.context, "Health: How to rest. Lie down. A man then");
    EXPECT_EQ(item.choices, (std::vector<std::string>{"sleeps.", " eats well."}));
    const std::string mmlu = R"({"question":" 1+1? ","subject":"abstract_algebra","choices":["1","2","3","4"],"answer":1})";
    item = parse_choice(mmlu, "", "here");
    EXPECT_EQ(item.context, "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
                            "1+1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:");
    EXPECT_EQ(item.choices, (std::vector<std::string>{"A", "B", "C", "D"}));
    EXPECT_EQ(item.gold, 1);
    item = parse_choice(mmlu, "mmlu_cloze", "here");
    EXPECT_EQ(item.context, "The following are questions (with answers) about abstract algebra.\n\nQuestion: 1+1?\nAnswer:");
    EXPECT_EQ(item.choices, (std::vector<std::string>{"1", "2", "3", "4"}));
    EXPECT_EQ(parse_choice(R"({"question":"q","choices":["1","2","3","4"],"answer":"D"})", "", "here").gold, 3);
}

// Of two choices the longer one has the lower sum and the higher mean a character: acc and acc_norm part ways.
TEST(Choice, AccuraciesWorkedByHand) {
    const test::TempDir dir;
    const auto tokenizer = make_byte_tokenizer();
    test::write_file(dir.file("a.jsonl"), R"({"question":"q","choices":{"text":["ab","abababé"],"label":["A","B"]},"answerKey":"B"})" "\n\n"
                                          R"({"question":"q","choices":{"text":["ab","ab","x"],"label":["A","B","C"]},"answerKey":"A"})" "\n");
    StandIn uniform = test::uniform(257);
    const Outcome r = run(make_choice("", {{dir.file("a.jsonl")}, 0}, *tokenizer), uniform);
    ASSERT_EQ(r.lines.size(), 2u);
    const double nat = std::log(257.0);  // a byte; the space before a choice counts, and é is two bytes and one character
    EXPECT_NEAR(r.lines[0]["logprobs"][0].get<double>(), -3 * nat, 1e-9);
    EXPECT_NEAR(r.lines[0]["logprobs"][1].get<double>(), -9 * nat, 1e-9);
    EXPECT_EQ(r.lines[0]["acc"], false);
    EXPECT_EQ(r.lines[0]["acc_norm"], true);   // -9/7 a character against -3/2
    EXPECT_EQ(r.lines[1]["acc"], false);       // "x" is shortest
    EXPECT_EQ(r.lines[1]["acc_norm"], true);   // -3/2, -3/2, -2/1: the first of equal ones
    EXPECT_DOUBLE_EQ(r.results[0]["acc_norm"], 1.0);
    EXPECT_DOUBLE_EQ(r.results[0]["chance"], (1 / 2.0 + 1 / 3.0) / 2);
}

TEST(Choice, PairsAreEncodedTogether) {
    const auto tokenizer = make_byte_tokenizer();
    const EncodedPair pair = encode_pair(*tokenizer, "ab  ", "c");
    EXPECT_EQ(pair.ids.size(), 5u);
    EXPECT_EQ(pair.from, 2);  // the spaces belong to the choice
    EXPECT_EQ(characters("a\xc3\xa9\xe2\x82\xac"), 3);
}

TEST(Choice, BadLinesAreNamed) {
    const test::TempDir dir;
    const auto tokenizer = make_byte_tokenizer();
    const std::string good = R"({"question":"q","choices":{"text":["a","b"],"label":["A","B"]},"answerKey":"B"})";
    for (const std::string bad : {"{", "[1]", R"({"x":1})", R"({"question":"q","choices":{"text":["a","b"],"label":["A","B"]},"answerKey":"C"})",
                                  R"({"question":"q","choices":{"text":["a"],"label":["A"]},"answerKey":"A"})",
                                  R"({"question":1,"choices":{"text":["a","b"],"label":["A","B"]},"answerKey":"A"})",
                                  R"({"question":"q","choices":{"text":["a",""],"label":["A","B"]},"answerKey":"A"})",
                                  R"({"activity_label":"a","ctx_a":"","ctx_b":"","endings":["a","b"],"label":""})",
                                  R"({"question":"q","choices":["1","2","3"],"answer":1})",
                                  R"({"question":"q","choices":["1","2","3","4"],"answer":4})"}) {
        test::write_file(dir.file("a.jsonl"), good + "\n" + bad + "\n");
        try {
            make_choice("", {{dir.file("a.jsonl")}, 0}, *tokenizer);
            ADD_FAILURE() << bad;
        } catch (const Error& e) {
            EXPECT_EQ(e.code, kExitData);
            EXPECT_NE(std::string(e.what()).find("a.jsonl line 2"), std::string::npos) << e.what();
        }
        EXPECT_EQ(make_choice("", {{dir.file("a.jsonl")}, 1}, *tokenizer).items.size(), 1u);
    }
    test::write_file(dir.file("empty.jsonl"), "\n");
    EXPECT_THROW(make_choice("", {{dir.file("empty.jsonl")}, 0}, *tokenizer), Error);
    EXPECT_THROW(make_choice("", {{dir.file("none.jsonl")}, 0}, *tokenizer), Error);
    EXPECT_THROW(make_choice("", {{}, 0}, *tokenizer), Error);
    EXPECT_THROW(make_choice("boolq", {{dir.file("a.jsonl")}, 0}, *tokenizer), Error);
}

test::RunResult prepare(const std::vector<std::string>& args) {
    test::RunOptions python;
    python.program = "/usr/bin/env";
    std::vector<std::string> all = {"python3", "scripts/prepare_choice.py"};
    all.insert(all.end(), args.begin(), args.end());
    return test::run_bam(all, python);
}

// The forms in which the data sets were first published; parquet has the field names of the item files already.
TEST(Choice, PublicFilesAreConverted) {
    test::RunOptions python;
    python.program = "/usr/bin/env";
    if (test::run_bam({"python3", "--version"}, python).code != 0) GTEST_SKIP() << "no python3";
    const test::TempDir dir;
    test::write_file(dir.file("abstract_algebra_test.csv"), "\"What, then?\",1,\"2, or so\",3,4,C\n");
    test::RunResult r = prepare({"mmlu", dir.file("abstract_algebra_test.csv")});
    EXPECT_EQ(r.code, 0) << r.err;
    ChoiceItem item = parse_choice(r.out, "", "here");
    EXPECT_EQ(item.gold, 2);
    EXPECT_NE(item.context.find("about abstract algebra.\n\nWhat, then?\nA. 1\nB. 2, or so\n"), std::string::npos);
    test::write_file(dir.file("arc.jsonl"),
                     R"({"id":"x","question":{"stem":"Why?","choices":[{"text":"so","label":"A"},{"text":"no","label":"B"}]},"answerKey":"B"})");
    r = prepare({"arc", dir.file("arc.jsonl")});
    item = parse_choice(r.out, "", "here");
    EXPECT_EQ(item.context, "Question: Why?\nAnswer:");
    EXPECT_EQ(item.gold, 1);
    r = prepare({"hellaswag", test::test_data("choice_hellaswag.jsonl")});
    EXPECT_EQ(test::lines_of(r.out).size(), 50u);
    test::write_file(dir.file("bad_test.csv"), "only,three,fields\n");
    r = prepare({"mmlu", dir.file("bad_test.csv")});
    EXPECT_NE(r.code, 0);
    EXPECT_NE(r.err.find("bad_test.csv row 1"), std::string::npos) << r.err;
}

}  // namespace
}  // namespace bam
