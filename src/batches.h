// Rows of tokens -> Batch: the one place where ids become inputs, targets, documents and positions.
#pragma once
#include <cstdint>
#include <vector>

#include "config.h"
#include "loader.h"
#include "model.h"

namespace bam {

// B rows of T+1 ids each (row-major); targets are the ids one later.
Batch make_batch(const std::vector<int32_t>& rows, int B, int T, const DataConfig& d);

// Rows [first, first + count) of the training order.
Batch training_batch(const RowLoader& loader, int64_t first, int count, int T, int vocab_size, const DataConfig& d);

// The tokens [begin, end) as rows of T targets, each target once, the last row padded with targets -1: number of rows, and rows
// [first, first + count) of them.
int64_t covering_rows(int64_t n_tokens, int T);
Batch covering_batch(const TokenStream& s, int64_t begin, int64_t end, int64_t first, int count, int T, int vocab_size,
                     const DataConfig& d);

}  // namespace bam
