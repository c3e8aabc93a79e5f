// The backends that tests of ops run on: the CPU on each instruction set of this machine and on AMX, emulated where it is not; CUDA through copies, emulated in every
// order of threads and blocks, or the GPU that is there.
#pragma once
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "src/backend.h"

namespace bam::test {

struct Subject {
    std::string name;
    std::function<std::unique_ptr<Backend>()> make;  // its arrays are on the host
};
inline void PrintTo(const Subject& s, std::ostream* out) { *out << s.name; }

std::vector<Subject> subjects();

// Where tests of whole models run: "cpu", or what BAM_TEST_DEVICE names ("cuda": emulated, or the GPU; "amx": the CPU with it, emulated where it is not).
std::string test_device();
std::unique_ptr<Backend> make_test_backend(int threads);

}  // namespace bam::test
