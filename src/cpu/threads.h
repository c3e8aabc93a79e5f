// Loops over the cores. Which thread does which part never changes a result: parts are fixed by their index.
#pragma once
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace bam {

inline int usable_threads() {
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return 1;
#endif
}

// f(part, thread) for parts [0, count), taken in order as threads become free.
template <typename F>
void for_parts(int threads, int64_t count, F f) {
#ifdef _OPENMP
    if (threads > 1 && count > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) f(i, omp_get_thread_num());
        return;
    }
#endif
    for (int64_t i = 0; i < count; ++i) f(i, 0);
    (void)threads;
}

// f(begin, end) over [0, n) in one range a thread, of at least `grain` elements, cut at multiples of `unit`.
template <typename F>
void for_ranges(int threads, int64_t n, int64_t grain, F f, int64_t unit = 1) {
    int64_t parts = n / (grain > 0 ? grain : 1);
    parts = parts < 1 ? 1 : parts > threads ? threads : parts;
    const int64_t units = (n + unit - 1) / unit;
    for_parts(threads, parts, [&](int64_t i, int) {
        const int64_t begin = units * i / parts * unit, end = units * (i + 1) / parts * unit;
        if (begin < n) f(begin, end < n ? end : n);
    });
}

}  // namespace bam
