// What tiles of keys and of a distance table can at most contribute to attention.
#include "cpu/isa/declare.h"
#include "cpu/isa/vec.h"

namespace {

constexpr int kTile = bam::kAttentionTile;

template <typename T>
void norms(float* y, const T* k, int64_t keys, int64_t stride, int D) {
    for (int64_t first = 0; first < keys; first += kTile) {
        const int64_t end = keys - first < kTile ? keys : first + kTile;
        float most = 0;
        for (int64_t j = first; j < end; ++j) {
            Vec squares{};
            each(D, [&](int64_t d, auto tag) {
                squares += load(k + j * stride + d, tag) * load(k + j * stride + d, tag);
            });
            const float x = sum(squares);
            most = most != most || x <= most ? most : x;  // a NaN stays
        }
        *y++ = __builtin_sqrtf(most);
    }
}

}  // namespace

namespace bam::BAM_ISA {

void tile_norms(float* y, const void* k, bool low, int64_t keys, int64_t stride, int D) {
    low ? norms(y, static_cast<const uint16_t*>(k), keys, stride, D)
        : norms(y, static_cast<const float*>(k), keys, stride, D);
}

void tile_ranges(float* max, float* min, const float* x, int64_t n) {
    for (int64_t first = 0; first < n; first += kTile, x += kTile) {
        const int64_t m = n - first < kTile ? n - first : kTile;
        Vec high = splat(x[0]), low = high;
        each(m, [&](int64_t i, auto tag) {
            const Vec v = keep(load(x + i, tag), splat(x[0]), tag);
            high = vmax(high, v), low = -vmax(-low, -v);
        });
        *max++ = maximum(high), *min++ = -maximum(-low);
    }
}

}  // namespace bam::BAM_ISA
