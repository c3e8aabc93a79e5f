#include "reference_model.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "random.h"

namespace bam::test {
namespace {

using Vec = std::vector<double>;

// ---- pieces: each forward with its derivative ----------------------------------------------------------------------

// y (N, out) = x (N, in) W^T, W (out, in).
Vec times_transposed(const Vec& x, const double* W, int N, int in, int out) {
    Vec y(size_t(N) * size_t(out), 0.0);
    for (int n = 0; n < N; ++n)
        for (int o = 0; o < out; ++o)
            for (int i = 0; i < in; ++i) y[size_t(n * out + o)] += x[size_t(n * in + i)] * W[o * in + i];
    return y;
}

// dx += dy W, dW += dy^T x.
void times_transposed_backward(Vec& dx, double* dW, const Vec& dy, const Vec& x, const double* W, int N, int in,
                               int out) {
    for (int n = 0; n < N; ++n)
        for (int o = 0; o < out; ++o)
            for (int i = 0; i < in; ++i) {
                dx[size_t(n * in + i)] += dy[size_t(n * out + o)] * W[o * in + i];
                dW[o * in + i] += dy[size_t(n * out + o)] * x[size_t(n * in + i)];
            }
}

double inverse_rms(const double* x, int C, double eps) {
    double sum = 0;
    for (int c = 0; c < C; ++c) sum += x[c] * x[c];
    return 1.0 / std::sqrt(sum / C + eps);
}

Vec rms_norm(const Vec& x, const double* w, int N, int C, double eps) {
    Vec y(x.size());
    for (int n = 0; n < N; ++n) {
        const double r = inverse_rms(&x[size_t(n * C)], C, eps);
        for (int c = 0; c < C; ++c) y[size_t(n * C + c)] = x[size_t(n * C + c)] * r * w[c];
    }
    return y;
}

// y_c = x_c r w_c with r = (mean x^2 + eps)^(-1/2), so dr/dx_c = -r^3 x_c / C.
void rms_norm_backward(Vec& dx, double* dw, const Vec& dy, const Vec& x, const double* w, int N, int C, double eps) {
    for (int n = 0; n < N; ++n) {
        const double* xn = &x[size_t(n * C)];
        const double* dyn = &dy[size_t(n * C)];
        const double r = inverse_rms(xn, C, eps);
        double dr = 0;
        for (int c = 0; c < C; ++c) dr += dyn[c] * xn[c] * w[c];
        for (int c = 0; c < C; ++c) {
            dw[c] += dyn[c] * xn[c] * r;
            dx[size_t(n * C + c)] += dyn[c] * r * w[c] - dr * r * r * r * xn[c] / C;
        }
    }
}

double sigmoid(double x) {
    return 1.0 / (1.0 + std::exp(-x));
}
double silu(double x) {
    return x * sigmoid(x);
}
double silu_derivative(double x) {
    return sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)));
}

// ---- positions -----------------------------------------------------------------------------------------------------

// Rotates every head of x (N, heads * D) by its token's position; direction -1 turns gradients back.
void rotate(Vec& x, const std::vector<int>& position, int heads, int D, const PositionConfig& p, int direction) {
    for (size_t n = 0; n < position.size(); ++n)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < D / 2; ++i) {
                const bool half = p.rope_layout == RopeLayout::half;
                double& a = x[(n * size_t(heads) + size_t(h)) * size_t(D) + size_t(half ? i : 2 * i)];
                double& b = x[(n * size_t(heads) + size_t(h)) * size_t(D) + size_t(half ? i + D / 2 : 2 * i + 1)];
                const double angle = direction * position[n] * std::pow(p.rope_theta, -2.0 * i / D);
                const double c = std::cos(angle), s = std::sin(angle), a0 = a, b0 = b;
                a = a0 * c - b0 * s;
                b = a0 * s + b0 * c;
            }
}

// Channel c of the sinusoid: sin on even channels (pair i), cos on odd ones.
double sinusoid(int position, int c, int C, const PositionConfig& p) {
    const int i = c / 2;
    const bool sine = c % 2 == 0;
    const bool paper_code = p.sinusoidal_variant == SinusoidalVariant::bam;
    const double exponent = (paper_code && !sine ? 2.0 * i + 1.0 : 2.0 * i) / C;
    const double angle = position * std::pow(p.sinusoidal_theta, -exponent);
    return sine ? std::sin(angle) : std::cos(angle);
}

