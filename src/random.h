// Counter-based random numbers: value = f(seed, stream, index), so any element can be drawn alone, in any order, on any
// thread or rank, and nothing has to be stored to resume. The mixer is SplitMix64's finalizer (Steele et al. 2014) applied twice.
#pragma once
#include <cmath>
#include <cstdint>
#include <string_view>

namespace bam {

inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return mix64(mix64(mix64(seed + 0x9e3779b97f4a7c15ull) ^ stream) + (index + 1) * 0x9e3779b97f4a7c15ull);
}

// Uniform in [0, 1) with 53 bits.
inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return double(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Standard normal by Box-Muller from two draws of its own.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const double u = 1.0 - random_uniform(seed, stream, 2 * index);  // (0, 1]
    const double v = random_uniform(seed, stream, 2 * index + 1);
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * M_PI * v);
}

// Uniform in [0, n), n > 0; the bias of the multiply-shift is below n / 2^64.
inline uint64_t random_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n) {
    return uint64_t((unsigned __int128)random_bits(seed, stream, index) * n >> 64);
}

// A stream number for a name (FNV-1a): the same tensor draws the same values in every model that has it.
inline uint64_t stream_of(std::string_view name) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (unsigned char c : name) h = (h ^ c) * 0x100000001b3ull;
    return h;
}

}  // namespace bam
