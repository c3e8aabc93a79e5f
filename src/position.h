// Every positional encoding and SSMax: the only file that knows their formulas (DESIGN §2.2, §2.3).
// Attention sees an encoding only as tables over the distance d = i - j >= 0; a new prior is one case in prior_at() and
// prior_thetas() below plus its config name.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#if defined(__CUDACC__)
#define BAM_HOST_DEVICE __host__ __device__
#else
#define BAM_HOST_DEVICE
#endif

namespace bam {

enum class Encoding : uint8_t { nope, sinusoidal, rope, alibi, bam };
enum class SsmaxOrder : uint8_t { scale_bias, scale_scores };  // c*(qk + bias) | c*qk + bias
enum class RopeLayout : uint8_t { interleaved, half };         // pairs (2i, 2i+1) | (i, i + D/2)
enum class SinusoidalVariant : uint8_t { vaswani, bam };

// Named fields of `model.position`; defaults are the design's.
struct PositionConfig {
    Encoding encoding = Encoding::bam;
    bool ssmax = true;
    SsmaxOrder ssmax_order = SsmaxOrder::scale_bias;  // null in JSON: scale_scores for alibi, else scale_bias
    double rope_theta = 500000;
    RopeLayout rope_layout = RopeLayout::interleaved;
    double sinusoidal_theta = 10000;
    SinusoidalVariant sinusoidal_variant = SinusoidalVariant::vaswani;
    bool bam_global = false;  // scope "global": one prior for all layers
    bool train_alpha = true, train_beta = true, train_mu = false;
    // Initial theta per head: one number; [first, last] spread evenly over the heads; "slope" (alpha only): ln of ALiBi's slope.
    struct Init {
        std::vector<double> values = {0};  // one or two
        bool slope = false;
    };
    Init init_alpha, init_beta, init_mu;
};

// ---- priors over distance -------------------------------------------------------------------------------------------

// A prior's value and its derivative by each of its parameters at one distance.
struct PriorPoint {
    double bias;
    double dtheta[3];
};

constexpr int kMaxThetas = 3;
constexpr double kPriorFloor = -1e30;   // the table's least value; all derivatives are 0 there
constexpr double kPriorEpsilon = 1e-5;  // BAM's epsilon, inside the power

// ALiBi slope of head h (0-based) of H: 2^(-8(h+1)/H) for a power of two; otherwise the slopes of the power of two c
// below H, then every other slope of 2c (Press et al.).
BAM_HOST_DEVICE inline double alibi_slope(int h, int H) {
    int c = 1;
    while (2 * c <= H) c *= 2;
    if (h < c) return exp2(-8.0 * (h + 1) / c);
    return exp2(-8.0 * (2 * (h - c) + 1) / (2 * c));
}

// ALiBi: bias = -m_h d, rounded to fp32 as a product of fp32 numbers.
BAM_HOST_DEVICE inline PriorPoint alibi_at(int h, int H, double d) { return {-alibi_slope(h, H) * d, {0, 0, 0}}; }

// GGD-BAM (arXiv 2505.22842, eq. for the generalized Gaussian prior): bias = -e^alpha (|d + mu| + eps)^beta,
// mu = e^theta_mu - e^-theta_mu; theta = {alpha, beta, theta_mu}.
BAM_HOST_DEVICE inline PriorPoint bam_at(const double theta[3], double d) {
    const double mu = exp(theta[2]) - exp(-theta[2]);
    const double x = d + mu;
    const double r = fabs(x) + kPriorEpsilon;
    const double bias = -exp(theta[0] + theta[1] * log(r));
    if (!(bias > kPriorFloor)) return {kPriorFloor, {0, 0, 0}};
    const double sign = x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0;
    const double dmu = bias * theta[1] / r * sign * (exp(theta[2]) + exp(-theta[2]));
    return {bias, {bias, bias * log(r), fmin(fmax(dmu, -1e36), 1e36)}};  // finite as fp32
}

BAM_HOST_DEVICE inline PriorPoint prior_at(Encoding e, const double theta[3], int h, int H, double d) {
    if (e == Encoding::alibi) return alibi_at(h, H, d);
    if (e == Encoding::bam) return bam_at(theta, d);
    return {0, {0, 0, 0}};
}

inline bool has_prior(Encoding e) { return e == Encoding::alibi || e == Encoding::bam; }

// A trained or fixed parameter of a prior, one scalar per head.
struct PriorTheta {
    const char* name;  // "theta_alpha"
    bool scales_bias;  // its derivative is the bias itself: no table needed
    bool trained;
    PositionConfig::Init init;
};
std::vector<PriorTheta> prior_thetas(const PositionConfig& p);

// Initial theta of every head.
std::vector<float> initial_thetas(const PositionConfig::Init& init, int H);

// ---- encodings of absolute positions ---------------------------------------------------------------------------------

// cos and sin of pos * base^(-2i/D), pairs (cos, sin), for positions [first, first + count): (count, D/2, 2).
// Angles in double, reduced there, then rounded to fp32.
std::vector<float> rope_table(double base, int D, int64_t first, int64_t count);

// Rows added to the embeddings: (count, C).
std::vector<float> sinusoidal_table(double base, SinusoidalVariant variant, int C, int64_t first, int64_t count);

// ---- names ------------------------------------------------------------------------------------------------------------

// The ten shorthand names: "nope", "nope_ssmax", ..., "bam", "bam_ssmax".
const std::vector<std::string>& variant_names();

// "bam_ssmax" (aliases rotary = rope, ggd_bam = bam) -> encoding and ssmax, with the encoding's default order.
// Errors: an unknown name is Error(kExitUsage) that lists the names.
void apply_variant(PositionConfig& p, const std::string& name);

std::string variant_of(const PositionConfig& p);  // the shorthand name
const char* name_of(Encoding e);
SsmaxOrder default_order(Encoding e);

}  // namespace bam
