// Names, places and initial values of a model's parameters.
#include "parameters.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "random.h"

namespace bam {

namespace {

void add_layer(std::vector<Parameter>& list, const ModelConfig& m, int layer) {
    const std::string at = "layers." + std::to_string(layer) + ".";
    const int64_t C = m.dim, D = m.head_dim(), F = m.ffn_hidden;
    auto add = [&](const char* name, std::vector<int64_t> shape, ParameterGroup group) {
        list.push_back({at + name, std::move(shape), 0, group});
    };
    add("attention.wq.weight", {m.n_heads * D, C}, ParameterGroup::decayed);
    add("attention.wk.weight", {m.n_kv_heads * D, C}, ParameterGroup::decayed);
    add("attention.wv.weight", {m.n_kv_heads * D, C}, ParameterGroup::decayed);
    add("attention.wo.weight", {C, m.n_heads * D}, ParameterGroup::decayed);
    add("feed_forward.w1.weight", {F, C}, ParameterGroup::decayed);
    add("feed_forward.w3.weight", {F, C}, ParameterGroup::decayed);
    add("feed_forward.w2.weight", {C, F}, ParameterGroup::decayed);
    add("attention_norm.weight", {C}, ParameterGroup::plain);
    add("ffn_norm.weight", {C}, ParameterGroup::plain);
    if (m.position.ssmax) add("attention.seq_scale", {m.n_heads}, ParameterGroup::plain);
}

void add_prior(std::vector<Parameter>& list, const ModelConfig& m, const std::string& at) {
    for (const PriorTheta& t : prior_thetas(m.position))
        list.push_back({at + t.name, {m.n_heads}, 0, t.trained ? ParameterGroup::prior : ParameterGroup::frozen});
}

}  // namespace

ParameterTable make_parameter_table(const ModelConfig& m) {
    std::vector<Parameter> list;
    const int64_t V = m.vocab_size, C = m.dim;
    list.push_back({"tok_embeddings.weight", {V, C}, 0, ParameterGroup::decayed});
    for (int l = 0; l < m.n_layers; ++l) add_layer(list, m, l);
    if (!m.tie_embeddings) list.push_back({"output.weight", {V, C}, 0, ParameterGroup::decayed});
    list.push_back({"norm.weight", {C}, 0, ParameterGroup::plain});
    if (m.position.bam_global) {
        add_prior(list, m, "prior.");
    } else {
        for (int l = 0; l < m.n_layers; ++l) add_prior(list, m, "layers." + std::to_string(l) + ".attention.prior.");
    }
    std::stable_sort(list.begin(), list.end(), [](const Parameter& a, const Parameter& b) { return a.group < b.group; });

    ParameterTable t;
    for (Parameter& p : list) {
        p.offset = t.total;
        t.total += p.numel();
        if (p.group != ParameterGroup::frozen) t.trained = t.total;
    }
    t.all = std::move(list);
    return t;
}

const Parameter* ParameterTable::find(const std::string& name) const {
    for (const Parameter& p : all)
        if (p.name == name) return &p;
    return nullptr;
}

const Parameter& ParameterTable::at(const std::string& name) const {
    if (const Parameter* p = find(name)) return *p;
    throw std::logic_error("no parameter named " + name);
}

static void init_matrix(const Parameter& p, const ModelConfig& m, uint64_t seed, float* w) {
    const uint64_t stream = stream_of(p.name);
    const int64_t n = p.numel();
    const bool embedding = p.name == "tok_embeddings.weight" && !m.tie_embeddings;
    if (m.init == "gpt2") {
        const bool residual = p.name.ends_with(".wo.weight") || p.name.ends_with(".w2.weight");
        const double sd = residual ? 0.02 / std::sqrt(2.0 * m.n_layers) : 0.02;
        for (int64_t i = 0; i < n; ++i) w[i] = float(sd * random_normal(seed, stream, i));
    } else if (embedding) {
        for (int64_t i = 0; i < n; ++i) w[i] = float(random_normal(seed, stream, i));
    } else {
        const double bound = 1.0 / std::sqrt(double(p.shape[1]));
        for (int64_t i = 0; i < n; ++i) w[i] = float(bound * (2.0 * random_uniform(seed, stream, i) - 1.0));
    }
}

void init_weights(const ParameterTable& t, const ModelConfig& m, uint64_t seed, float* weights) {
    for (const Parameter& p : t.all) {
        float* w = weights + p.offset;
        if (p.group == ParameterGroup::decayed) init_matrix(p, m, seed, w);
        else std::fill_n(w, p.numel(), 1.0f);  // norms and s_h
        for (const PriorTheta& theta : prior_thetas(m.position))
            if (p.name.ends_with(std::string(".") + theta.name)) {
                const std::vector<float> values = initial_thetas(theta.init, m.n_heads);
                std::copy(values.begin(), values.end(), w);
            }
    }
}

int64_t matmul_parameters(const ModelConfig& m) {
    const int64_t C = m.dim, D = m.head_dim();
    const int64_t attention = C * m.qkv_dim() + int64_t(m.n_heads) * D * C;
    return m.n_layers * (attention + 3 * C * m.ffn_hidden) + int64_t(m.vocab_size) * C;
}

double training_flops_per_token(const ModelConfig& m, int64_t seq_len) {
    return 6.0 * double(matmul_parameters(m)) + 6.0 * m.n_layers * double(m.dim) * double(seq_len);
}

}  // namespace bam
