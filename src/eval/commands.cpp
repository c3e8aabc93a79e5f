#include "eval/commands.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "check.h"
#include "eval/generate.h"
#include "eval/score.h"
#include "json.h"

namespace bam {

static std::vector<int> ids_to_score(const ScoreCommand& c, const LoadedModel& m) {
    const int V = m.files.config.vocab_size;
    if (!c.tokens.empty()) return read_token_file(c.tokens, V);
    const std::vector<int> ids = m.need_tokenizer().encode(read_text_file(c.text, kExitData));
    if (ids.empty()) throw Error(kExitData, c.text + ": holds no text");
    return ids;
}

// Documents as the model was trained on them, else as the command says. A model made by others names no separator: then it
// is the config's default, token 2 at a document's end, and the user is told.
static SessionOptions documents_to_score(const ScoreCommand& c, const LoadedModel& m) {
    SessionOptions options = m.session_options(c.document_mask);
    DataConfig& d = options.data;
    if (c.positions == "row" || c.positions == "document") d.positions_by_document = c.positions == "document";
    if (c.separator >= m.files.config.vocab_size)
        throw Error(kExitUsage, "separator " + std::to_string(c.separator) + ", expected below the model's vocab_size " +
                                    std::to_string(m.files.config.vocab_size));
    if (c.separator >= 0) {
        d.separator_id = int(c.separator);
        d.separator_at_end = c.separator_position != "start";
    } else if (c.document_mask && !d.has_separator) {
        d.separator_id = 2;
        d.separator_at_end = true;
        std::fprintf(stderr, "%s names no separator: documents end with token 2 (--separator tells otherwise)\n",
                     m.files.path.c_str());
    }
    d.has_separator = d.has_separator || c.document_mask;
    return options;
}

int score_command(const ScoreCommand& c) {
    if (c.tokens.empty() == c.text.empty()) throw Error(kExitUsage, "score reads one file, expected --tokens FILE or --text FILE");
    if (c.context < 0 || c.stride < 0) throw Error(kExitUsage, "context and stride are numbers of tokens, expected 1 or more");
    if (c.stride && !c.context) throw Error(kExitUsage, "stride " + std::to_string(c.stride) + " without --context");
    if (c.stride > c.context)
        throw Error(kExitUsage, "stride " + std::to_string(c.stride) + ", expected at most the context of " + std::to_string(c.context));
    LoadedModel m = open_loaded(c.model, c.load);
    const std::vector<int> ids = ids_to_score(c, m);
    const int64_t n = int64_t(ids.size());
    check_memory(m, 1, c.context ? std::min(n, c.context) : n, "scoring " + std::to_string(n) + " tokens");
    load(m);
    SessionOptions options = documents_to_score(c, m);
    options.skip_below = c.exact ? 0 : kSkipBelow;
    Session session(*m.model, options);
    const std::vector<double> logprobs = score_tokens(session, ids, c.context, c.stride ? c.stride : c.context);
    for (size_t i = 0; i < ids.size(); ++i) {
        if (i == 0) std::printf("{\"id\":%d,\"logprob\":null}\n", ids[i]);
        else if (std::isfinite(logprobs[i])) std::printf("{\"id\":%d,\"logprob\":%.9g}\n", ids[i], logprobs[i]);
        else throw Error(kExitData, c.model + ": the log-probability of token " + std::to_string(i) + " is not finite");
    }
    return kExitDone;
}

namespace {

// Texts of several prompts on one stream: the first unfinished one is shown as it comes, later ones when it is their turn.
class InOrder {
public:
    explicit InOrder(const std::vector<std::string>& prompts) : waiting_(prompts), done_(prompts.size()) { show(); }
    void add(int r, const std::string& text) {
        waiting_[r] += text;
        show();
    }
    void finish(int r) {
        done_[r] = true;
        show();
    }

private:
    void show() {
        while (turn_ < waiting_.size()) {
            std::fwrite(waiting_[turn_].data(), 1, waiting_[turn_].size(), stdout);
            waiting_[turn_].clear();
            if (!done_[turn_]) break;
            std::printf("\n");
            if (++turn_ < waiting_.size()) std::printf("\n");
        }
        std::fflush(stdout);
    }
    std::vector<std::string> waiting_;
    std::vector<bool> done_;
    size_t turn_ = 0;
};

void print_json(const GenerateCommand& c, const std::vector<Generated>& texts) {
    for (size_t r = 0; r < texts.size(); ++r) {
        const nlohmann::ordered_json j = {{"prompt", c.prompts[r]}, {"text", texts[r].text}, {"ids", texts[r].ids},
                                          {"stopped_by", texts[r].stopped_by}};
        std::printf("%s\n", j.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
    }
}

}  // namespace

int generate_command(const GenerateCommand& c) {
    check_sampling(c.sample);
    if (c.prompts.empty()) throw Error(kExitUsage, "no prompt, expected --prompt TEXT");
    LoadedModel m = open_loaded(c.model, c.load);
    const Tokenizer& tokenizer = m.need_tokenizer();
    const DataConfig& d = m.files.extras.data;
    const Separator separator = d.has_separator ? Separator{d.separator_id, d.separator_at_end}
                                                : Separator{tokenizer.separator_id(), tokenizer.separator_at_end()};
    std::vector<std::vector<int>> ids;
    size_t longest = 0;
    for (const std::string& p : c.prompts) {
        ids.push_back(prompt_ids(tokenizer, separator, p));
        longest = std::max(longest, ids.back().size());
    }
    check_memory(m, int(ids.size()), int64_t(longest) + c.sample.max_tokens, "generating");
    load(m);
    Session session(*m.model, m.session_options(d.document_mask));
    if (c.json) {
        print_json(c, generate(session, tokenizer, separator, ids, c.sample));
        return kExitDone;
    }
    InOrder out(c.prompts);
    generate(session, tokenizer, separator, ids, c.sample, {[&](int r, const std::string& text) { out.add(r, text); },
                                                            [&](int r) { out.finish(r); }});
    return kExitDone;
}

}  // namespace bam
