// The training loop. See trainer.h; one optimizer step is stepper.h, starting and resuming resume.h.
#include "trainer.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "batches.h"
#include "check.h"
#include "checkpoint.h"
#include "dataset.h"
#include "device.h"
#include "eval/generate.h"
#include "interrupt.h"
#include "metrics.h"
#include "plan.h"
#include "progress.h"
#include "resume.h"
#include "schedule.h"
#include "stepper.h"
#include "tokenizer.h"

namespace bam {

using json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

std::string run_directory(const Config& c) { return (std::filesystem::path(c.run.out) / c.run.name).string(); }

namespace {

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

std::string format(const char* f, auto... args) {
    char text[512];
    std::snprintf(text, sizeof text, f, args...);
    return text;
}

class Trainer {
public:
    Trainer(const TrainOptions& o, Config config, Start start, std::unique_ptr<Backend> device, DType compute);
    int run();

private:
    void load_start();
    std::optional<Stepper::Result> gradients();
    void on_nonfinite(const Stepper::Result& r);
    std::string rows_text(const std::vector<int64_t>& rows) const;
    void one_step(const Stepper::Result& r);
    void after_step();
    double validate();
    void log_priors();
    void sample();
    void save();
    void report(const Stepper::Result& r, double lr, double seconds);
    ModelExtras extras() const;
    bool every(int64_t n) const { return n > 0 && (state_.step % n == 0 || state_.step == config_.train.steps); }