// Press et al.: geometric slopes for a power of two, else filled up from the next power's every other slope.
Vec slopes(int H) {
    int power = 1;
    while (power * 2 <= H) power *= 2;
    Vec m;
    for (int h = 0; h < power; ++h) m.push_back(std::pow(2.0, -8.0 * (h + 1) / power));
    if (power == H) return m;
    const Vec finer = slopes(2 * power);
    for (int h = 0; int(m.size()) < H; h += 2) m.push_back(finer[size_t(h)]);
    return m;
}

struct Prior {
    double bias = 0, by_alpha = 0, by_beta = 0, by_mu = 0;
};

// -e^alpha (|d + mu| + eps)^beta, cut off at -1e30.
Prior bam_prior(double alpha, double beta, double theta_mu, int d) {
    const double x = d + (std::exp(theta_mu) - std::exp(-theta_mu));
    const double r = std::fabs(x) + 1e-5;
    const double size = std::exp(alpha) * std::pow(r, beta);
    if (!(size < 1e30)) return {-1e30, 0, 0, 0};
    const double sign = (x > 0) - (x < 0);
    const double mu_derivative = std::exp(theta_mu) + std::exp(-theta_mu);
    return {-size, -size, -size * std::log(r), -std::exp(alpha) * beta * std::pow(r, beta - 1) * sign * mu_derivative};
}

// ---- the model -----------------------------------------------------------------------------------------------------

struct Layer {
    Vec x, n1, q, k, v, att, x2, n2, gate, up, y;  // q, k after rotation
    Vec p;                                         // (B, H, T, T) attention weights
};

class Reference {
public:
    Reference(const ModelConfig& m, const ParameterTable& table, const Vec& weights, const ReferenceBatch& batch)
        : m(m),
          table(table),
          w(weights),
          b(batch),
          N(batch.B * batch.T),
          C(m.dim),
          D(m.head_dim()),
          H(m.n_heads),
          K(m.n_kv_heads),
          F(m.ffn_hidden),
          V(m.vocab_size),
          dw(weights.size(), 0.0) {}

    ReferenceOutput run(bool with_gradients) {
        ReferenceOutput out;
        forward(out);
        if (with_gradients) backward(out);
        out.grads = std::move(dw);
        return out;
    }

private:
    const ModelConfig& m;
    const ParameterTable& table;
    const Vec& w;
    const ReferenceBatch& b;
    const int N, C, D, H, K, F, V;
    Vec dw;
    std::vector<Layer> layers;
    Vec last, last_norm;

    const double* weight(const std::string& name) const { return &w[size_t(table.at(name).offset)]; }
    double* gradient(const std::string& name) { return &dw[size_t(table.at(name).offset)]; }
    static std::string in_layer(int l, const char* name) { return "layers." + std::to_string(l) + "." + name; }
    std::string output_matrix() const { return m.tie_embeddings ? "tok_embeddings.weight" : "output.weight"; }
    std::string prior_name(int l, const char* theta) const {
        return (m.position.bam_global ? std::string("prior.") : in_layer(l, "attention.prior.")) + theta;
    }
    size_t pair(int row, int h, int i, int j) const {
        return ((size_t(row) * size_t(H) + size_t(h)) * size_t(b.T) + size_t(i)) * size_t(b.T) + size_t(j);
    }

    Prior prior(int l, int h, int d) const {
        if (m.position.encoding == Encoding::alibi) return {-slopes(H)[size_t(h)] * d, 0, 0, 0};
        if (m.position.encoding != Encoding::bam) return {};
        return bam_prior(weight(prior_name(l, "theta_alpha"))[h], weight(prior_name(l, "theta_beta"))[h],
                         weight(prior_name(l, "theta_mu"))[h], d);
    }

    // ln n_i, the number of keys query i sees, itself among them.
    double log_count(int row, int i) const { return std::log(double(i - b.first[size_t(row * b.T + i)] + 1)); }

    double dot(const double* a, const double* c) const {
        double sum = 0;
        for (int e = 0; e < D; ++e) sum += a[e] * c[e];
        return sum;
    }
    // The D channels of one head at row, t in an array (B, T, heads * D).
    auto head(auto& x, int row, int t, int h, int heads) const {
        return x.data() + (size_t(row * b.T + t) * size_t(heads) + size_t(h)) * size_t(D);
    }

