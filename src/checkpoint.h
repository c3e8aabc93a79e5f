// Model directories and checkpoints on disk (DESIGN §3). A checkpoint is a model directory plus optimizer.safetensors
// and state.json; it is written to a hidden temporary directory, fsynced and renamed, so it exists whole or not at all,
// and state.json holds an xxh64 of every file, so damage is noticed.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "config.h"
#include "durable_file.h"
#include "parameters.h"

namespace bam {

// ---- models --------------------------------------------------------------------------------------------------------

// What a model needs to be used besides weights: stored as "data" in config.json so that evaluation and generation know
// the separator, positions, tokenizer and training length. All optional in foreign model directories.
struct ModelExtras {
    int seq_len = 0;        // trained length, 0 unknown
    DataConfig data;        // separator, document_mask, positions used
    std::string tokenizer;  // path as configured, or empty
    uint64_t tokenizer_fingerprint = 0;
};

using Told = std::function<void(const std::string& line)>;

// Resolves what the user named to a model directory: a model directory, a checkpoint, or a run directory (its newest
// checkpoint whose model verifies; `skipped` is told of newer ones that do not). Errors: Error(kExitData) saying what
// is there and what was expected.
std::string find_model(const std::string& path, const Told& skipped = nullptr);

struct ModelFiles {
    std::string path;
    ModelConfig config;
    ModelExtras extras;
};
ModelFiles open_model(const std::string& model_dir);  // reads and checks config.json

// Reads model.safetensors into the arena. Shapes (1,H,1,1) and (H) are the same. Errors (kExitData): a tensor missing,
// of another shape, of another dtype than F32/BF16, with a non-finite value, or unknown to the model, each by name.
// theta_mu, which is fixed in most models, may be missing: it then has its initial value.
void read_weights(const std::string& model_dir, const ParameterTable& t, float* weights);
void write_model(const std::string& dir, const ModelConfig& m, const ModelExtras& e, const ParameterTable& t,
                 const float* weights);

// ---- checkpoints ---------------------------------------------------------------------------------------------------

struct TrainState {
    int64_t step = 0;  // updates done
    int64_t rows_consumed = 0;
    int64_t tokens = 0;
    uint64_t data_fingerprint = 0;
    int64_t skipped_steps = 0;  // on_nonfinite "skip"
};

struct CheckpointData {
    const ParameterTable* table;
    float* weights;  // (table.total)
    float* m;        // (table.trained)
    float* v;
};

// <run>/checkpoints/step_%08d, replacing one that is there. Temporary directories of dead processes are removed.
// Errors: Error(kExitFailure) naming the file and reason; nothing half-written stays.
void write_checkpoint(const std::string& run_dir, const Config& c, const ModelExtras& e, const TrainState& s,
                      const CheckpointData& d);

struct CheckpointInfo {
    std::string path;
    int64_t step;
};
// Ascending steps; temporary directories and foreign names are ignored.
std::vector<CheckpointInfo> list_checkpoints(const std::string& run_dir);
// Empty string if every file's hash matches, else what is wrong ("model.safetensors: xxh64 ..., expected ...").
std::string verify_checkpoint(const std::string& dir);
// The newest checkpoint that verifies, or {"" , -1}; `skipped` is told of every newer one that does not.
CheckpointInfo newest_good_checkpoint(const std::string& run_dir, const Told& skipped = nullptr);
// Reads state and config of a checkpoint, then its arenas (d.weights, m, v must have room).
TrainState read_state(const std::string& dir, Config* config);
void read_checkpoint(const std::string& dir, const CheckpointData& d);
// Deletes old checkpoints: keeps the newest keep_last (>= 1) and every multiple of keep_every (0: none).
void prune_checkpoints(const std::string& run_dir, int keep_last, int64_t keep_every);

// Compares the config of a checkpoint with the wanted one: the lines of what differs and may not change on resume
// ("model.dim: 128 in the checkpoint, 256 now"); empty if it can be resumed.
std::vector<std::string> resume_conflicts(const Config& saved, const Config& wanted);

// Holds an exclusive lock on a run directory while alive; Error(kExitFailure) if another process has it, and keeps it so long.
class RunLock {
public:
    explicit RunLock(const std::string& run_dir, double wait_seconds = 0);
    ~RunLock();
    RunLock(const RunLock&) = delete;

private:
    int fd_ = -1;
};

}  // namespace bam
