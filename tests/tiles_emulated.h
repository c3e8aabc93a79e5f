#pragma once
#include "cpu/kernels.h"

namespace bam::test {

const Kernels& tiles_emulated_kernels();

}  // namespace bam::test
