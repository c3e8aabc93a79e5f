// Scalars of RAdam (Liu et al. 2019, decoupled weight decay) and AdamW. See optimizer.h.
#include "optimizer.h"

#include <algorithm>
#include <cmath>

namespace bam {

UpdateStep update_step(const OptimizerConfig& o, int64_t t, double grad_scale) {
    const double b1t = std::pow(o.beta1, double(t)), b2t = std::pow(o.beta2, double(t));
    UpdateStep s{};
    s.beta1 = float(o.beta1), s.beta2 = float(o.beta2), s.eps = float(o.eps);
    s.rest1 = float(1 - o.beta1), s.rest2 = float(1 - o.beta2);
    s.grad_scale = float(grad_scale);
    s.adaptive = true;
    s.c1 = float(1 / (1 - b1t));
    s.c2 = 1;
    if (o.name == OptimizerKind::adamw) {
        s.c2 = float(1 / std::sqrt(1 - b2t));
        return s;
    }
    const double rho_inf = 2 / (1 - o.beta2) - 1;
    const double rho = rho_inf - 2 * double(t) * b2t / (1 - b2t);
    if (rho > 5) {
        const double r = std::sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho));
        s.c1 = float(r * std::sqrt(1 - b2t) / (1 - b1t));
    } else {
        s.adaptive = false;
    }
    return s;
}

std::vector<UpdateGroup> update_groups(const ParameterTable& t, const OptimizerConfig& o, double schedule_factor) {
    std::vector<UpdateGroup> groups;
    ParameterGroup last = ParameterGroup::frozen;
    for (const Parameter& p : t.all) {
        if (p.group == ParameterGroup::frozen) break;  // they come last
        if (groups.empty() || p.group != last) {
            const bool prior = p.group == ParameterGroup::prior && o.prior_lr >= 0;
            const double lr = (prior ? o.prior_lr : o.lr) * schedule_factor;
            const double decay = p.group == ParameterGroup::decayed ? o.weight_decay : 0;
            groups.push_back({p.offset, p.offset, float(lr), float(decay)});
        }
        groups.back().end = p.offset + p.numel();
        last = p.group;
    }
    return groups;
}

double clip_factor(double norm, double clip) { return clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0; }

}  // namespace bam