    const TrainOptions& options_;
    Config config_;
    Start start_;
    std::string run_dir_;
    DataSet data_;
    RowLoader loader_;
    std::unique_ptr<Tokenizer> tokenizer_;
    std::unique_ptr<Backend> device_;
    Stepper stepper_;
    MetricsLog metrics_;
    std::unique_ptr<Progress> progress_;
    TrainState state_;
    int64_t saved_step_ = -1, first_step_ = 0, skipped_in_a_row_ = 0;
    double gemm_flops_ = 0;
    Clock::time_point begin_;
    double step_seconds_ = 0;  // smoothed
};

Trainer::Trainer(const TrainOptions& o, Config config, Start start, std::unique_ptr<Backend> device, DType compute)
    : options_(o),
      config_(std::move(config)),
      start_(std::move(start)),
      run_dir_(run_directory(config_)),
      data_(open_data(config_.data)),
      loader_(data_.train, data_.train_begin, data_.train_end, config_.train.seq_len, config_.data.shuffle, config_.run.seed),
      tokenizer_(config_.data.tokenizer.empty() ? nullptr : load_tokenizer(config_.data.tokenizer)),
      device_(std::move(device)),
      stepper_(*device_, config_, compute),
      metrics_(run_dir_ + "/metrics.jsonl"),
      state_(start_.state) {
    if (tokenizer_ && tokenizer_->vocab_size() > config_.model.vocab_size)
        throw Error(kExitUsage, format("model.vocab_size %d is below the %d ids of data.tokenizer %s",
                                       config_.model.vocab_size, tokenizer_->vocab_size(), config_.data.tokenizer.c_str()));
    load_start();
    if (!o.quiet) progress_ = std::make_unique<Progress>();
}

// Weights and moments: from the checkpoint, from model.init_from, or by the seed.
void Trainer::load_start() {
    Model& model = stepper_.model();
    const ParameterTable& t = model.table();
    const uint64_t fingerprint = data_.train->fingerprint();
    if (!start_.checkpoint.empty() && state_.data_fingerprint != fingerprint && !options_.force_resume)
        throw Error(kExitUsage, run_dir_ + ": cannot resume: data.train: the shards are not those of the checkpoint "
                                           "(names, sizes or contents changed); --force-resume goes on all the same");
    model.fill_weights([&](float* weights) {
        if (!start_.checkpoint.empty()) {
            HostRoom m(*device_, stepper_.first_moments()), v(*device_, stepper_.second_moments());
            read_checkpoint(start_.checkpoint, {&t, weights, m.data(), v.data()});
            m.upload();
            v.upload();
            saved_step_ = state_.step;
        } else if (!config_.model.init_from.empty()) {
            read_weights(find_model(config_.model.init_from), t, weights);
        } else {
            init_weights(t, config_.model, config_.run.seed, weights);
        }
    });
    state_.data_fingerprint = fingerprint;
    first_step_ = state_.step;
}

ModelExtras Trainer::extras() const {
    ModelExtras e;
    e.seq_len = config_.train.seq_len;
    e.data = config_.data;
    if (tokenizer_) {
        e.tokenizer = config_.data.tokenizer;
        e.tokenizer_fingerprint = tokenizer_->fingerprint();
    }
    return e;
}

// Sums the gradients of the next global batch; nothing when a signal came in between.
std::optional<Stepper::Result> Trainer::gradients() {
    const int64_t rows = config_.train.rows_per_step(), M = config_.train.micro_batch;
    stepper_.begin();
    for (int64_t row = 0; row < rows; row += M) {
        if (interrupted()) return std::nullopt;
        const int count = int(std::min(M, rows - row));
        stepper_.accumulate(training_batch(loader_, state_.rows_consumed + row, count, config_.train.seq_len,
                                           config_.model.vocab_size, config_.data),
                            row);
        loader_.will_need(state_.rows_consumed + row + count, M);
    }
    return stepper_.measure();
}

std::string Trainer::rows_text(const std::vector<int64_t>& rows) const {
    std::string text;
    for (size_t i = 0; i < rows.size() && i < 4; ++i) {
        const int64_t n = state_.rows_consumed + rows[i];
        const TokenPlace p = data_.train->place(loader_.row_start(n));
        text += format("%srow %lld (%s, byte %lld)", i ? ", " : "", (long long)n, p.path.c_str(), (long long)p.byte_offset);
    }
    return rows.size() > 4 ? text + format(" and %zu more", rows.size() - 4) : text;
}

// The step is not taken: weights and moments stay as they were. Throws, unless steps like this are to be skipped.
void Trainer::on_nonfinite(const Stepper::Result& r) {
    std::vector<int64_t> rows = r.bad_rows;
    const char* which = "in ";
    if (rows.empty()) {
        which = "somewhere in ";
        for (int64_t i = 0; i < config_.train.rows_per_step(); ++i) rows.push_back(i);
    }
    const std::string what = format("step %lld: the %s is not finite, %s", (long long)state_.step + 1,
                                    std::isfinite(r.loss) ? "gradient" : "loss", which) + rows_text(rows);
    metrics_.log({{"event", "nonfinite"}, {"step", state_.step + 1}, {"loss", r.loss}, {"grad_norm", r.grad_norm}});
    if (config_.train.on_nonfinite == "skip" && ++skipped_in_a_row_ < 10) {
        std::fprintf(stderr, "bam: %s; skipped\n", what.c_str());
        return;
    }
    save();
    const bool skipping = config_.train.on_nonfinite == "skip";
    throw Error(kExitDiverged, what + format("; stopped %swith step %lld saved, nothing of this step is in it%s",
                                             skipping ? "after 10 such steps in a row " : "", (long long)state_.step,
                                             skipping ? "" : " (train.on_nonfinite \"skip\" leaves such steps out)"));
}

// Takes the step, or counts it as skipped.
void Trainer::one_step(const Stepper::Result& r) {
    const TrainConfig& t = config_.train;
    if (r.finite()) {
        const double factor = schedule_factor(t.schedule, state_.step + 1, t.steps);
        stepper_.apply(r, state_.step + 1 - state_.skipped_steps, factor);
        skipped_in_a_row_ = 0;
    } else {
        on_nonfinite(r);
        ++state_.skipped_steps;
    }
    ++state_.step;
    state_.rows_consumed += t.rows_per_step();
    state_.tokens += t.tokens_per_step;
}

void Trainer::report(const Stepper::Result& r, double lr, double seconds) {
    const TrainConfig& t = config_.train;
    const double rate = double(t.tokens_per_step) / seconds;
    if (gemm_flops_ == 0 && seconds_since(begin_) > 10) gemm_flops_ = device_->measure_gemm(stepper_.model().compute());
    const double flops = rate * training_flops_per_token(config_.model, t.seq_len);
    const json mfu = gemm_flops_ > 0 ? json(flops / gemm_flops_) : json(nullptr);
    metrics_.log({{"event", "step"},
                    {"step", state_.step},
                    {"loss", r.loss},
                    {"grad_norm", r.grad_norm},
                    {"lr", lr},
                    {"tokens", state_.tokens},
                    {"tok_per_s", rate},
                    {"mfu", mfu}});
    if (!progress_) return;
    step_seconds_ = step_seconds_ == 0 ? seconds : 0.9 * step_seconds_ + 0.1 * seconds;
    const int64_t last = options_.stop_at > 0 ? std::min(options_.stop_at, t.steps) : t.steps;
    const std::string share = gemm_flops_ > 0 ? format(" | mfu %.1f%%", 100 * flops / gemm_flops_) : "";
    progress_->update(format("step %lld/%lld | loss %.4f | lr %.2e | norm %.3f | %s tok/s%s | ETA %s", (long long)state_.step,
                             (long long)t.steps, r.loss, lr, r.grad_norm, human_count(rate).c_str(), share.c_str(),
                             human_time(step_seconds_ * double(last - state_.step)).c_str()),
                      state_.step % std::max<int64_t>(1, t.steps / 50) == 0 || state_.step == first_step_ + 1 ||
                          state_.step == last);
}

// Mean loss over the whole validation set, each target once.
double Trainer::validate() {
    const int T = config_.train.seq_len;
    const int64_t n = data_.val_end - data_.val_begin, rows = covering_rows(n, T);
    std::vector<float> host(int64_t(config_.train.micro_batch) * T);
    Arena memory(*device_, int64_t(host.size()) * 4);
    const Tensor losses = memory.take(DType::f32, {int64_t(host.size())});
    double sum = 0;
    for (int64_t row = 0; row < rows; row += config_.train.micro_batch) {
        if (interrupted()) return NAN;
        const int count = int(std::min<int64_t>(config_.train.micro_batch, rows - row));
        const Batch batch = covering_batch(*data_.val, data_.val_begin, data_.val_end, row, count, T,
                                           config_.model.vocab_size, config_.data);
        stepper_.model().loss(batch, losses.slice(0, int64_t(count) * T));
        device_->download(host.data(), losses.slice(0, int64_t(count) * T));
        for (int64_t i = 0; i < int64_t(count) * T; ++i) sum += host[i];
    }
    return sum / double(n - 1);
}

// θ's and s of every layer and head.
void Trainer::log_priors() {
    Model& model = stepper_.model();
    json layers = json::array();
    auto values = [&](const std::string& name) {
        std::vector<float> v(config_.model.n_heads);
        device_->download(v.data(), model.part(model.weights(), name));
        return v;
    };
    const PositionConfig& p = config_.model.position;
    if (prior_thetas(p).empty() && !p.ssmax) return;
    for (int l = 0; l < config_.model.n_layers; ++l) {
        const std::string at = "layers." + std::to_string(l) + ".attention.";
        json layer = {{"layer", l}};
        for (const PriorTheta& t : prior_thetas(p)) layer[t.name] = values((p.bam_global ? "prior." : at + "prior.") + t.name);
        if (p.ssmax) layer["s"] = values(at + "seq_scale");
        layers.push_back(std::move(layer));
    }
    metrics_.log({{"event", "priors"}, {"step", state_.step}, {"layers", std::move(layers)}});
}

void Trainer::sample() {
    SampleOptions o;
    o.max_tokens = 200;
    o.temperature = 0.8;
    o.seed = config_.run.seed + uint64_t(state_.step);
    const std::string text = sample_text(stepper_.model(), *tokenizer_, "", o);
    std::FILE* f = std::fopen((run_dir_ + "/samples.txt").c_str(), "a");
    if (!f) throw Error(kExitFailure, run_dir_ + "/samples.txt: cannot be written");
    std::fprintf(f, "--- step %lld\n%s\n", (long long)state_.step, text.c_str());
    if (std::fclose(f) != 0) throw Error(kExitFailure, run_dir_ + "/samples.txt: cannot be written (disk full?)");
    stepper_.model().reserve(config_.train.micro_batch, config_.train.seq_len, keep_for(config_.train.recompute));
}

void Trainer::save() {
    if (saved_step_ == state_.step) return;
    Model& model = stepper_.model();
    HostCopy w(*device_, model.weights()), m(*device_, stepper_.first_moments()), v(*device_, stepper_.second_moments());
    write_checkpoint(run_dir_, config_, extras(), state_, {&model.table(), w.data(), m.data(), v.data()});
    prune_checkpoints(run_dir_, config_.train.keep_last, config_.train.keep_every);
    metrics_.log({{"event", "checkpoint"}, {"step", state_.step}});
    saved_step_ = state_.step;
}

void Trainer::after_step() {
    const TrainConfig& t = config_.train;
    if (every(t.log_priors_every)) log_priors();
    if (data_.val && every(t.val_every)) {
        const double loss = validate();
        if (!std::isnan(loss) || !interrupted()) {
            json event = {{"event", "val"}, {"step", state_.step}, {"loss", loss}};
            std::string bits;
            if (const auto info = dataset_of_shard(data_.val->shards().front().path); info && info->val.text_bytes > 0) {
                const double per_byte = loss / M_LN2 * double(data_.val_end - data_.val_begin - 1) / double(info->val.text_bytes);
                event["bits_per_byte"] = per_byte;
                bits = format(", %.4f bits per byte", per_byte);
            }
            metrics_.log(event);
            if (progress_)
                progress_->print(format("step %lld: validation loss %.4f, perplexity %.2f%s", (long long)state_.step, loss,
                                        std::exp(loss), bits.c_str()));
        }
    }
    if (tokenizer_ && t.sample_every > 0 && every(t.sample_every)) sample();
    if (every(t.checkpoint_every) || state_.step == t.steps) save();
}

int Trainer::run() {
    const TrainConfig& t = config_.train;
    const bool resumed = !start_.checkpoint.empty();
    write_file_atomically(run_dir_ + "/run.json", to_json(config_).dump(2) + "\n");
    metrics_.log({{"event", resumed ? "resume" : "start"},
                    {"step", state_.step},
                    {"parameters", stepper_.model().table().trained},
                    {"device", device_->name()},
                    {"dtype", config_.run.dtype},
                    {"threads", config_.run.threads}});
    if (!resumed) log_priors();
    begin_ = Clock::now();
    while (state_.step < t.steps) {
        if (options_.stop_at > 0 && state_.step >= options_.stop_at) break;
        const Clock::time_point step_begin = Clock::now();
        const std::optional<Stepper::Result> r = gradients();
        if (!r) break;
        const double lr = t.optimizer.lr * schedule_factor(t.schedule, state_.step + 1, t.steps);
        one_step(*r);
        report(*r, lr, seconds_since(step_begin));
        after_step();
    }
    const bool done = state_.step >= t.steps;
    save();
    metrics_.log({{"event", "stop"}, {"step", state_.step}, {"reason", done ? "done" : interrupted() ? "signal" : "stop_at"}});
    if (progress_)
        progress_->print(done ? format("done: %s", run_dir_.c_str())
                              : format("stopped after step %lld, saved; the same command goes on", (long long)state_.step));
    return done ? kExitDone : kExitInterrupted;
}

void print_plan(const Config& c, const Backend& device, DType compute, const DataSet& data) {
    const ParameterTable t = make_parameter_table(c.model);
    const RowLoader loader(data.train, data.train_begin, data.train_end, c.train.seq_len, c.data.shuffle, c.run.seed);
    const MemoryPlan p = plan_memory(c, device, compute, c.train.micro_batch);
    const double tokens = double(c.train.steps) * double(c.train.tokens_per_step);
    const double set = double(data.train_end - data.train_begin);
    std::printf("model        %s: %d layers, dim %d, %d heads (%d key/value) of %d, ffn %d, vocabulary %d\n",
                variant_of(c.model.position).c_str(), c.model.n_layers, c.model.dim, c.model.n_heads, c.model.n_kv_heads,
                c.model.head_dim(), c.model.ffn_hidden, c.model.vocab_size);
    std::printf("parameters   %lld (%s), %lld of them trained\n", (long long)t.total, human_count(double(t.total)).c_str(),
                (long long)t.trained);
    std::printf("memory       %s: weights %s, copies %s%s, gradients %s, moments %s, activations %s, tables %s; %s has %s\n",
                human_bytes(double(p.total())).c_str(), human_bytes(double(p.weights)).c_str(),
                human_bytes(double(p.copies)).c_str(), p.keeps_copies ? "" : " (made at each use)", human_bytes(double(p.gradients)).c_str(),
                human_bytes(double(p.moments)).c_str(), human_bytes(double(p.activations)).c_str(),
                human_bytes(double(p.tables)).c_str(), device.name().c_str(), human_bytes(double(device.total_memory())).c_str());
    std::printf("step         %lld rows of %d = %lld tokens, in micro-batches of %d rows, %s\n",
                (long long)c.train.rows_per_step(), c.train.seq_len, (long long)c.train.tokens_per_step, c.train.micro_batch,
                c.run.dtype.c_str());
    std::printf("steps        %lld = %s tokens = %.2f epochs; %.3g FLOPs\n", (long long)c.train.steps, human_count(tokens).c_str(),
                tokens / (double(loader.rows_per_epoch()) * c.train.seq_len),
                tokens * training_flops_per_token(c.model, c.train.seq_len));
    std::printf("data         %s tokens in %zu shards, %lld rows an epoch, %lld tokens dropped\n", human_count(set).c_str(),
                data.train->shards().size(), (long long)loader.rows_per_epoch(), (long long)loader.dropped_tokens());
    if (data.val) std::printf("validation   %s tokens\n", human_count(double(data.val_end - data.val_begin)).c_str());
}

// Where a dataset.json lies beside the shards, the config must not contradict it.
void check_described(const Config& c, const TokenStream& stream) {
    const std::optional<DatasetInfo> d = dataset_of_shard(stream.shards().front().path);
    if (!d) return;
    const auto place = [](int id, bool at_end) { return format("id %d at the %s", id, at_end ? "end" : "start"); };
    const std::string file = d->directory + "/dataset.json";
    if (c.data.has_separator && d->separator_id >= 0 && (c.data.separator_id != d->separator_id || c.data.separator_at_end != d->separator_at_end))
        throw Error(kExitUsage, format("data.separator: %s of documents, expected %s, as %s has it", place(c.data.separator_id, c.data.separator_at_end).c_str(),
                                       place(d->separator_id, d->separator_at_end).c_str(), file.c_str()));
    if (d->vocab_size > c.model.vocab_size)
        throw Error(kExitUsage, format("model.vocab_size: %d, expected at least the %d ids of %s", c.model.vocab_size, d->vocab_size, file.c_str()));
}

DataSet open_checked_data(const Config& c) {
    DataSet s = open_data(c.data);
    check_described(c, *s.train);
    if (s.val) check_described(c, *s.val);
    return s;
}

void make_run_directory(const std::string& run_dir) {
    std::error_code e;
    std::filesystem::create_directories(run_dir, e);
    if (e) throw Error(kExitFailure, run_dir + ": cannot be created: " + e.message());
}

}  // namespace

int train(const TrainOptions& options) {
    Config config = options.config;
    const std::string run_dir = run_directory(config);
    if (options.dry_run) {
        auto device = open_device(config.run.device, config.run.threads);
        const DType compute = resolve(config, *device);
        print_plan(config, *device, compute, open_checked_data(config));
        return kExitDone;
    }
    catch_interrupts();
    open_checked_data(config);  // before anything is written
    make_run_directory(run_dir);
    // The child of a comparison that was killed may still be saving.
    RunLock lock(run_dir, has_parent() ? 60 : 0);
    Start start = choose_start(run_dir, options.resume, options.force_resume, config, options.quiet);
    if (start.state.step >= config.train.steps) {
        if (!options.quiet)
            std::printf("%s: finished, step %lld of %lld\n", run_dir.c_str(), (long long)start.state.step,
                        (long long)config.train.steps);
        return kExitDone;
    }
    if (config.run.threads == 0) config.run.threads = usable_threads();
    auto device = open_device(config.run.device, config.run.threads);
    const DType compute = resolve(config, *device);
    if (!options.quiet)
        std::printf("%s: %s, %s parameters, %s on %s, %s\n", run_dir.c_str(), variant_of(config.model.position).c_str(),
                    human_count(double(make_parameter_table(config.model).trained)).c_str(), config.run.dtype.c_str(),
                    device->name().c_str(),
                    start.checkpoint.empty() ? "from the start" : ("from step " + std::to_string(start.state.step)).c_str());
    return Trainer(options, std::move(config), std::move(start), std::move(device), compute).run();
}

}  // namespace bam
