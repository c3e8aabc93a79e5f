#pragma once
#include "cpu/kernels.h"

namespace bam::test {

const Kernels* amx_base_kernels();  // null where there can be no AMX

}  // namespace bam::test
