#include "golden.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "test_support.h"

namespace bam::test {
namespace {
namespace fs = std::filesystem;
using nlohmann::json;

ModelConfig model_of(const json& j) {
    ModelConfig m;
    m.dim = j["dim"], m.n_layers = j["n_layers"], m.n_heads = j["n_heads"], m.n_kv_heads = j["n_kv_heads"];
    m.ffn_hidden = j["ffn_hidden"], m.vocab_size = j["vocab_size"], m.norm_eps = j["norm_eps"];
    m.tie_embeddings = j["tie_embeddings"];
    const json& p = j["position"];
    apply_variant(m.position, std::string(p["encoding"]) + (p["ssmax"] ? "_ssmax" : ""));
    if (p.contains("ssmax_order"))
        m.position.ssmax_order = p["ssmax_order"] == "scale_scores" ? SsmaxOrder::scale_scores : SsmaxOrder::scale_bias;
    if (p.contains("rope")) {
        m.position.rope_theta = p["rope"]["theta"];
        m.position.rope_layout = p["rope"]["layout"] == "half" ? RopeLayout::half : RopeLayout::interleaved;
    }
    if (p.contains("sinusoidal")) {
        m.position.sinusoidal_theta = p["sinusoidal"]["theta"];
        m.position.sinusoidal_variant =
            p["sinusoidal"]["variant"] == "bam" ? SinusoidalVariant::bam : SinusoidalVariant::vaswani;
    }
    if (p.contains("bam")) {
        m.position.bam_global = p["bam"]["scope"] == "global";
        m.position.train_alpha = p["bam"]["train_alpha"];
        m.position.train_beta = p["bam"]["train_beta"];
        m.position.train_mu = p["bam"]["train_mu"];
    }
    return m;
}

void read_recipe(Golden& g, const json& j) {
    g.rows = j["rows"];
    g.train.seq_len = j["seq_len"];
    g.train.steps = j["steps"];
    g.train.grad_clip = j["grad_clip"];
    const json& s = j["schedule"];
    g.train.schedule.name = s["name"];
    g.train.schedule.warmup_steps = s.value("warmup_steps", 0);
    g.train.schedule.final_fraction = s.value("final_fraction", 0.1);
    const json& o = j["optimizer"];
    g.train.optimizer.name = o["name"] == "adamw" ? OptimizerKind::adamw : OptimizerKind::radam;
    g.train.optimizer.lr = o["lr"], g.train.optimizer.eps = o["eps"],
    g.train.optimizer.weight_decay = o["weight_decay"];
    g.train.optimizer.prior_lr = o.value("prior_lr", -1.0);
    g.train.optimizer.beta1 = o["betas"][0], g.train.optimizer.beta2 = o["betas"][1];
    g.data.has_separator = true;
    g.data.separator_id = j["separator"]["id"];
    g.data.separator_at_end = j["separator"]["position"] == "end";
    g.data.positions_by_document = j["positions"] == "document";
    g.data.document_mask = g.mask == "docmask";
    g.data.shuffle = j["shuffle"];
}

Golden read_golden(const std::string& directory, const std::string& mask) {
    Golden g;
    g.directory = directory;
    g.mask = mask;
    g.model = model_of(json::parse(read_file(directory + "/config.json"))["model"]);
    read_recipe(g, json::parse(read_file(directory + "/train.json")));
    g.weights = read_tensors(directory + "/model.safetensors");
    g.expected = read_tensors(directory + "/" + mask + ".safetensors");
    const std::vector<float>& bits = g.expected.at("tokens");
    g.tokens.resize(bits.size());
    std::memcpy(g.tokens.data(), bits.data(), bits.size() * 4);
    g.expected.erase("tokens");
    return g;
}

}  // namespace

std::map<std::string, std::vector<float>> read_tensors(const std::string& path) {
    const std::string bytes = read_file(path);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    std::map<std::string, std::vector<float>> tensors;
    const json entries = json::parse(bytes.substr(8, header));
    for (const auto& [name, entry] : entries.items()) {
        if (name == "__metadata__") continue;
        const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
        std::vector<float>& values = tensors[name];
        values.resize((end - begin) / 4);
        std::memcpy(values.data(), bytes.data() + 8 + header + begin, end - begin);
    }
    return tensors;
}

std::string Golden::case_name() const {
    return fs::path(directory).filename().string() + "_" + mask;
}

std::vector<float> Golden::arena(const ParameterTable& table) const {
    std::vector<float> arena(size_t(table.total));
    for (const Parameter& p : table.all) {
        const std::vector<float>& values = weights.at(p.name);
        if (int64_t(values.size()) != p.numel()) throw std::runtime_error(directory + ": size of " + p.name);
        std::copy(values.begin(), values.end(), arena.begin() + p.offset);
    }
    return arena;
}

std::vector<Golden> all_goldens() {
    std::vector<std::string> directories;
    for (const std::string& root : {test_data(""), goldens_dir()}) {
        if (root.empty() || !fs::is_directory(root)) continue;
        for (const fs::directory_entry& e : fs::directory_iterator(root))
            if (fs::exists(e.path() / "train.json")) directories.push_back(e.path().string());
    }
    std::sort(directories.begin(), directories.end());
    std::vector<Golden> goldens;
    for (const std::string& d : directories)
        for (const char* mask : {"plain", "docmask"})
            if (fs::exists(d + "/" + mask + ".safetensors")) goldens.push_back(read_golden(d, mask));
    return goldens;
}

}  // namespace bam::test
