#include "ops_reference.h"

#include <cmath>
#include <functional>

namespace reference {

Doubles matmul(const Doubles& a, const Doubles& b, int64_t M, int64_t N, int64_t K) {
    Doubles y(M * N);
    for (int64_t i = 0; i < M; ++i)
        for (int64_t j = 0; j < N; ++j)
            for (int64_t k = 0; k < K; ++k) y[i * N + j] += a[i * K + k] * b[j * K + k];
    return y;
}

Doubles transposed(const Doubles& a, int64_t rows, int64_t columns) {
    Doubles y(a.size());
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) y[j * rows + i] = a[i * columns + j];
    return y;
}

Norm norm(const Doubles& x, const Doubles& delta, const Doubles& w, int64_t C, double eps) {
    Norm r{x, Doubles(x.size()), {}};
    for (size_t i = 0; i < delta.size(); ++i) r.x[i] += delta[i];
    for (size_t row = 0; row < x.size(); row += C) {
        double squares = 0;
        for (int64_t i = 0; i < C; ++i) squares += r.x[row + i] * r.x[row + i];
        r.rstd.push_back(1 / std::sqrt(squares / C + eps));
        for (int64_t i = 0; i < C; ++i) r.y[row + i] = r.x[row + i] * r.rstd.back() * w[i];
    }
    return r;
}

NormGrads norm_backward(const Doubles& dy, const Doubles& x, const Doubles& w, int64_t C, double eps) {
    NormGrads g{Doubles(x.size()), Doubles(C)};
    for (size_t row = 0; row < x.size(); row += C) {
        double squares = 0;
        for (int64_t i = 0; i < C; ++i) squares += x[row + i] * x[row + i];
        const double m = squares / C + eps, s = 1 / std::sqrt(m);
        // y_j = x_j s w_j and ds/dx_i = -s x_i / (m C).
        for (int64_t i = 0; i < C; ++i) {
            g.dw[i] += dy[row + i] * x[row + i] * s;
            g.dx[row + i] += dy[row + i] * w[i] * s;
            for (int64_t j = 0; j < C; ++j) g.dx[row + i] -= dy[row + j] * w[j] * x[row + j] * s * x[row + i] / (m * C);
        }
    }
    return g;
}

static double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}

Doubles swiglu(const Doubles& gate_up, int64_t F) {
    Doubles y;
    for (size_t row = 0; row < gate_up.size(); row += 2 * F)
        for (int64_t i = 0; i < F; ++i) {
            const double g = gate_up[row + i];
            y.push_back(g * sigmoid(g) * gate_up[row + F + i]);
        }
    return y;
}

Doubles swiglu_backward(const Doubles& dy, const Doubles& gate_up, int64_t F) {
    Doubles d(gate_up.size());
    for (size_t row = 0, at = 0; row < gate_up.size(); row += 2 * F)
        for (int64_t i = 0; i < F; ++i, ++at) {
            const double g = gate_up[row + i], s = sigmoid(g);
            d[row + i] = dy[at] * gate_up[row + F + i] * (s + g * s * (1 - s));
            d[row + F + i] = dy[at] * g * s;
        }
    return d;
}

Doubles rope(const Doubles& x, const Ints& positions, int64_t width, int heads, int D, double base, bool half,
             double sign) {
    Doubles y = x;
    for (size_t n = 0; n < positions.size(); ++n)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < D / 2; ++i) {
                const size_t at = n * width + size_t(h) * D, a = at + (half ? i : 2 * i), b = half ? a + D / 2 : a + 1;
                const double angle = sign * positions[n] * std::pow(base, -2.0 * i / D);
                y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
                y[b] = x[a] * std::sin(angle) + x[b] * std::cos(angle);
            }
    return y;
}

Loss cross_entropy(const Doubles& logits, const Ints& targets, int64_t V, double scale) {
    Loss r{Doubles(targets.size()), Doubles(logits.size())};
    for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i] < 0) continue;
        const double* x = logits.data() + i * V;
        double max = x[0], sum = 0;
        for (int64_t j = 0; j < V; ++j) max = std::fmax(max, x[j]);
        for (int64_t j = 0; j < V; ++j) sum += std::exp(x[j] - max);
        r.losses[i] = std::log(sum) + max - x[targets[i]];
        for (int64_t j = 0; j < V; ++j)
            r.dlogits[i * V + j] = scale * (std::exp(x[j] - max) / sum - (j == targets[i] ? 1 : 0));
    }
    return r;
}

