// Tables and names of the positional encodings; the formulas are in position.h.
#include "position.h"

#include <algorithm>

#include "check.h"

namespace bam {

std::vector<PriorTheta> prior_thetas(const PositionConfig& p) {
    if (p.encoding != Encoding::bam) return {};
    return {{"theta_alpha", true, p.train_alpha, p.init_alpha},
            {"theta_beta", false, p.train_beta, p.init_beta},
            {"theta_mu", false, p.train_mu, p.init_mu}};
}

std::vector<float> initial_thetas(const PositionConfig::Init& init, int H) {
    std::vector<float> theta(H);
    for (int h = 0; h < H; ++h) {
        const double share = H > 1 ? double(h) / (H - 1) : 0.0;
        theta[h] = float(init.slope ? std::log(alibi_slope(h, H))
                                    : init.values.front() + share * (init.values.back() - init.values.front()));
    }
    return theta;
}

// The angle is reduced to [-pi, pi] in double: pos * freq has 53 bits, so a million positions keep 1e-10.
static double reduced_angle(int64_t position, double frequency) {
    return std::remainder(double(position) * frequency, 2.0 * M_PI);
}

std::vector<float> rope_table(double base, int D, int64_t first, int64_t count) {
    std::vector<float> table(size_t(count) * D);
    for (int64_t p = 0; p < count; ++p)
        for (int i = 0; i < D / 2; ++i) {
            const double angle = reduced_angle(first + p, std::pow(base, -2.0 * i / D));
            table[p * D + 2 * i] = float(std::cos(angle));
            table[p * D + 2 * i + 1] = float(std::sin(angle));
        }
    return table;
}

std::vector<float> sinusoidal_table(double base, SinusoidalVariant variant, int C, int64_t first, int64_t count) {
    std::vector<double> frequency(C);
    for (int c = 0; c < C; ++c) {
        const int exponent = variant == SinusoidalVariant::vaswani ? c / 2 * 2 : c;
        frequency[c] = std::pow(base, -double(exponent) / C);
    }
    std::vector<float> table(size_t(count) * C);
    for (int64_t p = 0; p < count; ++p)
        for (int c = 0; c < C; ++c) {
            const double angle = reduced_angle(first + p, frequency[c]);
            table[p * C + c] = float(c % 2 == 0 ? std::sin(angle) : std::cos(angle));
        }
    return table;
}

const char* name_of(Encoding e) {
    constexpr const char* names[] = {"nope", "sinusoidal", "rope", "alibi", "bam"};
    return names[int(e)];
}

SsmaxOrder default_order(Encoding e) {
    return e == Encoding::alibi ? SsmaxOrder::scale_scores : SsmaxOrder::scale_bias;
}

const std::vector<std::string>& variant_names() {
    static const std::vector<std::string> names = {"nope",       "nope_ssmax", "sinusoidal",  "sinusoidal_ssmax",
                                                   "rope",       "rope_ssmax", "alibi",       "alibi_ssmax",
                                                   "bam",        "bam_ssmax"};
    return names;
}

std::string variant_of(const PositionConfig& p) { return std::string(name_of(p.encoding)) + (p.ssmax ? "_ssmax" : ""); }

void apply_variant(PositionConfig& p, const std::string& name) {
    std::string base = name;
    const std::string suffix = "_ssmax";
    const bool ssmax = base.size() > suffix.size() && base.ends_with(suffix);
    if (ssmax) base.resize(base.size() - suffix.size());
    if (base == "rotary") base = "rope";
    if (base == "ggd_bam") base = "bam";
    for (Encoding e : {Encoding::nope, Encoding::sinusoidal, Encoding::rope, Encoding::alibi, Encoding::bam}) {
        if (base != name_of(e)) continue;
        if (p.encoding != e) p.ssmax_order = default_order(e);
        p.encoding = e;
        p.ssmax = ssmax;
        return;
    }
    std::string list;
    for (const auto& v : variant_names()) list += (list.empty() ? "" : ", ") + v;
    throw Error(kExitUsage, "unknown positional encoding '" + name + "', expected one of: " + list);
}

}  // namespace bam