    // One query's weights over its keys, and its output.
    void attend(Layer& a, int l, int row, int h, int i, const std::vector<Prior>& priors) {
        const int kv = h / (H / K), first = b.first[size_t(row * b.T + i)];
        const double c = m.position.ssmax ? weight(in_layer(l, "attention.seq_scale"))[h] * log_count(row, i) : 1.0;
        Vec logits;
        double top = -HUGE_VAL, sum = 0;
        for (int j = first; j <= i; ++j) {
            const double score = dot(head(a.q, row, i, h, H), head(a.k, row, j, kv, K)) / std::sqrt(double(D));
            const double bias = priors[size_t(i - j)].bias;
            const bool inside = m.position.ssmax_order == SsmaxOrder::scale_bias;
            logits.push_back(inside ? c * (score + bias) : c * score + bias);
            top = std::max(top, logits.back());
        }
        for (double z : logits) sum += std::exp(z - top);
        for (int j = first; j <= i; ++j) {
            const double p = std::exp(logits[size_t(j - first)] - top) / sum;
            a.p[pair(row, h, i, j)] = p;
            for (int e = 0; e < D; ++e) head(a.att, row, i, h, H)[e] += p * head(a.v, row, j, kv, K)[e];
        }
    }

    std::vector<Prior> priors_of(int l, int h) const {
        std::vector<Prior> priors;
        for (int d = 0; d < b.T; ++d) priors.push_back(prior(l, h, d));
        return priors;
    }

    Vec layer_forward(int l, const Vec& x) {
        Layer a;
        a.x = x;
        a.n1 = rms_norm(x, weight(in_layer(l, "attention_norm.weight")), N, C, m.norm_eps);
        a.q = times_transposed(a.n1, weight(in_layer(l, "attention.wq.weight")), N, C, H * D);
        a.k = times_transposed(a.n1, weight(in_layer(l, "attention.wk.weight")), N, C, K * D);
        a.v = times_transposed(a.n1, weight(in_layer(l, "attention.wv.weight")), N, C, K * D);
        if (m.position.encoding == Encoding::rope) {
            rotate(a.q, b.position, H, D, m.position, 1);
            rotate(a.k, b.position, K, D, m.position, 1);
        }
        a.p.assign(size_t(b.B) * size_t(H) * size_t(b.T) * size_t(b.T), 0.0);
        a.att.assign(size_t(N) * size_t(H * D), 0.0);
        for (int h = 0; h < H; ++h) {
            const std::vector<Prior> priors = priors_of(l, h);
            for (int row = 0; row < b.B; ++row)
                for (int i = 0; i < b.T; ++i) attend(a, l, row, h, i, priors);
        }
        a.x2 = times_transposed(a.att, weight(in_layer(l, "attention.wo.weight")), N, H * D, C);
        for (size_t i = 0; i < x.size(); ++i) a.x2[i] += x[i];

        a.n2 = rms_norm(a.x2, weight(in_layer(l, "ffn_norm.weight")), N, C, m.norm_eps);
        a.gate = times_transposed(a.n2, weight(in_layer(l, "feed_forward.w1.weight")), N, C, F);
        a.up = times_transposed(a.n2, weight(in_layer(l, "feed_forward.w3.weight")), N, C, F);
        a.y.resize(a.gate.size());
        for (size_t i = 0; i < a.y.size(); ++i) a.y[i] = silu(a.gate[i]) * a.up[i];
        Vec out = times_transposed(a.y, weight(in_layer(l, "feed_forward.w2.weight")), N, F, C);
        for (size_t i = 0; i < out.size(); ++i) out[i] += a.x2[i];
        layers.push_back(std::move(a));
        return out;
    }