namespace {

// One query of one head: keys [begin, position], their scores qk/sqrt(D), logits and probabilities.
struct Query {
    int b, t, h;
    int64_t begin, position;
    double factor, log_n;  // c and ln n
    Doubles scores, probabilities;
    double lse;
};

const double* head_row(const Doubles& x, int b, int64_t t, int h, int64_t T, int H, int D) {
    return x.data() + ((b * T + t) * H + h) * D;
}

void for_queries(const AttentionCase& a, const std::function<void(const Query&)>& f) {
    const size_t P = a.bias.size() / a.H;
    for (int b = 0; b < a.B; ++b)
        for (int h = 0; h < a.H; ++h)
            for (int t = 0; t < a.T; ++t) {
                Query q{b, t, h, a.key_begin[b * a.T + t], (a.offset.empty() ? 0 : a.offset[b]) + t, 1, 0, {}, {}, 0};
                q.log_n = std::log(double(q.position - q.begin + 1));
                if (!a.seq_scale.empty()) q.factor = a.seq_scale[h] * q.log_n;
                const double* query = head_row(a.q, b, t, h, a.T, a.H, a.D);
                double max = -INFINITY, sum = 0;
                for (int64_t j = q.begin; j <= q.position; ++j) {
                    const double* key = head_row(a.k, b, j, h / (a.H / a.K), a.S, a.K, a.D);
                    double dot = 0;
                    for (int i = 0; i < a.D; ++i) dot += query[i] * key[i];
                    q.scores.push_back(dot / std::sqrt(double(a.D)));
                    const double bias = P ? a.bias[h * P + (q.position - j)] : 0;
                    const double logit =
                        a.scale_scores ? q.factor * q.scores.back() + bias : q.factor * (q.scores.back() + bias);
                    q.probabilities.push_back(logit);
                    max = std::fmax(max, logit);
                }
                for (double& p : q.probabilities) sum += p = std::exp(p - max);
                for (double& p : q.probabilities) p /= sum;
                q.lse = max + std::log(sum);
                f(q);
            }
}

}  // namespace

AttentionResult attention(const AttentionCase& a) {
    AttentionResult r{Doubles(a.q.size()), Doubles(size_t(a.B) * a.H * a.T)};
    for_queries(a, [&](const Query& q) {
        r.lse[(size_t(q.b) * a.H + q.h) * a.T + q.t] = q.lse;
        double* out = r.out.data() + ((size_t(q.b) * a.T + q.t) * a.H + q.h) * a.D;
        for (int64_t j = q.begin; j <= q.position; ++j)
            for (int i = 0; i < a.D; ++i)
                out[i] += q.probabilities[j - q.begin] * head_row(a.v, q.b, j, q.h / (a.H / a.K), a.S, a.K, a.D)[i];
    });
    return r;
}

AttentionGradients attention_backward(const AttentionCase& a, const Doubles& dout) {
    const size_t P = a.bias.size() / a.H;
    const HeadGrad zero{Doubles(a.H), Doubles(a.H)};
    AttentionGradients r{Doubles(a.q.size()), Doubles(a.k.size()), Doubles(a.v.size()), zero, zero, {}};
    for (size_t p = 0; p < a.tables.size(); ++p) r.dtables.push_back(zero);
    auto add = [](HeadGrad& g, int h, double term) { g.value[h] += term, g.size[h] += std::fabs(term); };
    for_queries(a, [&](const Query& q) {
        const int kv = q.h / (a.H / a.K);
        const size_t row = ((size_t(q.b) * a.T + q.t) * a.H + q.h) * a.D;
        const double *query = a.q.data() + row, *d = dout.data() + row;
        Doubles dp;
        double mean = 0;
        for (int64_t j = q.begin; j <= q.position; ++j) {
            const size_t at = ((size_t(q.b) * a.S + j) * a.K + kv) * a.D;
            const double p = q.probabilities[j - q.begin];
            dp.push_back(0);
            for (int i = 0; i < a.D; ++i) dp.back() += d[i] * a.v[at + i], r.dv[at + i] += p * d[i];
            mean += p * dp.back();
        }
        double scale_term = 0, bias_term = 0;
        Doubles table_terms(a.tables.size());
        for (int64_t j = q.begin; j <= q.position; ++j) {
            const size_t n = j - q.begin, at = ((size_t(q.b) * a.S + j) * a.K + kv) * a.D, distance = q.position - j;
            const double g = q.begin == q.position ? 0 : q.probabilities[n] * (dp[n] - mean);
            const double bias = P ? a.bias[q.h * P + distance] : 0, dbias = a.scale_scores ? g : g * q.factor;
            for (int i = 0; i < a.D; ++i) {
                r.dq[row + i] += g * q.factor / std::sqrt(double(a.D)) * a.k[at + i];
                r.dk[at + i] += g * q.factor / std::sqrt(double(a.D)) * query[i];
            }
            scale_term += g * q.log_n * (q.scores[n] + (a.scale_scores ? 0 : bias));
            bias_term += dbias * bias;
            for (size_t p = 0; p < a.tables.size(); ++p) table_terms[p] += dbias * a.tables[p][q.h * P + distance];
        }
        if (!a.seq_scale.empty()) add(r.dseq_scale, q.h, scale_term);
        add(r.dscale, q.h, bias_term);
        for (size_t p = 0; p < a.tables.size(); ++p) add(r.dtables[p], q.h, table_terms[p]);
    });
    return r;
}

}  // namespace reference
