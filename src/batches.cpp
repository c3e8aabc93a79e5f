#include "batches.h"

#include <algorithm>

#include "check.h"

namespace bam {

Batch make_batch(const std::vector<int32_t>& rows, int B, int T, const DataConfig& d) {
    Batch b;
    b.B = B, b.T = T;
    const size_t N = size_t(B) * T;
    b.ids.resize(N), b.targets.resize(N), b.key_begin.resize(N), b.positions.resize(N);
    for (int r = 0; r < B; ++r) {
        const int32_t* row = rows.data() + size_t(r) * (T + 1);
        std::copy_n(row, T, b.ids.data() + size_t(r) * T);
        std::copy_n(row + 1, T, b.targets.data() + size_t(r) * T);
        find_documents(row, T, d, b.key_begin.data() + size_t(r) * T, b.positions.data() + size_t(r) * T);
    }
    return b;
}

Batch training_batch(const RowLoader& loader, int64_t first, int count, int T, int vocab_size, const DataConfig& d) {
    std::vector<int32_t> rows(size_t(count) * (T + 1));
    for (int r = 0; r < count; ++r) loader.read_row(first + r, vocab_size, rows.data() + size_t(r) * (T + 1));
    return make_batch(rows, count, T, d);
}

int64_t covering_rows(int64_t n_tokens, int T) { return n_tokens < 2 ? 0 : (n_tokens - 1 + T - 1) / T; }

Batch covering_batch(const TokenStream& s, int64_t begin, int64_t end, int64_t first, int count, int T, int vocab_size,
                     const DataConfig& d) {
    std::vector<int32_t> rows(size_t(count) * (T + 1), 0);
    for (int r = 0; r < count; ++r) {
        const int64_t start = begin + (first + r) * T, n = std::min<int64_t>(T + 1, end - start);
        int32_t* row = rows.data() + size_t(r) * (T + 1);
        s.read(start, n, row);
        for (int64_t i = 0; i < n; ++i)
            if (row[i] < 0 || row[i] >= vocab_size) {
                const TokenPlace p = s.place(start + i);
                throw Error(kExitData, p.path + ": token id " + std::to_string(row[i]) + " at byte " +
                                           std::to_string(p.byte_offset) + ", expected below vocab_size " +
                                           std::to_string(vocab_size));
            }
    }
    Batch b = make_batch(rows, count, T, d);
    for (int r = 0; r < count; ++r)
        for (int64_t t = std::max<int64_t>(0, end - 1 - (begin + (first + r) * T)); t < T; ++t)
            b.targets[size_t(r) * T + t] = -1;
    return b;
}

}  // namespace bam