    void forward(ReferenceOutput& out) {
        Vec x(size_t(N) * size_t(C));
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < C; ++c) {
                double& value = x[size_t(n * C + c)];
                value = weight("tok_embeddings.weight")[b.ids[size_t(n)] * C + c];
                if (m.position.encoding == Encoding::sinusoidal)
                    value += sinusoid(b.position[size_t(n)], c, C, m.position);
            }
        for (int l = 0; l < m.n_layers; ++l) x = layer_forward(l, x);
        last = x;
        last_norm = rms_norm(x, weight("norm.weight"), N, C, m.norm_eps);
        out.logits = times_transposed(last_norm, weight(output_matrix()), N, C, V);
        for (int n = 0; n < N; ++n) {
            const double* z = &out.logits[size_t(n * V)];
            double top = z[0], sum = 0;
            for (int v = 0; v < V; ++v) top = std::max(top, z[v]);
            for (int v = 0; v < V; ++v) sum += std::exp(z[v] - top);
            out.losses.push_back(std::log(sum) + top - z[b.targets[size_t(n)]]);
            out.loss += out.losses.back() / N;
        }
    }

    void backward(const ReferenceOutput& out) {
        Vec dlogits(out.logits.size());
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) {
                const int target = b.targets[size_t(n)];
                const double log_sum = out.losses[size_t(n)] + out.logits[size_t(n * V + target)];
                dlogits[size_t(n * V + v)] = (std::exp(out.logits[size_t(n * V + v)] - log_sum) - (v == target)) / N;
            }
        Vec dnorm(last.size(), 0.0), dx(last.size(), 0.0);
        times_transposed_backward(dnorm, gradient(output_matrix()), dlogits, last_norm, weight(output_matrix()), N, C,
                                  V);
        rms_norm_backward(dx, gradient("norm.weight"), dnorm, last, weight("norm.weight"), N, C, m.norm_eps);
        for (int l = m.n_layers; l-- > 0;) layer_backward(l, dx);
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < C; ++c)
                gradient("tok_embeddings.weight")[b.ids[size_t(n)] * C + c] += dx[size_t(n * C + c)];
    }

    // dx: of the layer's output on entry, of its input on return. Each branch adds to the residual's gradient.
    void layer_backward(int l, Vec& dx) {
        const Layer& a = layers[size_t(l)];
        auto matmul = [&](Vec& din, const char* name, const Vec& dout, const Vec& in, int width_in, int width_out) {
            times_transposed_backward(din, gradient(in_layer(l, name)), dout, in, weight(in_layer(l, name)), N,
                                      width_in, width_out);
        };
        Vec dy(a.y.size(), 0.0), dgate(a.y.size()), dup(a.y.size()), dn(dx.size(), 0.0);
        matmul(dy, "feed_forward.w2.weight", dx, a.y, F, C);
        for (size_t i = 0; i < dy.size(); ++i) {
            dgate[i] = dy[i] * a.up[i] * silu_derivative(a.gate[i]);
            dup[i] = dy[i] * silu(a.gate[i]);
        }
        matmul(dn, "feed_forward.w1.weight", dgate, a.n2, C, F);
        matmul(dn, "feed_forward.w3.weight", dup, a.n2, C, F);
        rms_norm_backward(dx, gradient(in_layer(l, "ffn_norm.weight")), dn, a.x2,
                          weight(in_layer(l, "ffn_norm.weight")), N, C, m.norm_eps);

        Vec datt(a.att.size(), 0.0), dq(a.q.size(), 0.0), dk(a.k.size(), 0.0), dv(a.v.size(), 0.0);
        matmul(datt, "attention.wo.weight", dx, a.att, H * D, C);
        for (int h = 0; h < H; ++h) {
            const std::vector<Prior> priors = priors_of(l, h);
            for (int row = 0; row < b.B; ++row)
                for (int i = 0; i < b.T; ++i) attend_backward(dq, dk, dv, datt, l, row, h, i, priors);
        }
        if (m.position.encoding == Encoding::rope) {
            rotate(dq, b.position, H, D, m.position, -1);
            rotate(dk, b.position, K, D, m.position, -1);
        }
        dn.assign(dx.size(), 0.0);
        matmul(dn, "attention.wq.weight", dq, a.n1, C, H * D);
        matmul(dn, "attention.wk.weight", dk, a.n1, C, K * D);
        matmul(dn, "attention.wv.weight", dv, a.n1, C, K * D);
        rms_norm_backward(dx, gradient(in_layer(l, "attention_norm.weight")), dn, a.x,
                          weight(in_layer(l, "attention_norm.weight")), N, C, m.norm_eps);
    }

    void attend_backward(Vec& dq, Vec& dk, Vec& dv, const Vec& datt, int l, int row, int h, int i,
                         const std::vector<Prior>& priors) {
        const Layer& a = layers[size_t(l)];
        const int kv = h / (H / K), first = b.first[size_t(row * b.T + i)];
        const double root = std::sqrt(double(D)), ln_n = log_count(row, i);
        const double s = m.position.ssmax ? weight(in_layer(l, "attention.seq_scale"))[h] : 0.0;
        const double c = m.position.ssmax ? s * ln_n : 1.0;
        const bool inside = m.position.ssmax_order == SsmaxOrder::scale_bias;
        const double* dout = head(datt, row, i, h, H);
        double mean = 0;  // sum over keys of p dp
        for (int j = first; j <= i; ++j) mean += a.p[pair(row, h, i, j)] * dot(dout, head(a.v, row, j, kv, K));
        for (int j = first; j <= i; ++j) {
            const double p = a.p[pair(row, h, i, j)];
            const double g = p * (dot(dout, head(a.v, row, j, kv, K)) - mean);  // of the logit
            const Prior& prior = priors[size_t(i - j)];
            const double score = dot(head(a.q, row, i, h, H), head(a.k, row, j, kv, K)) / root;
            for (int e = 0; e < D; ++e) {
                head(dv, row, j, kv, K)[e] += p * dout[e];
                head(dq, row, i, h, H)[e] += g * c / root * head(a.k, row, j, kv, K)[e];
                head(dk, row, j, kv, K)[e] += g * c / root * head(a.q, row, i, h, H)[e];
            }
            if (m.position.ssmax)
                gradient(in_layer(l, "attention.seq_scale"))[h] += g * ln_n * (inside ? score + prior.bias : score);
            if (m.position.encoding == Encoding::bam) {
                const double dbias = inside ? c * g : g;
                gradient(prior_name(l, "theta_alpha"))[h] += dbias * prior.by_alpha;
                gradient(prior_name(l, "theta_beta"))[h] += dbias * prior.by_beta;
                gradient(prior_name(l, "theta_mu"))[h] += dbias * prior.by_mu;
            }
        }
    }
};

}  // namespace

