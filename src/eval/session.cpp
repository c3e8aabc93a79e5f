#include "eval/session.h"

#include <algorithm>

#include "check.h"
#include "device.h"
#include "plan.h"

namespace bam {

// ---- memory -----------------------------------------------------------------------------------------------------------

static int64_t chunk_tokens(int rows, int chunk) { return std::max(1, chunk / rows); }

// Room for a row's tokens and, when rows differ in length, for the padding written behind the shorter ones.
static int64_t cache_capacity(int rows, int64_t capacity, int chunk) {
    return std::max<int64_t>(1, capacity) + (rows > 1 ? chunk_tokens(rows, chunk) : 0);
}

SessionMemory plan_session(const ModelConfig& m, const Backend& device, DType compute, int rows, int64_t capacity, int chunk) {
    const int64_t T = chunk_tokens(rows, chunk), S = cache_capacity(rows, capacity, chunk);
    SessionMemory p;
    p.weights = 4 * make_parameter_table(m).total + copy_bytes(m, device, compute, true);
    p.cache = Model::cache_bytes(m, rows, S, compute);
    p.activations = Model::activation_bytes(m, compute, rows, int(T), Keep::nothing);
    if (has_prior(m.position.encoding))
        p.tables = int64_t(m.position.encoding == Encoding::bam && !m.position.bam_global ? m.n_layers : 1) * m.n_heads * S * 4;
    return p;
}

std::string describe(const SessionMemory& p) {
    std::string text = human_bytes(double(p.total())) + " (weights " + human_bytes(double(p.weights)) + ", KV cache " +
                       human_bytes(double(p.cache)) + ", activations " + human_bytes(double(p.activations));
    if (p.tables) text += ", prior tables " + human_bytes(double(p.tables));
    return text + ")";
}

void require_memory(const SessionMemory& plan, const Backend& device, const std::string& what) {
    if (plan.total() > device.total_memory())
        throw Error(kExitFailure, what + " needs " + describe(plan) + ", and " + device.name() + " has " +
                                      human_bytes(double(device.total_memory())) + " in all");
}

// ---- reading ----------------------------------------------------------------------------------------------------------

Session::Session(Model& model, SessionOptions options) : model_(model), options_(std::move(options)) {}

void Session::start(int rows, int64_t capacity) {
    const int64_t wanted = cache_capacity(rows, capacity, options_.chunk);
    if (cache_.B != rows || cache_.capacity < wanted) {
        cache_ = KvCache();  // first release, then allocate
        cache_ = model_.make_cache(rows, wanted);
        loss_memory_ = make_arena(model_.device(), [&](Arena& a) {
            losses_ = a.take(DType::f32, {rows * chunk_tokens(rows, options_.chunk)});
        });
        kept_.clear(), reusable_ = 0;
    }
    capacity_ = capacity;
    rows_.assign(rows, {});
}

// Puts an only, still empty row behind what the cache already holds of it, and says how many tokens that is.
int64_t Session::reuse(Ids ids, int64_t first_wanted) {
    if (rows_.size() != 1) return 0;
    Row& row = rows_[0];
    int64_t common = 0;
    if (row.length == 0) {
        const int64_t most = std::min({reusable_, first_wanted, int64_t(ids.size())});
        while (common < most && ids[common] == kept_[common]) ++common;
        reusable_ = common = common / options_.chunk * options_.chunk;
        kept_.clear();
        for (int64_t i = 0; i < common; ++i) enter(row, ids[i]);
    }
    kept_.insert(kept_.end(), ids.begin(), ids.end());
    return common;
}

// The row's next tokens into the chunk, with what attention needs to know of documents; the rest is padding that sees itself.
void Session::fill_row(Chunk& c, int r, Ids ids, Ids targets) {
    Row& row = rows_[r];
    Batch& b = c.batch;
    const size_t at = size_t(r) * b.T;
    b.offset[r] = int32_t(row.length);
    for (int t = 0; t < c.counts[r]; ++t) {
        const int64_t i = c.begin[r] + t;
        if (ids[i] < 0 || ids[i] >= vocab_size())
            throw Error(kExitData, "token id " + std::to_string(ids[i]) + " at index " + std::to_string(i) +
                                       ", expected below vocab_size " + std::to_string(vocab_size()));
        const Place place = enter(row, ids[i]);
        b.ids[at + t] = ids[i], b.key_begin[at + t] = int32_t(place.key_begin), b.positions[at + t] = int32_t(place.position);
        if (!targets.empty()) b.targets[at + t] = targets[i];
    }
    for (int t = c.counts[r]; t < b.T; ++t) b.ids[at + t] = 0, b.key_begin[at + t] = b.offset[r] + t;
}

// Padding stands at a position that is needed anyway: tables of positions cover the span of a batch.
static void place_padding(Batch& b, const std::vector<int>& counts) {
    const auto used = std::find_if(counts.begin(), counts.end(), [](int n) { return n > 0; }) - counts.begin();
    for (int r = 0; r < b.B; ++r)
        std::fill(b.positions.begin() + int64_t(r) * b.T + counts[r], b.positions.begin() + int64_t(r + 1) * b.T,
                  b.positions[used * b.T]);
}

// Counts the row's next token.
Session::Place Session::enter(Row& row, int id) const {
    const DataConfig& d = options_.data;
    const bool mask = options_.document_mask && d.has_separator, separator = mask && id == d.separator_id;
    if (separator && !d.separator_at_end) row.document_begin = row.length;
    const Place p = {row.document_begin, mask && d.positions_by_document ? row.length - row.document_begin : row.length};
    ++row.length;
    if (separator && d.separator_at_end) row.document_begin = row.length;
    return p;
}

void Session::read(const std::vector<Ids>& ids, const std::vector<Ids>& targets, int64_t first_wanted,
                   const std::function<void(const Chunk&)>& visit) {
    const int B = int(rows_.size());
    for (int r = 0; r < B; ++r)
        if (rows_[r].length + int64_t(ids[r].size()) > capacity_)
            throw Error(kExitFailure, "row of " + std::to_string(rows_[r].length + int64_t(ids[r].size())) +
                                          " tokens in a session with room for " + std::to_string(capacity_));
    Chunk c;
    c.counts.assign(B, 0), c.begin.assign(B, 0);
    c.begin[0] = reuse(ids[0], first_wanted);
    c.batch.B = B, c.batch.offset.resize(B);
    for (;;) {
        int64_t most = 0, tokens = 0;
        for (int r = 0; r < B; ++r) most = std::max(most, int64_t(ids[r].size()) - c.begin[r]);
        if (most == 0) return;
        c.batch.T = int(std::min(most, chunk_tokens(B, options_.chunk)));
        const size_t N = size_t(B) * c.batch.T;
        c.batch.ids.resize(N), c.batch.key_begin.resize(N), c.batch.positions.resize(N);
        if (!targets.empty()) c.batch.targets.resize(N);
        for (int r = 0; r < B; ++r) {
            c.counts[r] = int(std::min<int64_t>(int64_t(ids[r].size()) - c.begin[r], c.batch.T));
            fill_row(c, r, ids[r], targets.empty() ? Ids() : targets[r]);
            tokens += c.counts[r];
        }
        place_padding(c.batch, c.counts);
        model_.reserve(B, c.batch.T, Keep::nothing);
        model_.forward(c.batch, &cache_, options_.skip_below);
        visit(c);
        for (int r = 0; r < B; ++r) c.begin[r] += c.counts[r];
        if (B == 1 && reusable_ + options_.chunk == rows_[0].length) reusable_ += options_.chunk;
        if (options_.on_chunk) options_.on_chunk(tokens);
    }
}

void Session::feed(const std::vector<RowPart>& parts, const LogitsSink& sink) {
    const int64_t V = vocab_size(), step = logit_rows(model_.config(), 1 << 20);
    std::vector<Ids> ids;
    for (const RowPart& p : parts) ids.push_back(p.ids);
    const int64_t last = int64_t(ids[0].size()) - 1;
    read(ids, {}, parts[0].logits_from < 0 ? last : std::min(last, parts[0].logits_from), [&](const Chunk& c) {
        for (int r = 0; r < c.batch.B; ++r) {
            if (parts[r].logits_from < 0) continue;
            const int64_t end = c.begin[r] + c.counts[r];
            for (int64_t i = std::max(parts[r].logits_from, c.begin[r]); i < end; i += step) {
                const int64_t n = std::min(step, end - i);
                logits_.resize(size_t(n * V));
                model_.logits(int64_t(r) * c.batch.T + i - c.begin[r], n, logits_.data());
                for (int64_t j = 0; j < n; ++j) sink(r, i + j, logits_.data() + j * V);
            }
        }
    });
}

std::vector<std::vector<double>> Session::logprobs(const std::vector<ScoredRow>& rows) {
    std::vector<std::vector<double>> result(rows.size());
    std::vector<Ids> ids, targets;
    int64_t longest = 0;
    for (const ScoredRow& row : rows) {
        const size_t n = int64_t(row.ids.size()) > row.from ? row.ids.size() - 1 : 0;
        ids.emplace_back(row.ids.data(), n);
        targets.emplace_back(row.ids.data() + (n ? 1 : 0), n);
        longest = std::max(longest, int64_t(n));
    }
    start(int(rows.size()), longest);
    read(ids, targets, rows[0].from - 1, [&](const Chunk& c) {
        for (int r = 0; r < c.batch.B; ++r) {
            const int64_t first = std::max(rows[r].from - 1, c.begin[r]), n = c.begin[r] + c.counts[r] - first;
            if (n <= 0) continue;
            const Tensor losses = losses_.slice(0, n);
            model_.losses(int64_t(r) * c.batch.T + first - c.begin[r], n, losses);
            std::vector<float> host(n);
            model_.device().download(host.data(), losses);
            for (float loss : host) result[r].push_back(-double(loss));
        }
    });
    return result;
}

}  // namespace bam
