#include "cases.h"

#include <algorithm>

#include "test_support.h"

namespace bam::test {

ModelConfig model_for(const std::string& variant, const Shape& shape) {
    ModelConfig m;
    apply_variant(m.position, variant);
    const bool even = m.position.encoding == Encoding::rope;
    m.n_layers = shape.layers;
    m.n_heads = m.n_kv_heads = shape.heads;
    m.dim = shape.heads * (shape.head_dim + (even ? shape.head_dim % 2 : 0));
    m.ffn_hidden = shape.ffn;
    m.vocab_size = shape.vocab;
    return m;
}

DataConfig documents(bool mask, bool by_document, bool separator_at_end) {
    DataConfig d;
    d.has_separator = true;
    d.separator_id = 2;
    d.separator_at_end = separator_at_end;
    d.document_mask = mask;
    d.positions_by_document = by_document;
    return d;
}

namespace {

Case case_of(const std::string& variant, const std::string& option, const Shape& shape) {
    return {variant + ", " + option, model_for(variant, shape), documents(false), shape.rows, shape.length};
}

void add_common(std::vector<Case>& cases, const std::string& variant, const Shape& shape) {
    auto add = [&](const char* option, auto change) { change(cases.emplace_back(case_of(variant, option, shape))); };
    add("plain", [](Case&) {});
    add("gqa", [&](Case& c) { c.model.n_kv_heads = shape.kv_heads; });
    add("tied", [](Case& c) { c.model.tie_embeddings = true; });
    add("documents", [](Case& c) { c.data = documents(true); });
    add("documents, positions by row", [](Case& c) { c.data = documents(true, false); });
    add("documents, separator at start", [](Case& c) { c.data = documents(true, true, false); });
    add("gqa, tied, documents", [&](Case& c) {
        c.model.n_kv_heads = shape.kv_heads;
        c.model.tie_embeddings = true;
        c.data = documents(true);
    });
    add("one token", [](Case& c) { c.length = 1; });
}

void add_own(std::vector<Case>& cases, const std::string& variant, const Shape& shape) {
    auto add = [&](const char* option, auto change) { change(cases.emplace_back(case_of(variant, option, shape))); };
    const PositionConfig p = model_for(variant, shape).position;
    if (p.ssmax) {
        add("scale_bias", [](Case& c) { c.model.position.ssmax_order = SsmaxOrder::scale_bias; });
        add("scale_scores", [](Case& c) { c.model.position.ssmax_order = SsmaxOrder::scale_scores; });
        add("scale_scores, documents", [](Case& c) {
            c.model.position.ssmax_order = SsmaxOrder::scale_scores;
            c.data = documents(true);
        });
    }
    if (p.encoding == Encoding::bam) {
        add("global", [](Case& c) { c.model.position.bam_global = true; });
        add("trained mu", [](Case& c) { c.model.position.train_mu = true; });
        add("global, trained mu, scale_scores, gqa, documents", [&](Case& c) {
            c.model.position.bam_global = c.model.position.train_mu = true;
            c.model.position.ssmax_order = SsmaxOrder::scale_scores;
            c.model.n_kv_heads = shape.kv_heads;
            c.data = documents(true);
        });
    }
    if (p.encoding == Encoding::rope) add("half", [](Case& c) { c.model.position.rope_layout = RopeLayout::half; });
    if (p.encoding == Encoding::sinusoidal)
        add("variant bam", [](Case& c) { c.model.position.sinusoidal_variant = SinusoidalVariant::bam; });
}

}  // namespace

std::vector<Case> all_cases(const Shape& shape) {
    std::vector<Case> cases;
    for (const std::string& variant : variant_names()) {
        add_common(cases, variant, shape);
        add_own(cases, variant, shape);
    }
    return cases;
}

std::vector<Case> few_cases(const Shape& shape) {
    std::vector<Case> cases;
    for (const std::string& variant : variant_names()) {
        cases.push_back(case_of(variant, "plain", shape));
        Case c = case_of(variant, "many options", shape);
        c.model.n_kv_heads = shape.kv_heads;
        c.model.tie_embeddings = true;
        c.data = documents(true);
        c.model.position.train_mu = true;
        c.model.position.rope_layout = RopeLayout::half;
        c.model.position.sinusoidal_variant = SinusoidalVariant::bam;
        cases.push_back(c);
    }
    return cases;
}

ReferenceBatch batch_of(const Case& c) {
    const std::vector<int32_t> stream = random_tokens(int64_t(c.rows) * c.length + 1, c.model.vocab_size, 5, 2, 4);
    return reference_batch(stream, c.rows, c.length, c.data);
}

void set_parameters(std::vector<double>& weights, const ParameterTable& table, const std::string& suffix,
                    double value) {
    for (const Parameter& p : table.all)
        if (p.name.ends_with(suffix)) std::fill_n(weights.begin() + p.offset, p.numel(), value);
}

}  // namespace bam::test
