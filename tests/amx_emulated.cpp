#include "amx_emulated.h"

#include "cpu/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <signal.h>
#include <ucontext.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace bam::test {
namespace {

// ---- the tiles of a thread
// --------------------------------------------------------------------------------------------

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Config {  // as LDTILECFG reads it
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tiles {
    bool configured = false;
    Config config{};
    uint8_t data[kTiles][kRows][kRowBytes];
};
thread_local Tiles tiles;

void require(bool fine, const char* what) {
    if (fine) return;
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
}

int rows_of(int t) {
    require(tiles.configured, "a tile used without a configuration");
    return tiles.config.rows[t];
}
int bytes_of(int t) {
    return tiles.config.row_bytes[t];
}

void configure(const void* memory) {
    Config& c = tiles.config;
    std::memcpy(&c, memory, sizeof c);
    require(c.palette == 1 && c.start_row == 0, "LDTILECFG: palette 1 and start row 0 expected");
    for (uint8_t r : c.reserved) require(r == 0, "LDTILECFG: a reserved byte is set");
    for (int t = 0; t < 16; ++t) {
        const bool both = (c.rows[t] > 0) == (c.row_bytes[t] > 0);
        require(both && c.rows[t] <= kRows && c.row_bytes[t] <= kRowBytes, "LDTILECFG: more than 16 rows of 64 bytes");
        require(t < kTiles || c.rows[t] == 0, "LDTILECFG: a ninth tile");
    }
    tiles.configured = true;
    std::memset(tiles.data, 0, sizeof tiles.data);
}

void load(int t, const char* memory, int64_t stride) {
    const int rows = rows_of(t);
    std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
    for (int r = 0; r < rows; ++r) std::memcpy(tiles.data[t][r], memory + r * stride, size_t(bytes_of(t)));
}

void store(char* memory, int64_t stride, int t) {
    const int rows = rows_of(t);
    for (int r = 0; r < rows; ++r) std::memcpy(memory + r * stride, tiles.data[t][r], size_t(bytes_of(t)));
}

float flushed(float x) {  // subnormals count as zero
    return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

float bf16_of(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return flushed(std::bit_cast<float>(uint32_t(bits) << 16));
}

// c += a b: sums over even and over odd k, both added to c at the end. Products of bf16 are exact in fp32.
void multiply_bf16(int c, int a, int b) {
    require(rows_of(c) == rows_of(a) && bytes_of(c) == bytes_of(b) && bytes_of(a) == 4 * rows_of(b),
            "TDPBF16PS: the tiles' shapes do not fit");
    const int columns = bytes_of(c) / 4;
    for (int m = 0; m < rows_of(c); ++m) {
        float sum[2][kRowBytes / 4] = {};
        for (int k = 0; k < rows_of(b); ++k)
            for (int odd = 0; odd < 2; ++odd) {
                const float x = bf16_of(tiles.data[a][m] + 4 * k + 2 * odd);
                for (int n = 0; n < columns; ++n)
                    sum[odd][n] = flushed(sum[odd][n] + x * bf16_of(tiles.data[b][k] + 4 * n + 2 * odd));
            }
        for (int n = 0; n < columns; ++n) {
            float value;
            std::memcpy(&value, tiles.data[c][m] + 4 * n, 4);
            value = flushed(flushed(value) + flushed(sum[0][n] + sum[1][n]));
            std::memcpy(tiles.data[c][m] + 4 * n, &value, 4);
        }
    }
}

// ---- machine code
// -----------------------------------------------------------------------------------------------------

// A three-byte VEX instruction of map 0F38, 128 bits, W0: all that AMX has.
struct Instruction {
    const uint8_t* next;  // behind what was read so far
    int prefix, opcode, mod, reg, rm, vvvv;
    bool x, b;  // high bits of index and base

    bool decode(const uint8_t* p) {
        const bool vex = p[0] == 0xc4 && (p[1] & 0x1f) == 2 && (p[2] & 0x84) == 0;
        x = !(p[1] & 0x40), b = !(p[1] & 0x20);
        prefix = p[2] & 3, vvvv = (~p[2] >> 3) & 15, opcode = p[3];
        mod = p[4] >> 6, reg = (p[4] >> 3) & 7, rm = p[4] & 7;
        next = p + 5;
        return vex;
    }

    template <typename T>
    int64_t immediate() {
        T value;
        std::memcpy(&value, next, sizeof value);
        next += sizeof value;
        return value;
    }
};

int64_t register_of(const ucontext_t& u, int number) {
    constexpr int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return u.uc_mcontext.gregs[order[number]];
}

// The address of a memory operand; for tiles its index register is the stride, times the scale.
char* operand(Instruction& i, const ucontext_t& u, int64_t* stride) {
    int64_t address = 0;
    *stride = 0;
    bool displaced = i.mod == 2;
    if (i.rm == 4) {
        const int sib = *i.next++, scale = sib >> 6, index = ((sib >> 3) & 7) | (i.x << 3),
                  base = (sib & 7) | (i.b << 3);
        if (index != 4) *stride = register_of(u, index) << scale;
        if ((sib & 7) == 5 && i.mod == 0)
            displaced = true;
        else
            address = register_of(u, base);
    } else if (i.rm == 5 && i.mod == 0) {  // relative to the next instruction
        address = i.immediate<int32_t>();
        address += reinterpret_cast<int64_t>(i.next);
    } else {
        address = register_of(u, i.rm | (i.b << 3));
    }
    if (displaced) address += i.immediate<int32_t>();
    if (i.mod == 1) address += i.immediate<int8_t>();
    return reinterpret_cast<char*>(address);
}

// Does one instruction and moves behind it; false: it is not one of AMX's.
bool execute(ucontext_t& u) {
    enum { none, x66, xf3, xf2 };
    Instruction i;
    if (!i.decode(reinterpret_cast<const uint8_t*>(u.uc_mcontext.gregs[REG_RIP]))) return false;
    const bool memory = i.mod != 3;
    int64_t stride;
    if (i.opcode == 0x49 && i.prefix == none && memory && i.reg == 0) {
        const char* p = operand(i, u, &stride);
        configure(p + stride);
    } else if (i.opcode == 0x49 && i.prefix == none && !memory && i.reg == 0 && i.rm == 0) {
        tiles.configured = false;
    } else if (i.opcode == 0x49 && i.prefix == xf2 && !memory && i.rm == 0) {
        rows_of(i.reg);
        std::memset(tiles.data[i.reg], 0, sizeof tiles.data[i.reg]);
    } else if (i.opcode == 0x4b && (i.prefix == xf2 || i.prefix == x66) && memory) {
        const char* p = operand(i, u, &stride);
        load(i.reg, p, stride);
    } else if (i.opcode == 0x4b && i.prefix == xf3 && memory) {
        char* p = operand(i, u, &stride);
        store(p, stride, i.reg);
    } else if (i.opcode == 0x5c && i.prefix == xf3 && !memory) {
        multiply_bf16(i.reg, i.rm, i.vvvv);
    } else {
        return false;
    }
    u.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(i.next);
    return true;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
    if (!execute(*static_cast<ucontext_t*>(context))) ::signal(SIGILL, SIG_DFL);  // raised again, it ends the process
}

}  // namespace

void emulate_amx() {
    if (machine_has(Isa::amx)) return;
    struct sigaction action {};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGILL, &action, nullptr);
}

}  // namespace bam::test

#else

namespace bam::test {
void emulate_amx() {}
}  // namespace bam::test

#endif
