// RMSNorm with the residual sum, and its gradient; statistics in fp32.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace {

using bam::NormBackwardArgs;

template <typename T, typename Delta>
void norm_rows(T* y, float* rstd, float* x_out, const float* x_in, const Delta* delta, const float* w, int64_t rows,
               int64_t C, float eps) {
    for (int64_t r = 0; r < rows; ++r) {
        const float* x = x_in + r * C;
        Vec squares{};
        if (delta) {
            float* out = x_out + r * C;
            each(C, [&](int64_t i, auto tag) {
                const Vec v = load(x + i, tag) + load(delta + r * C + i, tag);
                store(out + i, v, tag);
                squares += v * v;
            });
            x = out;
        } else {
            each(C, [&](int64_t i, auto tag) {
                const Vec v = load(x + i, tag);
                squares += v * v;
            });
        }
        const float s = 1.0f / __builtin_sqrtf(sum(squares) / float(C) + eps);
        rstd[r] = s;
        each(C, [&](int64_t i, auto tag) { store(y + r * C + i, load(x + i, tag) * s * load(w + i, tag), tag); });
    }
}

// y = x s w, s = (mean x² + eps)^-1/2:  dx += s (dy w - x s² mean(dy w x)),  dw += dy x s.
template <typename T>
void norm_rows_backward(const NormBackwardArgs& a, const T* dy) {
    const int64_t C = a.C;
    uint16_t* low = static_cast<uint16_t*>(a.dx_low);
    for (int64_t r = 0; r < a.rows; ++r) {
        const float* x = a.x + r * C;
        const T* d = dy + r * C;
        const float s = a.rstd[r];
        Vec dots{};
        each(C, [&](int64_t i, auto tag) {
            const Vec t = load(d + i, tag), u = load(x + i, tag);
            dots += t * load(a.w + i, tag) * u;
            store(a.dw + i, load(a.dw + i, tag) + t * u * s, tag);
        });
        const float k = sum(dots) / float(C) * s * s;
        float* dx = a.dx + r * C;
        each(C, [&](int64_t i, auto tag) {
            const Vec v = load(dx + i, tag) + s * (load(d + i, tag) * load(a.w + i, tag) - load(x + i, tag) * k);
            store(dx + i, v, tag);
            if (low) store(low + r * C + i, v, tag);
        });
    }
}

}  // namespace

namespace bam::BAM_ISA {

void norm_forward(void* y, bool low, float* rstd, float* x_out, const float* x_in, const void* delta, bool delta_low,
                  const float* w, int64_t rows, int64_t C, float eps) {
    auto run = [&](auto* out) {
        if (delta_low)
            norm_rows(out, rstd, x_out, x_in, static_cast<const uint16_t*>(delta), w, rows, C, eps);
        else
            norm_rows(out, rstd, x_out, x_in, static_cast<const float*>(delta), w, rows, C, eps);
    };
    if (low)
        run(static_cast<uint16_t*>(y));
    else
        run(static_cast<float*>(y));
}

void norm_backward(const NormBackwardArgs& a) {
    if (a.low)
        norm_rows_backward(a, static_cast<const uint16_t*>(a.dy));
    else
        norm_rows_backward(a, static_cast<const float*>(a.dy));
}

}  // namespace bam::BAM_ISA
