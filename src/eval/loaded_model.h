// A model ready to be asked: device, dtype, weights, what its directory remembers of the training, and its tokenizer.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint.h"
#include "eval/session.h"
#include "tokenizer.h"

namespace bam {

struct LoadOptions {
    std::string device = "auto", dtype = "auto";
    int threads = 0;
    std::string tokenizer;  // instead of the one the model remembers
};

struct LoadedModel {
    ModelFiles files;
    std::unique_ptr<Backend> device;
    DType dtype = DType::f32;
    std::unique_ptr<Tokenizer> tokenizer;  // null: none found, and why is below
    std::string no_tokenizer;
    std::unique_ptr<Model> model;          // after load()
    uint64_t weights_hash = 0;             // xxh64 of the fp32 weights in arena order

    // Errors: Error(kExitData) if there is no tokenizer.
    const Tokenizer& need_tokenizer() const;
    // Documents as the model was trained on them, with the mask on or off.
    SessionOptions session_options(bool document_mask) const;
};

// Finds and checks the model and opens the device; weights are not read yet, so that a plan that cannot fit is refused at
// once. Errors: Error(kExitData) for a tokenizer that is not the model's (fingerprint, vocabulary).
LoadedModel open_loaded(const std::string& path, const LoadOptions& options);

// Refuses a session that cannot fit, naming `what` needs it.
void check_memory(const LoadedModel& m, int rows, int64_t capacity, const std::string& what);

void load(LoadedModel& m);

}  // namespace bam
