// Attention on tensor cores for heads of more than 64 and up to 128.
#include "cuda/attention_tensor.h"

namespace bam {

template struct TensorAttention<128>;

}  // namespace bam
