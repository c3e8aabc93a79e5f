// Inputs become shards: every byte is found again in the stream, whatever the shard size; bad input and a full disk
// leave nothing behind; a data set is never overwritten unasked.
#include "tokenize.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "check.h"
#include "loader.h"
#include "refusal.h"
#include "test_support.h"
#include "word_tokenizer.h"

namespace bam {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::refusal;
using test::TempDir;
using test::write_file;

std::vector<std::string> names_in(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(dir)) names.push_back(e.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

std::vector<int32_t> tokens_of(const std::string& dir, Split part) {
    const TokenStream s({dir}, part);
    std::vector<int32_t> ids(static_cast<size_t>(s.size()));
    s.read(0, s.size(), ids.data());
    return ids;
}

// The documents of a byte-tokenized part, split by hand.
std::vector<std::string> documents_of(const std::string& dir, Split part) {
    std::vector<std::string> docs;
    std::string now;
    for (int32_t id : tokens_of(dir, part)) {
        if (id == 256) {
            docs.push_back(now);
            now.clear();
        } else {
            now += char(id);
        }
    }
    EXPECT_TRUE(now.empty()) << "the last document is not ended";
    return docs;
}

struct Fixture : ::testing::Test {
    TempDir dir;
    TokenizeOptions options(const std::vector<std::string>& inputs) {
        TokenizeOptions o;
        o.tokenizer = "byte";
        o.out = dir.file("out");
        o.inputs = inputs;
        return o;
    }
    std::string input(const std::string& name, const std::string& content) {
        write_file(dir.file(name), content);
        return dir.file(name);
    }
    // "doc 0" ... as JSON lines
    std::string numbered(int n) {
        std::string lines;
        for (int i = 0; i < n; i++) lines += "{\"text\": \"doc " + std::to_string(i) + "\"}\n";
        return input("numbered.jsonl", lines);
    }
};
using Tokenize = Fixture;

TEST_F(Tokenize, PutsEveryDocumentIntoTheStreamOnce) {
    std::string binary = "any\xff bytes";
    binary += '\0';
    const std::string a = input("a.txt", binary);
    const std::string b = input("b.jsonl",
                                "{\"text\": \"one \\u00e9\\n\", \"id\": 1}\r\n"
                                "\n  \n"
                                "{\"id\": [2, {\"text\": \"no\"}], \"text\": \"two\"}\n"
                                "{\"text\": \"\"}\n"
                                "{\"text\": \"three\"}");  // no line end
    const std::string c = input("c.txt", "");
    const DatasetInfo d = tokenize(options({a, b, c, a}));
    EXPECT_EQ(documents_of(dir.file("out"), Split::train),
              (std::vector<std::string>{binary, "one \xc3\xa9\n", "two", "three", binary}));
    EXPECT_EQ(d.train.documents, 5);
    EXPECT_EQ(d.train.text_bytes, 2 * 11 + 7 + 3 + 5);
    EXPECT_EQ(d.train.tokens, d.train.text_bytes + 5);
    EXPECT_TRUE(d.val.files.empty());
    EXPECT_EQ(names_in(dir.file("out")),
              (std::vector<std::string>{"dataset.json", "tokenizer.json", "train_00000.bin"}));
}

TEST_F(Tokenize, WritesShardsAsLlmcDoes) {
    tokenize(options({input("a.txt", "AB")}));
    const std::string bytes = read_file(dir.file("out/train_00000.bin"));
    ASSERT_EQ(bytes.size(), 1024u + 6);
    const unsigned char expected[12] = {0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 3, 0, 0, 0};  // 20240520, 1, 3
    EXPECT_EQ(bytes.substr(0, 12), std::string(reinterpret_cast<const char*>(expected), 12));
    EXPECT_EQ(bytes.substr(12, 1012), std::string(1012, '\0'));
    EXPECT_EQ(bytes.substr(1024), std::string("A\0B\0\0\1", 6));
}

TEST_F(Tokenize, DatasetJsonSaysWhatIsThere) {
    TokenizeOptions o = options({numbered(7)});
    o.val_documents = 2;
    o.shard_tokens = 13;
    tokenize(o);
    const auto j = nlohmann::json::parse(read_file(dir.file("out/dataset.json")));
    EXPECT_EQ(j["format"], "bam-dataset");
    EXPECT_EQ(j["version"], 1);
    EXPECT_EQ(j["vocab_size"], 257);
    EXPECT_EQ(j["separator"], (nlohmann::json{{"id", 256}, {"position", "end"}}));
    EXPECT_EQ(j["train"]["tokens"], 30);
    EXPECT_EQ(j["train"]["documents"], 5);
    EXPECT_EQ(j["train"]["text_bytes"], 25);
    ASSERT_EQ(j["train"]["files"].size(), 3u);
    EXPECT_EQ(j["train"]["files"][2], (nlohmann::json{{"name", "train_00002.bin"}, {"tokens", 4}}));
    EXPECT_EQ(j["val"]["tokens"], 12);
    const auto t = load_tokenizer(dir.file("out"));
    const DatasetInfo d = read_dataset(dir.file("out"));
    EXPECT_EQ(d.tokenizer_fingerprint, t->fingerprint());
    EXPECT_EQ(d.tokenizer_kind, "byte");
    EXPECT_EQ(d.train.files.size(), 3u);
    EXPECT_EQ(d.val.text_bytes, 10);
    EXPECT_EQ(d.separator_id, 256);
    EXPECT_TRUE(d.separator_at_end);
    std::ostringstream text;
    print_dataset(d, text);
    EXPECT_EQ(text.str(), dir.file("out") +
                              ": byte tokenizer, 257 ids, separator 256 (end)\n"
                              "  train: 30 tokens, 5 documents, 25 bytes of text, 3 shard(s)\n"
                              "  val: 12 tokens, 2 documents, 10 bytes of text, 1 shard(s)\n");
}

TEST_F(Tokenize, ShardSizeDoesNotChangeTheStream) {
    const std::string in = numbered(40);
    tokenize(options({in}));
    const std::vector<int32_t> whole = tokens_of(dir.file("out"), Split::train);
    for (int64_t size : {50, 100, 270, 271}) {
        TokenizeOptions o = options({in});
        o.force = true;
        o.shard_tokens = size;
        const DatasetInfo d = tokenize(o);
        EXPECT_EQ(tokens_of(o.out, Split::train), whole);
        EXPECT_EQ(int64_t(d.train.files.size()), (int64_t(whole.size()) + size - 1) / size);
        EXPECT_EQ(names_in(o.out).size(), d.train.files.size() + 2);  // nothing of the set before
    }
}

// Longer than the pieces in which text is read.
TEST_F(Tokenize, LongTextIsTheSameInPieces) {
    std::string text;
    for (int i = 0; text.size() < 2500000; i++) text += "word" + std::to_string(i % 977) + (i % 13 ? " " : ".\n");
    const std::string in = input("long.txt", text);
    tokenize(options({in}));
    EXPECT_TRUE(documents_of(dir.file("out"), Split::train) == std::vector<std::string>{text});

    const auto words =
        make_word_tokenizer({"word", " ", "\n", ".", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}, "test");
    write_file(dir.file("words.json"), words->serialize());
    TokenizeOptions o = options({in});
    o.tokenizer = dir.file("words.json");
    o.out = dir.file("words");
    const DatasetInfo d = tokenize(o);
    std::vector<int32_t> expected = words->encode(text);
    expected.push_back(kWordEnd);
    EXPECT_TRUE(tokens_of(o.out, Split::train) == expected);
    EXPECT_EQ(d.train.text_bytes, int64_t(text.size()));
    EXPECT_EQ(d.tokenizer_kind, "word");
}

TEST_F(Tokenize, ReadsStandardInput) {
    std::istringstream in("typed\ntext");
    std::streambuf* old = std::cin.rdbuf(in.rdbuf());
    tokenize(options({"-", input("a.txt", "file")}));
    std::cin.rdbuf(old);
    std::cin.clear();
    EXPECT_EQ(documents_of(dir.file("out"), Split::train), (std::vector<std::string>{"typed\ntext", "file"}));
}

// A tokenizer of more than 65536 ids, whose separator begins a document.
class WideTokenizer : public Tokenizer {
public:
    std::string kind() const override { return "wide"; }
    int vocab_size() const override { return 100000; }
    std::vector<int> encode(std::string_view text) const override {
        std::vector<int> ids;
        for (unsigned char c : text) ids.push_back(70000 + c);
        return ids;
    }
    std::string decode(const std::vector<int>&) const override { return ""; }
    int separator_id() const override { return 99999; }
    bool separator_at_end() const override { return false; }
    std::string serialize() const override { return "wide"; }
    std::string file_name() const override { return "tokenizer.model"; }
};

TEST_F(Tokenize, WideVocabulariesAndLeadingSeparators) {
    const WideTokenizer t;
    DatasetWriter w(dir.file("out"), t);
    for (const char* text : {"ab", "", "c"}) {
        for (const char* p = text; *p; p++) w.add(Split::train, t.encode(std::string_view(p, 1)), 1);
        w.end_document(Split::train);
    }
    const DatasetInfo d = w.finish();
    EXPECT_EQ(tokens_of(dir.file("out"), Split::train), (std::vector<int32_t>{99999, 70097, 70098, 99999, 70099}));
    EXPECT_EQ(d.train.documents, 2);
    EXPECT_EQ(TokenStream({dir.file("out")}).shards()[0].width, 4);
    EXPECT_FALSE(read_dataset(dir.file("out")).separator_at_end);
    EXPECT_EQ(read_file(dir.file("out/tokenizer.model")), "wide");
}

// ---- validation
// -------------------------------------------------------------------------------------------------------

TEST_F(Tokenize, ValidationTakesWholeDocumentsBySeed) {
    const std::string in = numbered(200);
    std::vector<std::string> all;
    for (int i = 0; i < 200; i++) all.push_back("doc " + std::to_string(i));
    std::vector<std::vector<std::string>> choices;
    for (uint64_t seed : {42, 42, 7}) {
        TokenizeOptions o = options({in});
        o.force = true;
        o.seed = seed;
        o.val_documents = 15;
        tokenize(o);
        const auto train = documents_of(o.out, Split::train), val = documents_of(o.out, Split::val);
        EXPECT_EQ(val.size(), 15u);
        EXPECT_EQ(train.size(), 185u);
        std::vector<std::string> both = train, sorted = all;  // every document once, in the order of the input
        both.insert(both.end(), val.begin(), val.end());
        std::sort(both.begin(), both.end());
        std::sort(sorted.begin(), sorted.end());
        EXPECT_EQ(both, sorted);
        EXPECT_TRUE(std::is_sorted(val.begin(), val.end(), [](const auto& a, const auto& b) {
            return std::stoi(a.substr(4)) < std::stoi(b.substr(4));
        }));
        choices.push_back(val);
    }
    EXPECT_EQ(choices[0], choices[1]);
    EXPECT_NE(choices[0], choices[2]);

    TokenizeOptions o = options({in});
    o.force = true;
    o.val_fraction = 0.03;
    EXPECT_EQ(tokenize(o).val.documents, 6);
    o.val_fraction = 1e-9;
    EXPECT_EQ(tokenize(o).val.documents, 1);
}

TEST_F(Tokenize, ValidationThatCannotBeIsRefusedBeforeAnyWork) {
    const auto refused = [&](int64_t documents, double fraction, int inputs) {
        TokenizeOptions o = options({numbered(inputs)});
        o.val_documents = documents;
        o.val_fraction = fraction;
        const std::string line = refusal([&] { tokenize(o); }, kExitUsage);
        EXPECT_FALSE(fs::exists(o.out));
        return line;
    };
    EXPECT_NE(refused(3, 0, 3).find("validation takes 3 of 3 document(s)"), std::string::npos);
    EXPECT_NE(refused(0, 0.5, 1).find("validation takes 1 of 1 document(s)"), std::string::npos);
    EXPECT_NE(refused(-1, 0, 3).find("-1"), std::string::npos);
    EXPECT_NE(refused(0, 1, 3).find("val-fraction is 1"), std::string::npos);
    EXPECT_NE(refused(0, NAN, 3).find("val-fraction is nan"), std::string::npos);
    EXPECT_NE(refused(1, 0.1, 3).find("both"), std::string::npos);
    ASSERT_EQ(::mkfifo(dir.file("pipe.jsonl").c_str(), 0600), 0);
    TokenizeOptions o = options({dir.file("pipe.jsonl")});
    o.val_documents = 1;
    EXPECT_NE(refusal([&] { tokenize(o); }, kExitUsage).find("pipe.jsonl: not a regular file"), std::string::npos);
}

// ---- bad input
// --------------------------------------------------------------------------------------------------------

TEST_F(Tokenize, BadInputNamesFileAndLineAndLeavesNothing) {
    const auto refused = [&](const std::string& path, ExitCode code = kExitData) {
        const std::string line = refusal([&] { tokenize(options({input("good.txt", "good"), path})); }, code);
        EXPECT_FALSE(fs::exists(dir.file("out"))) << line;
        return line;
    };
    const auto bad_line = [&](const std::string& content) {
        return refused(input("b.jsonl", "{\"text\": \"a\"}\n\n" + content));
    };
    const std::string expected = ", expected an object with a string \"text\"";
    EXPECT_EQ(bad_line("{\"text\": \"torn"), dir.file("b.jsonl") + ":3: not JSON at byte 15" + expected);
    EXPECT_EQ(bad_line("[1]"), dir.file("b.jsonl") + ":3: array" + expected);
    EXPECT_EQ(bad_line("{\"txt\": 1}"), dir.file("b.jsonl") + ":3: no \"text\"" + expected);
    EXPECT_EQ(bad_line("{\"text\": null}"), dir.file("b.jsonl") + ":3: \"text\" is null" + expected);
    EXPECT_NE(bad_line("{\"text\": \"\xff\"}").find(":3: not JSON at byte"), std::string::npos);
    EXPECT_NE(bad_line("{\"text\": \"\\ud800\"}").find(":3: not JSON at byte"), std::string::npos);
    EXPECT_NE(bad_line("{\"text\": \"a\", \"x\": 1e999}").find(":3: not JSON"), std::string::npos);
    EXPECT_EQ(refused(dir.file("absent.txt")), dir.file("absent.txt") + ": no such file");
    EXPECT_NE(refused(dir.path()).find("a directory"), std::string::npos);
    EXPECT_NE(refused(input("x.parquet", "PAR1")).find("x.parquet: what it holds"), std::string::npos);
    EXPECT_NE(refusal([&] { tokenize(options({})); }, kExitUsage).find("no input"), std::string::npos);
    EXPECT_NE(refusal([&] { tokenize(options({"-", "-"})); }, kExitUsage).find("only once"), std::string::npos);
    EXPECT_NE(refusal([&] { tokenize(options({input("empty.txt", "")})); }).find("no text"), std::string::npos);
    TokenizeOptions o = options({input("good.txt", "good")});
    o.tokenizer = dir.file("absent.json");
    EXPECT_NE(refusal([&] { tokenize(o); }).find("absent.json"), std::string::npos);
    o = options({input("good.txt", "good")});
    o.shard_tokens = 0;
    EXPECT_NE(refusal([&] { tokenize(o); }, kExitUsage).find("shard size is 0"), std::string::npos);
    EXPECT_FALSE(fs::exists(dir.file("out")));
}

TEST_F(Tokenize, RefusesToOverwriteADataSetOrForeignFiles) {
    const std::string a = input("a.txt", "first"), b = input("b.txt", "second");
    tokenize(options({a}));
    EXPECT_NE(refusal([&] { tokenize(options({b})); }, kExitUsage).find("already holds a data set"), std::string::npos);
    EXPECT_EQ(documents_of(dir.file("out"), Split::train), std::vector<std::string>{"first"});

    TokenizeOptions force = options({b});
    force.force = true;
    write_file(dir.file("out/train_00007.bin"), "of an older set");
    tokenize(force);
    EXPECT_EQ(documents_of(dir.file("out"), Split::train), std::vector<std::string>{"second"});
    EXPECT_EQ(names_in(dir.file("out")),
              (std::vector<std::string>{"dataset.json", "tokenizer.json", "train_00000.bin"}));

    for (const char* name : {"thesis.txt", "train_.bin", "train_1x.bin", "train_00000.bin.bak", "val_0.txt"}) {
        write_file(dir.file("out/") + name, "mine");
        EXPECT_NE(refusal([&] { tokenize(force); }, kExitUsage).find(std::string("holds ") + name), std::string::npos);
        EXPECT_EQ(read_file(dir.file("out/") + name), "mine");
        fs::remove(dir.file("out/") + name);
    }
    // A failure leaves the old set as it was.
    force.inputs = {b, input("bad.jsonl", "?")};
    EXPECT_NE(refusal([&] { tokenize(force); }).find("bad.jsonl:1"), std::string::npos);
    EXPECT_EQ(documents_of(dir.file("out"), Split::train), std::vector<std::string>{"second"});
    EXPECT_EQ(names_in(dir.file("out")),
              (std::vector<std::string>{"dataset.json", "tokenizer.json", "train_00000.bin"}));
}

TEST_F(Tokenize, UsesAnEmptyDirectoryAndWhatAKilledOneLeft) {
    fs::create_directories(dir.file("out/.partial"));
    write_file(dir.file("out/.partial/train_00000.bin"), "torn");
    tokenize(options({input("a.txt", "text")}));
    EXPECT_EQ(names_in(dir.file("out")),
              (std::vector<std::string>{"dataset.json", "tokenizer.json", "train_00000.bin"}));
}

TEST_F(Tokenize, OnlyOneProcessWritesADirectory) {
    fs::create_directory(dir.file("out"));
    const int fd = ::open(dir.file("out").c_str(), O_RDONLY | O_DIRECTORY);
    ASSERT_EQ(::flock(fd, LOCK_EX), 0);
    EXPECT_NE(refusal([&] { tokenize(options({input("a.txt", "text")})); }, kExitFailure).find("another process"),
              std::string::npos);
    ::close(fd);
}

TEST_F(Tokenize, OutputThatCannotBeWrittenIsNamed) {
    const std::string in = input("a.txt", "text");
    TokenizeOptions o = options({in});
    o.out = in + "/below";  // below a file
    EXPECT_NE(refusal([&] { tokenize(o); }, kExitFailure).find("a.txt/below: cannot create"), std::string::npos);
    o.out = in;
    EXPECT_NE(refusal([&] { tokenize(o); }, kExitFailure).find("a.txt"), std::string::npos);
    o.out = "/proc/none";
    EXPECT_NE(refusal([&] { tokenize(o); }, kExitFailure).find("/proc/none: cannot create"), std::string::npos);
    EXPECT_EQ(read_file(in), "text");
}

// As on a full disk: writes begin to fail in the middle of a shard. In a child, as the limit is the process's.
TEST_F(Tokenize, AFullDiskLeavesNothing) {
    const std::string in = input("a.txt", std::string(3000000, 'x'));
    const pid_t child = ::fork();
    if (child == 0) {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{2000000, 2000000};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        int code = 0;
        try {
            tokenize(options({in}));
        } catch (const Error& e) {
            const std::string line = e.what();
            code = e.code == kExitFailure &&
                           line.find("train_00000.bin: cannot write: File too large") != std::string::npos
                       ? 7
                       : 8;
        }
        ::_exit(code);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 7);
    EXPECT_FALSE(fs::exists(dir.file("out")));
}

// The same through the program, which a file-size limit must not kill.
TEST_F(Tokenize, AFileSizeLimitIsAnErrorOfTheProgram) {
    REQUIRE_BAM();
    const std::string in = input("a.txt", std::string(3000000, 'x'));
    test::RunOptions o;
    o.program = "/bin/sh";
    const test::RunResult r = test::run_bam({"-c", "ulimit -f 1000; exec \"$@\"", "sh", test::bam_program(), "tokenize",
                                             "--tokenizer", "byte", "--out", dir.file("out"), in},
                                            o);
    EXPECT_EQ(r.code, kExitFailure) << r.err;
    EXPECT_NE(r.err.find("train_00000.bin: cannot write"), std::string::npos) << r.err;
    EXPECT_EQ(test::lines_of(r.err).size(), 1u) << r.err;
    EXPECT_FALSE(fs::exists(dir.file("out")));
}

// ---- reading dataset.json
// ---------------------------------------------------------------------------------------------

TEST_F(Tokenize, DatasetJsonIsCheckedKeyByKey) {
    tokenize(options({input("a.txt", "text")}));
    const auto good = nlohmann::json::parse(read_file(dir.file("out/dataset.json")));
    const auto refused = [&](const char* pointer, const nlohmann::json& value) {
        nlohmann::json j = good;
        j[nlohmann::json::json_pointer(pointer)] = value;
        write_file(dir.file("out/dataset.json"), j.dump());
        return refusal([&] { read_dataset(dir.file("out")); });
    };
    const std::string file = dir.file("out/dataset.json");
    EXPECT_EQ(refused("/format", "other"), file + ": format is \"other\", expected \"bam-dataset\"");
    EXPECT_EQ(refused("/version", 2), file + ": version is 2, expected 1");
    EXPECT_EQ(refused("/vocab_size", -1), file + ": vocab_size is -1, expected a whole number, not negative");
    EXPECT_EQ(refused("/vocab_size", 0), file + ": vocab_size is 0, expected 1 to 2147483647");
    EXPECT_EQ(refused("/vocab_size", 1ull << 63),
              file + ": vocab_size is 9223372036854775808, expected a whole number, not negative");
    EXPECT_EQ(refused("/separator/id", 257), file + ": separator.id is 257, expected an id below vocab_size 257");
    EXPECT_EQ(refused("/separator/position", "middle"),
              file + ": separator.position is \"middle\", expected \"end\" or \"start\"");
    EXPECT_EQ(refused("/tokenizer/fingerprint", "12"),
              file + ": tokenizer.fingerprint is \"12\", expected 16 hexadecimal digits");
    EXPECT_EQ(refused("/train/tokens", 6), file + ": train.tokens is 6, expected 5, the sum over its files");
    EXPECT_EQ(refused("/train/files", 6), file + ": train.files is 6, expected a list");
    EXPECT_EQ(refused("/train/files/0", 6), file + ": train.files[0] is 6, expected an object");
    EXPECT_EQ(refused("/train", nullptr), file + ": train is null, expected an object");
    nlohmann::json j = good;
    j.erase("train");
    write_file(file, j.dump());
    EXPECT_EQ(refusal([&] { read_dataset(dir.file("out")); }), file + ": train is missing, expected an object");
    write_file(file, "[]");
    EXPECT_NE(refusal([&] { read_dataset(dir.file("out")); }).find("expected an object"), std::string::npos);
    write_file(file, "{");
    EXPECT_NE(refusal([&] { read_dataset(dir.file("out")); }).find("not JSON"), std::string::npos);
    EXPECT_NE(refusal([&] { TokenStream s({dir.file("out")}, Split::val); }), "accepted");
}

}  // namespace
}  // namespace bam
