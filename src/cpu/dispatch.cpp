// Which instruction sets this machine has, and which one the kernels use.
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <asm/prctl.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bam {

namespace base {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}
#endif

static constexpr Isa kAll[] = {Isa::base, Isa::avx2, Isa::avx512, Isa::avx512bf16, Isa::amx};

const char* name_of(Isa isa) {
    static constexpr const char* names[] = {"base", "avx2", "avx512", "avx512bf16", "amx"};
    return names[int(isa)];
}

#if defined(__x86_64__)
// Linux lets a process use the AMX tile registers only after it asked (Documentation/arch/x86/xstate.rst).
static bool tiles_permitted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
#else
    return false;
#endif
}

static bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
    return (d & kTile) && (d & kBf16) && tiles_permitted();
}

static bool has_avx512bf16() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}
#endif

bool machine_has(Isa isa) {
    if (isa == Isa::base) return true;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512) return avx512;
    if (isa == Isa::avx512bf16) return avx512 && has_avx512bf16();
    return avx512 && has_avx512bf16() && has_amx();
#else
    return false;
#endif
}

const Kernels& kernels_for(Isa isa) {
    if (!machine_has(isa)) throw Error(kExitUsage, std::string("this machine has no ") + name_of(isa));
#if defined(__x86_64__)
    if (isa == Isa::avx2) return avx2::kernels;
    if (isa == Isa::avx512) return avx512::kernels;
    if (isa == Isa::avx512bf16) return avx512bf16::kernels;
    if (isa == Isa::amx) return amx::kernels;
#endif
    return base::kernels;
}

Isa choose_isa() {
    Isa best = Isa::base;
    std::string names;
    for (Isa isa : kAll) {
        if (!machine_has(isa)) continue;
        best = isa;
        names += std::string(names.empty() ? "" : ", ") + name_of(isa);
    }
    const char* wanted = std::getenv("BAM_ISA");
    if (!wanted || !*wanted) return best;
    for (Isa isa : kAll)
        if (std::string(wanted) == name_of(isa) && machine_has(isa)) return isa;
    throw Error(kExitUsage, std::string("BAM_ISA: ") + wanted + ", expected one of " + names);
}

}  // namespace bam