ReferenceBatch reference_batch(const std::vector<int32_t>& stream, int B, int T, const DataConfig& data) {
    if (int64_t(stream.size()) < int64_t(B) * T + 1) throw std::logic_error("stream too short");
    ReferenceBatch batch;
    batch.B = B;
    batch.T = T;
    for (int row = 0; row < B; ++row) {
        int document = 0;  // where the current one began
        for (int t = 0; t < T; ++t) {
            const int32_t id = stream[size_t(row * T + t)];
            const bool after_end =
                data.separator_at_end && t > 0 && stream[size_t(row * T + t - 1)] == data.separator_id;
            const bool at_start = !data.separator_at_end && id == data.separator_id;
            if (data.has_separator && data.document_mask && (after_end || at_start)) document = t;
            batch.ids.push_back(id);
            batch.targets.push_back(stream[size_t(row * T + t + 1)]);
            batch.first.push_back(document);
            batch.position.push_back(data.positions_by_document ? t - document : t);
        }
    }
    return batch;
}

ReferenceOutput reference_run(const ModelConfig& m, const ParameterTable& table, const std::vector<double>& weights,
                              const ReferenceBatch& batch, bool with_gradients) {
    return Reference(m, table, weights, batch).run(with_gradients);
}

std::vector<double> reference_weights(const ModelConfig& m, const ParameterTable& table, uint64_t seed) {
    std::vector<double> w(size_t(table.total));
    for (const Parameter& p : table.all) {
        const uint64_t stream = stream_of("reference " + p.name);
        const bool theta = p.name.find("prior.") != std::string::npos;
        for (int64_t i = 0; i < p.numel(); ++i) {
            const double u = 2.0 * random_uniform(seed, stream, uint64_t(i)) - 1.0;
            double value = 1.0 + 0.3 * u;  // norms, s_h
            const bool embedding = p.name == "tok_embeddings.weight" && !m.tie_embeddings;
            if (p.shape.size() == 2) value = (embedding ? 1.0 : 1.5 / std::sqrt(double(p.shape[1]))) * u;
            if (theta)
                value = 0.5 * u + (p.name.ends_with("theta_mu") ? 0.0 : p.name.ends_with("theta_beta") ? 0.4 : -0.5);
            w[size_t(p.offset + i)] = double(float(value));  // exact in fp32 too
        }
    }
    return w;
}

double central_difference(const std::function<double()>& f, double& x, double h) {
    const double x0 = x;
    auto at = [&](double step) {
        x = x0 + step;
        return f();
    };
    const double d = (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h);
    x = x0;
    return d;
}

}  // namespace bam::test
