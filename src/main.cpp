// The command line (DESIGN §4): one function for each subcommand. Errors become one line and an exit code here and nowhere else.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>
#include <new>

#include "bench.h"
#include "check.h"
#include "compare.h"
#include "config.h"
#include "corpus.h"
#include "data_tools.h"
#include "eval/commands.h"
#include "eval/eval.h"
#include "eval/inspect.h"
#include "info.h"
#include "interrupt.h"
#include "report.h"
#include "tokenize.h"
#include "trainer.h"

namespace bam {
namespace {

// What a subcommand does once parsed; its result is the exit code.
using Action = std::function<int()>;

const char* kVariantHelp =
    "positional encoding: nope, sinusoidal, rope (rotary), alibi, bam (ggd_bam), each also with _ssmax";

// CLI11's own tell the largest double, in 309 digits.
CLI::Validator number(const char* name, const char* expected, bool (*holds)(double)) {
    const auto check = [=](std::string& text) {
        double x = 0;
        return CLI::detail::lexical_cast(text, x) && holds(x) ? std::string() : text + ", expected " + expected;
    };
    return CLI::Validator(check, name);
}
const CLI::Validator kPositive = number("POSITIVE", "a number above 0", [](double x) { return x > 0; });
const CLI::Validator kNonNegative = number("NONNEGATIVE", "a number, 0 or above", [](double x) { return x >= 0; });

void add_train(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("train", "Train a model from a config; the same command goes on after a stop");
    struct Arguments {
        std::string config, pe, out, device;
        std::vector<std::string> sets;
        int ranks = 1;
        TrainOptions options;
    };
    auto a = std::make_shared<Arguments>();
    cmd->add_option("config", a->config, "config file (JSON)")->required();
    cmd->add_option("--pe", a->pe, kVariantHelp);
    cmd->add_option("--set", a->sets, "override a config key: a.b=value (repeatable)")->allow_extra_args(false);
    cmd->add_option("--out", a->out, "directory of run directories (run.out)");
    cmd->add_option("--resume", a->options.resume, "auto: newest good checkpoint, if any; no: start afresh; or a checkpoint")
        ->capture_default_str();
    cmd->add_flag("--force-resume", a->options.force_resume, "resume although the config or the data differ");
    cmd->add_option("--stop-at", a->options.stop_at, "save after this step and exit with 75")->check(kPositive);
    cmd->add_option("--ranks", a->ranks, "processes to train with")->check(CLI::Range(1, 1))->capture_default_str();
    cmd->add_option("--device", a->device, "auto, cpu or cuda (run.device)")->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    cmd->add_flag("--dry-run", a->options.dry_run, "print parameters, memory, steps and tokens, and stop");
    cmd->callback([a, &action] {
        action = [a] {
            if (!a->out.empty()) a->sets.push_back("run.out=" + a->out);
            if (!a->device.empty()) a->sets.push_back("run.device=" + a->device);
            a->options.config = load_config(a->config, a->sets, a->pe);
            return train(a->options);
        };
    });
}

void add_tokenize(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("tokenize", "Turn text into token shards and a dataset.json");
    auto o = std::make_shared<TokenizeOptions>();
    cmd->add_option("inputs", o->inputs, "text files (a document each), .jsonl files (a \"text\" field a line), - for stdin")
        ->required();
    cmd->add_option("--tokenizer", o->tokenizer, "tokenizer file, its directory, or \"byte\"")->required();
    cmd->add_option("--out", o->out, "directory for the shards")->required();
    cmd->add_option("--val-fraction", o->val_fraction, "share of the documents for validation, chosen by --seed")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    cmd->add_option("--val-documents", o->val_documents, "number of documents for validation, chosen by --seed")
        ->check(kNonNegative)
        ->capture_default_str();
    cmd->add_option("--seed", o->seed, "which documents are for validation")->capture_default_str();
    cmd->add_option("--shard-tokens", o->shard_tokens, "tokens a shard")->check(kPositive)->capture_default_str();
    cmd->add_flag("--force", o->force, "replace a data set that is there");
    cmd->callback([o, &action] {
        action = [o] {
            print_dataset(tokenize(*o), std::cout);
            return int(kExitDone);
        };
    });
}

void add_data(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("data", "Look at token shards");
    cmd->require_subcommand(1);
    auto o = std::make_shared<DataInfoOptions>();
    auto vocab_size = std::make_shared<int64_t>(0);
    CLI::App* info = cmd->add_subcommand("info", "Format, tokens, documents and size of shards");
    CLI::App* verify = cmd->add_subcommand("verify", "Read every token; exit 3 naming the first bad byte");
    for (CLI::App* c : {info, verify})
        c->add_option("shards", o->patterns, "shards, globs, or directories with dataset.json")->required();
    info->add_flag("--json", o->json, "as JSON");
    info->add_option("--separator", o->separator_id, "token id that separates documents (default: what dataset.json says)")
        ->check(kNonNegative);
    verify->add_option("--vocab-size", *vocab_size, "ids must be below this (default: what dataset.json says)")
        ->check(kPositive);
    info->callback([o, &action] {
        action = [o] {
            data_info(*o, std::cout);
            return int(kExitDone);
        };
    });
    verify->callback([o, vocab_size, &action] {
        action = [o, vocab_size] {
            data_verify(o->patterns, *vocab_size, std::cout);
            return int(kExitDone);
        };
    });
}

void add_compare(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("compare", "Train and evaluate every encoding x seed of one config; one table");
    struct Arguments {
        CompareOptions options;
        std::string device;
    };
    auto a = std::make_shared<Arguments>();
    CompareOptions& o = a->options;
    cmd->add_option("config", o.config, "config file (JSON)")->required();
    cmd->add_option("--pe", o.pe, "\"all\", or encodings separated by commas")->capture_default_str();
    cmd->add_option("--extra", o.extra, "a further variant: \"NAME: PE key=value ...\" (repeatable)")->allow_extra_args(false);
    cmd->add_option("--seeds", o.seeds, "seeds for each, from run.seed on")->check(CLI::Range(1, 1000))->capture_default_str();
    cmd->add_option("--jobs", o.jobs, "runs at a time, sharing the cores")->check(CLI::Range(1, 256))->capture_default_str();
    cmd->add_option("--out", o.out, "directory for all of it (default: <run.out>/<run.name>-compare)");
    cmd->add_option("--set", o.sets, "override a config key for all: a.b=value (repeatable)")->allow_extra_args(false);
    cmd->add_option("--device", a->device, "auto, cpu or cuda (run.device)")->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    cmd->callback([a, &action] {
        action = [a] {
            if (!a->device.empty()) a->options.sets.push_back("run.device=" + a->device);
            return compare(a->options);
        };
    });
}

void add_make_corpus(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("make-corpus", "Write documents that ask for facts stated earlier, to compare encodings on");
    auto o = std::make_shared<CorpusOptions>();
    cmd->add_option("--out", o->out, "directory for the data set")->required();
    cmd->add_option("--tokens", o->tokens, "training tokens")->check(kPositive)->capture_default_str();
    cmd->add_option("--val-tokens", o->val_tokens, "validation tokens")->check(kNonNegative)->capture_default_str();
    cmd->add_option("--seq-len", o->seq_len, "longest document in tokens; rows of this length hold whole documents")
        ->check(kPositive)
        ->capture_default_str();
    cmd->add_option("--seed", o->seed, "the same seed writes the same bytes")->capture_default_str();
    cmd->add_flag("--force", o->force, "replace a data set that is there");
    cmd->callback([o, &action] {
        action = [o] {
            make_corpus(*o);
            return int(kExitDone);
        };
    });
}

void add_bench(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("bench", "Measure speed against the machine's own matrix multiply");
    cmd->require_subcommand(1);
    auto o = std::make_shared<BenchOptions>();
    CLI::App* train = cmd->add_subcommand("train", "Whole training steps on random tokens: tok/s, utilization, time by op");
    CLI::App* ops = cmd->add_subcommand("ops", "Each op alone at the model's shapes, against its floor");
    CLI::App* attention = cmd->add_subcommand("attention", "Attention of one layer, forward and backward: encodings and lengths side by side");
    for (CLI::App* c : {train, ops}) {
        c->add_option("--pe", o->pe, kVariantHelp)->capture_default_str();
        c->add_option("--vocab-size", o->vocab_size, "ids")->check(kPositive)->capture_default_str();
        c->add_option("--seq-len", o->seq_len, "tokens a row")->check(kPositive)->capture_default_str();
        c->add_option("--layers", o->layers, "layers, 0: the preset's")->check(kNonNegative)->capture_default_str();
        c->add_option("--micro-batch", o->micro_batch, "rows at a time, 0: chosen")->check(kNonNegative)->capture_default_str();
        c->add_option("--recompute", o->recompute, "none, attention or block")->capture_default_str();
    }
    auto variants = std::make_shared<std::vector<std::string>>(std::vector<std::string>{"all"});
    auto lengths = std::make_shared<std::vector<int>>(std::vector<int>{512, 2048});
    attention->add_option("--pe", *variants, "\"all\", or encodings separated by commas")->delimiter(',')->capture_default_str();
    attention->add_option("--seq-len", *lengths, "tokens a row, several with commas")->delimiter(',')->check(kPositive)->capture_default_str();
    for (CLI::App* c : {train, ops, attention}) {
        c->add_option("--model", o->preset, "preset: nano, l6, l8, l12, l15, l18, l24")->capture_default_str();
        c->add_option("--tokens", o->tokens, "tokens a step")->check(kPositive)->capture_default_str();
        c->add_option("--steps", o->steps, "steps measured, after one to warm up")->check(kPositive)->capture_default_str();
        c->add_option("--dtype", o->dtype, "auto, fp32 or bf16")->capture_default_str();
        c->add_option("--device", o->device, "auto, cpu or cuda")->capture_default_str();
        c->add_option("--threads", o->threads, "0: all")->check(kNonNegative)->capture_default_str();
        c->add_flag("--json", o->json, "as JSON");
    }
    train->callback([o, &action] { action = [o] { return bench_train(*o); }; });
    ops->callback([o, &action] { action = [o] { return bench_ops(*o); }; });
    attention->callback([=, &action] { action = [=] { return bench_attention(*o, *variants, *lengths); }; });
}

void add_report(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("report", "Pictures of runs or a comparison: report.html and PNG files (needs python3-matplotlib)");
    struct Arguments {
        std::vector<std::string> directories;
        std::string out, title;
    };
    auto a = std::make_shared<Arguments>();
    cmd->add_option("runs", a->directories, "run directories, or the directory of a comparison")->required();
    cmd->add_option("--out,-o", a->out, "directory for report.html and the PNG files (default: report in the first one)");
    cmd->add_option("--title", a->title, "headline");
    cmd->callback([a, &action] { action = [a] { return report(a->directories, a->out, a->title); }; });
}

void add_load_options(CLI::App* cmd, LoadOptions& o) {
    cmd->add_option("--device", o.device, "auto, cpu or cuda")->check(CLI::IsMember({"auto", "cpu", "cuda"}))->capture_default_str();
    cmd->add_option("--dtype", o.dtype, "auto (bf16 where the hardware multiplies it), fp32 or bf16")
        ->check(CLI::IsMember({"auto", "fp32", "bf16"}))
        ->capture_default_str();
    cmd->add_option("--threads", o.threads, "0: all")->check(kNonNegative)->capture_default_str();
    cmd->add_option("--tokenizer", o.tokenizer, "tokenizer file, instead of the one the model remembers");
}

const char* kModelHelp = "model directory, checkpoint, or run directory (its newest good checkpoint)";

void add_eval(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("eval", "Find out how far a model reads; the same command goes on after a stop");
    auto o = std::make_shared<EvalOptions>();
    cmd->add_option("model", o->model, kModelHelp)->required();
    cmd->add_option("--suite", o->suites, "passkey, niah, perplexity, choice; several with commas")->delimiter(',')->required();
    cmd->add_option("--variant", o->variant,
                    "passkey: paper, landmark; niah: single_1 ... multiquery, several with commas; perplexity: windows, sliding, "
                    "by_position; choice: arc, hellaswag, mmlu, mmlu_cloze");
    cmd->add_option("--lengths", o->lengths, "tokens, with commas (passkey landmark: characters); default: 1 to 16 training lengths")
        ->delimiter(',')
        ->check(kPositive);
    cmd->add_option("--samples", o->samples, "items a length; choice: a file (0: 20, landmark 50, choice all)")
        ->check(kNonNegative)
        ->capture_default_str();
    cmd->add_option("--seed", o->seed, "of the random keys, words and places")->capture_default_str();
    cmd->add_option("--minutes", o->minutes, "stop after about so many minutes, 0: no limit")
        ->check(kNonNegative)
        ->capture_default_str();
    cmd->add_flag("--exact", o->exact, "compute every key block, also those whose weights are below 1e-9 of their row");
    cmd->add_option("--out", o->out, "directory of the results (default: eval/ of the run or the model)");
    cmd->add_option("--position", o->position, "passkey: where the key stands: equidistant, random, beginning or end")
        ->capture_default_str();
    cmd->add_option("--data", o->data, "perplexity: token shards (default: the model's validation data)");
    cmd->add_option("--tokens", o->tokens, "perplexity: tokens scored at each length, 0: all")
        ->check(kNonNegative)
        ->capture_default_str();
    cmd->add_option("--stride", o->stride, "perplexity sliding: tokens between windows (0: half the length)")
        ->check(kNonNegative)
        ->capture_default_str();
    cmd->add_flag("--document-mask", o->document_mask, "perplexity: attention stays inside documents");
    cmd->add_option("--haystack", o->haystack, "niah: text file for the tasks with an essay");
    cmd->add_option("--items", o->items, "choice: JSONL files of ARC, HellaSwag or MMLU items");
    add_load_options(cmd, o->load);
    cmd->callback([o, &action] {
        action = [o] {
            catch_interrupts();
            return evaluate(*o);
        };
    });
}

void add_score(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("score", "Print the log-probability of every token: a JSON line each, id and logprob");
    auto o = std::make_shared<ScoreCommand>();
    cmd->add_option("model", o->model, kModelHelp)->required();
    cmd->add_option("--tokens", o->tokens, "token shard, or ids as text");
    cmd->add_option("--text", o->text, "text file");
    cmd->add_flag("--document-mask", o->document_mask, "attention stays inside documents (default: it crosses separators)");
    cmd->add_option("--separator", o->separator, "token id that separates documents (default: the model's, else 2)")
        ->check(kNonNegative);
    cmd->add_option("--separator-position", o->separator_position, "of --separator: end or start of a document (default: end)")
        ->check(CLI::IsMember({"end", "start"}));
    cmd->add_option("--positions", o->positions, "with --document-mask, counted by document or row (default: the model's)")
        ->check(CLI::IsMember({"document", "row"}));
    cmd->add_option("--context", o->context, "tokens a window, 0: everything at once")->check(kNonNegative)->capture_default_str();
    cmd->add_option("--stride", o->stride, "tokens between windows, 0: the context")->check(kNonNegative)->capture_default_str();
    cmd->add_flag("--exact", o->exact, "compute every key block, also those whose weights are below 1e-9 of their row");
    add_load_options(cmd, o->load);
    cmd->callback([o, &action] { action = [o] { return score_command(*o); }; });
}

void add_generate(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("generate", "Continue a prompt, printing text as it comes");
    auto o = std::make_shared<GenerateCommand>();
    o->sample.temperature = 0.8;
    SampleOptions& s = o->sample;
    cmd->add_option("model", o->model, kModelHelp)->required();
    cmd->add_option("--prompt", o->prompts, "text to continue (repeatable)")->required()->allow_extra_args(false);
    cmd->add_option("-n,--max-tokens", s.max_tokens, "tokens at most")->capture_default_str();
    cmd->add_option("--temperature", s.temperature, "0: always the likeliest token")->capture_default_str();
    cmd->add_option("--top-k", s.top_k, "only the k likeliest, 0: all")->capture_default_str();
    cmd->add_option("--top-p", s.top_p, "only the likeliest that reach p together")->capture_default_str();
    cmd->add_option("--min-p", s.min_p, "only those at least so many times as likely as the likeliest")->capture_default_str();
    cmd->add_option("--repetition-penalty", s.repetition_penalty, "above 1: tokens already in the text become less likely")
        ->capture_default_str();
    cmd->add_option("--stop", s.stop, "text that ends the answer (repeatable)")->allow_extra_args(false);
    cmd->add_option("--seed", s.seed, "of the draws")->capture_default_str();
    cmd->add_flag("--json", o->json, "a JSON line for each prompt when all are done");
    add_load_options(cmd, o->load);
    cmd->callback([o, &action] { action = [o] { return generate_command(*o); }; });
}

void add_inspect(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("inspect", "Show each head's prior over distance, and where it looks in a prompt");
    auto o = std::make_shared<InspectCommand>();
    cmd->add_option("model", o->model, kModelHelp)->required();
    cmd->add_option("--prompt", o->prompt, "text; shown is the attention of its last token");
    cmd->add_option("--span", o->span, "part of the prompt whose share of the attention is shown");
    cmd->add_option("--passkey", o->passkey, "the passkey task's prompt of so many tokens, the key in the middle and marked")
        ->check(kPositive);
    cmd->add_option("--length", o->length, "tokens the prior's mass spreads over (default: the prompt's, or the trained length)")
        ->check(kPositive);
    cmd->add_option("--seed", o->seed, "of the pass key")->capture_default_str();
    cmd->add_option("--out", o->out, "JSON file (default: eval/inspect.json of the run when there is a prompt)");
    cmd->add_flag("--json", o->json, "JSON instead of the table");
    add_load_options(cmd, o->load);
    cmd->callback([o, &action] { action = [o] { return inspect_command(*o); }; });
}

void add_info(CLI::App& app, Action& action) {
    CLI::App* cmd = app.add_subcommand("info", "Device, threads, instruction set, libraries, build");
    struct Arguments {
        std::string device = "auto";
        bool json = false;
    };
    auto a = std::make_shared<Arguments>();
    cmd->add_option("--device", a->device, "auto, cpu or cuda")->capture_default_str();
    cmd->add_flag("--json", a->json, "as JSON");
    cmd->callback([a, &action] { action = [a] { return print_info(a->device, a->json); }; });
}

int run(int argc, char** argv) {
    CLI::App app("bam: pretrain GPT-style decoders and find out which positional encoding reads beyond its training length", "bam");
    app.require_subcommand(1);
    app.footer("Exit codes: 0 done, 1 failure (disk, memory), 2 usage or config, 3 data or model, 4 diverged, 5 a peer was lost, "
               "75 stopped after saving.\n`bam COMMAND --help` tells more.");
    Action action;
    for (auto add : {add_train, add_compare, add_eval, add_score, add_generate, add_inspect, add_tokenize, add_make_corpus,
                     add_data, add_bench, add_report, add_info})
        add(app, action);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp& e) {
        return app.exit(e);
    } catch (const CLI::CallForAllHelp& e) {
        return app.exit(e);
    } catch (const CLI::ParseError& e) {
        std::fprintf(stderr, "bam: %s (bam --help lists commands and options)\n", e.what());
        return kExitUsage;
    }
    return action();
}

}  // namespace
}  // namespace bam

int main(int argc, char** argv) {
    bam::follow_parent();
    std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error of write(), in every command
    try {
        return bam::run(argc, argv);
    } catch (const bam::Error& e) {
        std::fprintf(stderr, "bam: %s\n", e.what());
        return e.code;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "bam: out of memory\n");
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bam: %s\n", e.what());
    }
    return bam::kExitFailure;
}
