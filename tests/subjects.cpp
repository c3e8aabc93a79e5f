#include "subjects.h"

#include <cstdlib>
#include <stdexcept>

#include "amx_base.h"
#include "amx_emulated.h"
#include "check.h"
#include "cpu/backend.h"
#include "through_device.h"

#ifdef BAM_CUDA_EMULATED
#include "cuda/emulate.h"
#endif

namespace bam::amx {
extern const Kernels kernels;
}

namespace bam::test {

// Null where the machine could not run the rest of them.
static const Kernels* amx_kernels() {
#if defined(__x86_64__)
    if (machine_has(Isa::avx512bf16)) return &amx::kernels;
#endif
    return nullptr;
}

static std::vector<Subject> cuda_subjects() {
    const auto through = [] { return std::make_unique<ThroughDevice>(make_cuda_backend(0)); };
#ifdef BAM_CUDA_EMULATED
    const auto ordered = [=](emu::Order order, emu::Async async, emu::Streams streams, int arch) {
        return [=] {
            emu::options().arch = arch;
            emu::options().schedule = order;
            emu::options().async = async;
            emu::options().streams = streams;
            return through();
        };
    };
    return {{"cuda_forward", ordered(emu::Order::forward, emu::Async::early, emu::Streams::lazy, 90)},
            {"cuda_reverse", ordered(emu::Order::reverse, emu::Async::late, emu::Streams::eager, 80)},
            {"cuda_random", ordered(emu::Order::random, emu::Async::late, emu::Streams::random, 90)}};
#else
    try {
        make_cuda_backend(0);
        return {{"cuda", through}};
    } catch (const Error&) {
        return {};
    }
#endif
}

std::vector<Subject> subjects() {
    std::vector<Subject> all;
    for (Isa i : {Isa::base, Isa::avx2, Isa::avx512, Isa::avx512bf16, Isa::amx})
        if (machine_has(i)) all.push_back({name_of(i), [i] { return std::make_unique<CpuBackend>(2, i); }});
    emulate_amx();
    const auto with = [&](const char* name, const Kernels* k) {
        all.push_back({name, [k] { return std::make_unique<CpuBackend>(2, *k); }});
    };
    if (amx_base_kernels()) with("amx_base", amx_base_kernels());
    if (amx_kernels() && !machine_has(Isa::amx)) with("amx_emulated", amx_kernels());
    for (Subject& s : cuda_subjects()) all.push_back(std::move(s));
    return all;
}

std::string test_device() {
    const char* name = std::getenv("BAM_TEST_DEVICE");
    return name ? name : "cpu";
}

std::unique_ptr<Backend> make_test_backend(int threads) {
    if (test_device() == "cuda") return make_cuda_backend(0);
    if (test_device() == "cpu") return make_cpu_backend(threads);
    if (test_device() != "amx" || !amx_kernels())
        throw std::runtime_error("BAM_TEST_DEVICE: no " + test_device() + " here");
    emulate_amx();
    return std::make_unique<CpuBackend>(threads, *amx_kernels());
}

}  // namespace bam::test
