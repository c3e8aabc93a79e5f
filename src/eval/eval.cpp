#include "eval/eval.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>

#include "check.h"
#include "corpus.h"
#include "device.h"
#include "eval/choice.h"
#include "eval/niah.h"
#include "eval/passkey.h"
#include "eval/perplexity.h"
#include "eval/runner.h"

namespace bam {

namespace fs = std::filesystem;

// The run directory a checkpoint lies in, or nothing.
static fs::path run_of(const std::string& model_directory) {
    const fs::path parent = fs::absolute(model_directory).lexically_normal().parent_path();
    return parent.filename() == "checkpoints" ? parent.parent_path() : fs::path();
}

std::string default_eval_directory(const std::string& model) {
    const std::string found = find_model(model);
    const fs::path run = run_of(found);
    return ((run.empty() ? fs::path(found) : run) / "eval").string();
}

namespace {

std::vector<int64_t> chosen_lengths(const EvalOptions& o, const LoadedModel& m) {
    std::vector<int64_t> lengths = o.lengths;
    if (lengths.empty()) {
        const int T = m.files.extras.seq_len;
        if (T == 0) throw Error(kExitUsage, "the model does not say how long its training rows were, expected --lengths");
        for (int64_t f = 1; f <= 16; f *= 2) lengths.push_back(f * T);
    }
    for (int64_t length : lengths)
        if (length < 1) throw Error(kExitUsage, "length " + std::to_string(length) + ", expected at least 1");
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    return lengths;
}

Suite passkey_suite(const EvalOptions& o, const LoadedModel& m) {
    PasskeyOptions p;
    p.lengths = chosen_lengths(o, m), p.samples = o.samples, p.seed = o.seed, p.position = parse_key_position(o.position);
    if (m.need_tokenizer().kind() == "word") p.allowed = is_held_out_key;  // bam make-corpus trains on the others
    return make_passkey(o.variant.empty() ? "paper" : o.variant, p, m.need_tokenizer());
}

Suite perplexity_suite(const EvalOptions& o, const LoadedModel& m) {
    PerplexityOptions p;
    p.lengths = chosen_lengths(o, m), p.stride = o.stride, p.tokens = o.tokens, p.document_mask = o.document_mask;
    p.data = m.files.extras.data;
    const fs::path run = run_of(m.files.path) / "run.json";  // names the files; a model directory knows only its documents
    if (o.data.empty() && p.data.val.empty() && fs::exists(run)) {
        const DataConfig d = load_config(run.string(), {}, "").data;
        p.data.train = d.train, p.data.val = d.val, p.data.val_tokens = d.val_tokens, p.data.val_gap = d.val_gap;
    }
    return make_perplexity(o.variant.empty() ? "windows" : o.variant, p, evaluation_tokens(p.data, o.data),
                           m.files.config.vocab_size);
}

Suite niah_suite(const EvalOptions& o, const LoadedModel& m) {
    NiahOptions n;
    n.lengths = chosen_lengths(o, m), n.samples = o.samples, n.seed = o.seed, n.essay_file = o.haystack;
    const DataConfig& d = m.files.extras.data;
    const Tokenizer& t = m.need_tokenizer();
    return make_niah(o.variant, n, t, d.has_separator ? Separator{d.separator_id, d.separator_at_end}
                                                      : Separator{t.separator_id(), t.separator_at_end()});
}

Suite make_suite(const std::string& name, const EvalOptions& o, const LoadedModel& m) {
    if (name == "passkey") return passkey_suite(o, m);
    if (name == "perplexity") return perplexity_suite(o, m);
    if (name == "niah") return niah_suite(o, m);
    if (name == "choice") return make_choice(o.variant, {o.items, o.samples}, m.need_tokenizer());
    throw Error(kExitUsage, "suite '" + name + "', expected passkey, niah, perplexity or choice");
}

Json describe_model(const LoadedModel& m, const std::string& hash) {
    return {{"path", m.files.path}, {"encoding", variant_of(m.files.config.position)}, {"parameters", m.model->table().total},
            {"weights", hash}, {"dtype", name_of(m.dtype)}, {"device", m.device->name()}};
}

}  // namespace

int evaluate(const EvalOptions& o) {
    if (o.suites.empty()) throw Error(kExitUsage, "no suite, expected some of passkey, niah, perplexity, choice");
    if (!o.variant.empty() && o.suites.size() > 1)
        throw Error(kExitUsage, "variant '" + o.variant + "' with several suites, expected one");
    LoadedModel m = open_loaded(o.model, o.load);
    const ModelConfig& c = m.files.config;
    std::vector<Suite> suites;
    for (const std::string& name : o.suites) suites.push_back(make_suite(name, o, m));

    SessionMemory most;
    for (const Suite& s : suites)
        for (const SuiteItem& item : s.items) {
            const SessionMemory p = plan_session(c, *m.device, m.dtype, item.rows, item.tokens, SessionOptions().chunk);
            if (p.total() <= most.total()) continue;
            most = p;
            require_memory(p, *m.device, s.name + " at " + std::to_string(item.tokens) + " tokens");
        }
    if (!o.quiet) std::printf("%s on %s in %s: %s\n", m.files.path.c_str(), m.device->name().c_str(), name_of(m.dtype),
                              describe(most).c_str());
    load(m);

    RunnerOptions r;
    char hash[20];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(m.weights_hash));
    r.out = o.out.empty() ? default_eval_directory(o.model) : o.out;
    r.model = describe_model(m, hash), r.trained_length = m.files.extras.seq_len, r.quiet = o.quiet;
    r.identity = std::string(hash) + to_json(c).dump() + name_of(m.dtype) + m.device->name() + (o.exact ? "exact" : "") +
                 std::to_string(m.tokenizer ? m.tokenizer->fingerprint() : 0);
    r.flops_linear = 2 * double(matmul_parameters(c) - int64_t(c.vocab_size) * c.dim);
    r.flops_quadratic = 2 * double(c.n_layers) * c.dim;
    Runner runner(r);
    if (o.minutes > 0)
        runner.set_deadline(std::chrono::steady_clock::now() + std::chrono::milliseconds(int64_t(o.minutes * 60000)));
    for (const Suite& s : suites) {
        SessionOptions options = m.session_options(s.name == "perplexity" && o.document_mask);
        options.skip_below = o.exact ? 0 : kSkipBelow;
        options.on_chunk = [&](int64_t tokens) { runner.on_chunk(tokens); };
        Session session(*m.model, options);
        const Runner::End end = runner.run(s, session);
        if (end == Runner::End::interrupted) return kExitInterrupted;
        if (end == Runner::End::out_of_time && !o.quiet)
            std::printf("the %g minutes are over; the same command goes on\n", o.minutes);
    }
    return kExitDone;
}

}  // namespace bam
