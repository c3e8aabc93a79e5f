#include "eval/generate.h"

#include <algorithm>
#include <memory>

#include "check.h"
#include "eval/session.h"
#include "random.h"

namespace bam {

namespace {

// Bytes at the end of `text` that begin a UTF-8 character but do not finish it.
size_t unfinished_bytes(const std::string& text) {
    for (size_t back = 1; back <= std::min<size_t>(4, text.size()); ++back) {
        const unsigned char c = text[text.size() - back];
        if ((c & 0xc0) == 0x80) continue;
        const size_t length = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return length > back ? back : 0;
    }
    return 0;
}

// Text of a growing list of ids. Tokenizers may drop or add a space at the start of what they decode, so a new token's text is
// what it adds to the text of a few tokens before it.
class TextStream {
public:
    TextStream(const Tokenizer& tokenizer, const std::vector<int>& prompt) : tokenizer_(tokenizer) {
        tail_.assign(prompt.end() - std::min<size_t>(prompt.size(), kContext), prompt.end());
        before_ = tokenizer_.decode(tail_);
    }
    std::string add(int id) {
        tail_.push_back(id);
        const std::string now = tokenizer_.decode(tail_);
        if (!now.starts_with(before_) || unfinished_bytes(now)) return "";
        const std::string added = now.substr(before_.size());
        before_ = now;
        if (tail_.size() > 4 * kContext) {
            tail_.erase(tail_.begin(), tail_.end() - kContext);
            before_ = tokenizer_.decode(tail_);
        }
        return added;
    }
    std::string rest() const {
        const std::string now = tokenizer_.decode(tail_);
        return now.starts_with(before_) ? now.substr(before_.size()) : "";
    }

private:
    static constexpr size_t kContext = 8;
    const Tokenizer& tokenizer_;
    std::vector<int> tail_;
    std::string before_;
};

// Characters at the end of text that may be the beginning of a stop string.
size_t held_back(const std::string& text, const std::vector<std::string>& stop) {
    size_t most = 0;
    for (const std::string& s : stop)
        for (size_t n = std::min(s.size() - 1, text.size()); n > most; --n)
            if (text.ends_with(std::string_view(s).substr(0, n))) most = n;
    return most;
}

struct Answer {
    Generated g;
    std::vector<int> seen;  // prompt and answer
    std::unique_ptr<TextStream> stream;
    size_t told = 0;
    bool done = false;
};

void tell(Answer& a, int row, size_t end, const TextSink& sink) {
    if (end <= a.told) return;
    if (sink.text) sink.text(row, a.g.text.substr(a.told, end - a.told));
    a.told = end;
}

void finish(Answer& a, int row, const char* why, const TextSink& sink) {
    a.done = true;
    a.g.stopped_by = why;
    tell(a, row, a.g.text.size(), sink);
    if (sink.done) sink.done(row);
}

void take(Answer& a, int row, int id, const Separator& separator, const SampleOptions& o, const TextSink& sink) {
    if (id == separator.id) {
        a.g.text += a.stream->rest();
        return finish(a, row, "separator", sink);
    }
    a.g.ids.push_back(id), a.seen.push_back(id);
    const bool last = int(a.g.ids.size()) == o.max_tokens;
    a.g.text += a.stream->add(id);
    if (last) a.g.text += a.stream->rest();
    size_t at = std::string::npos;
    for (const std::string& s : o.stop) at = std::min(at, a.g.text.find(s, a.told));
    if (at != std::string::npos) {
        a.g.text.resize(at);
        return finish(a, row, "stop", sink);
    }
    if (last) return finish(a, row, "length", sink);
    tell(a, row, a.g.text.size() - held_back(a.g.text, o.stop), sink);
}

}  // namespace

std::vector<int> prompt_ids(const Tokenizer& tokenizer, const Separator& separator, const std::string& prompt) {
    std::vector<int> ids = tokenizer.encode(prompt);
    if (separator.id >= 0 && (ids.empty() || !separator.at_end)) ids.insert(ids.begin(), separator.id);
    if (ids.empty()) throw Error(kExitUsage, "the prompt is empty and the model has no separator to begin a document with");
    return ids;
}

std::vector<Generated> generate(Reader& reader, const Tokenizer& tokenizer, const Separator& separator,
                                const std::vector<std::vector<int>>& prompts, const SampleOptions& o, const TextSink& sink) {
    check_sampling(o);
    const int B = int(prompts.size());
    std::vector<Answer> answers(B);
    std::vector<RowPart> parts(B);
    size_t longest = 0;
    for (int r = 0; r < B; ++r) {
        Answer& a = answers[r];
        a.seen = prompts[r];
        a.stream = std::make_unique<TextStream>(tokenizer, a.seen);
        parts[r] = {a.seen, int64_t(a.seen.size()) - 1};
        longest = std::max(longest, a.seen.size());
    }
    reader.start(B, int64_t(longest) + o.max_tokens);
    for (bool any = true; any;) {
        reader.feed(parts, [&](int r, int64_t, const float* logits) {
            const double u = random_uniform(o.seed, uint64_t(r), answers[r].g.ids.size());
            take(answers[r], r, pick_token(logits, reader.vocab_size(), answers[r].seen, o, u), separator, o, sink);
        });
        any = false;
        for (int r = 0; r < B; ++r) {
            parts[r] = {};
            if (answers[r].done) continue;
            parts[r] = {{answers[r].seen.back()}, 0};
            any = true;
        }
    }
    std::vector<Generated> result;
    for (Answer& a : answers) result.push_back(std::move(a.g));
    return result;
}

std::string sample_text(Model& model, const Tokenizer& tokenizer, const std::string& prompt, const SampleOptions& o) {
    Session session(model, {});
    const Separator separator = {tokenizer.separator_id(), tokenizer.separator_at_end()};
    return prompt + generate(session, tokenizer, separator, {prompt_ids(tokenizer, separator, prompt)}, o)[0].text;
}

}  // namespace bam
