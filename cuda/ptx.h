// Instructions that C++ has no name for, each beside the twin that runs on the CPU: tensor cores (mma.m16n8k16, bf16 -> fp32),
// ldmatrix, cp.async, 2^x, 1/sqrt(x), products that no FMA takes, packing to bf16.
//
// Registers of a warp's lane l = 4g + t (PTX ISA, mma.m16n8k16): A (16 x 16): a[i] holds row g + 8(i % 2), columns 2t + 8(i / 2)
// and the next; B (16 x 8): b[i] holds rows 2t + 8i and the next, column g; D (16 x 8): d[e] is row g + 8(e / 2), column 2t + e % 2.
// The lower column or row is in the lower half of a register.
#pragma once
#include "cuda/device.h"

namespace bam {

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// d += a b
__device__ __forceinline__ void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned); r[m] receives
// row l / 4, columns 2(l % 4) and the next, of matrix m (transposed: columns and rows exchanged).
__device__ __forceinline__ void load_matrices(uint32_t r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)) : "memory");
}

// Starts a copy of 16 (4) bytes from global to shared memory, or of zeros when !valid (from must still be a device address).
__device__ __forceinline__ void async_copy16(void* shared, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(shared)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void async_copy4(void* shared, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(shared_address(shared)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
// Closes a group of copies; waits until at most N of this thread's groups are unfinished. Other threads see the data after a barrier.
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rsqrt(float x) { return rsqrtf(x); }
// a b, rounded before it is added to anything.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }

// Two floats rounded to bf16, lo in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

#else

namespace emu {

inline float half_of(uint32_t word, int high) { return __builtin_bit_cast(float, high ? word & 0xffff0000u : word << 16); }

struct MmaOperand {
    float* d;
    const uint32_t *a, *b;
};

EMU_UNTRACED inline void mma_combine(void* const operands[kWarp]) {
    float A[16][16], B[16][8];
    for (int l = 0; l < kWarp; ++l) {
        const auto& m = *static_cast<const MmaOperand*>(operands[l]);
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; ++i)
            for (int h = 0; h < 2; ++h) A[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + h] = half_of(m.a[i], h);
        for (int i = 0; i < 2; ++i)
            for (int h = 0; h < 2; ++h) B[2 * t + 8 * i + h][g] = half_of(m.b[i], h);
    }
    float D[16][8] = {};
    for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 16; ++k)
            for (int c = 0; c < 8; ++c) D[r][c] += A[r][k] * B[k][c];
    for (int l = 0; l < kWarp; ++l) {
        const auto& m = *static_cast<const MmaOperand*>(operands[l]);
        for (int e = 0; e < 4; ++e) m.d[e] += D[l / 4 + 8 * (e / 2)][2 * (l % 4) + e % 2];
    }
}

struct MatrixRow {
    uint16_t row[8];
    uint32_t* r;
};

template <bool Transposed>
EMU_UNTRACED void load_matrices_combine(void* const operands[kWarp]) {
    for (int m = 0; m < 4; ++m)
        for (int l = 0; l < kWarp; ++l) {
            uint32_t word = 0;
            for (int h = 0; h < 2; ++h) {
                const int along = 2 * (l % 4) + h, across = l / 4;
                const int row = Transposed ? along : across, column = Transposed ? across : along;
                word |= uint32_t(static_cast<const MatrixRow*>(operands[8 * m + row])->row[column]) << (16 * h);
            }
            static_cast<const MatrixRow*>(operands[l])->r[m] = word;
        }
}

// The row is read here, in its own lane and seen by sanitizers; only then do lanes exchange.
template <bool Transposed>
void load_matrices_twin(uint32_t r[4], const void* row, Site site) {
    MatrixRow operand;
    operand.r = r;
    if (reinterpret_cast<uintptr_t>(row) % 16) die("ldmatrix at %s:%d: the row address is not a multiple of 16", site.file, site.line);
    for (int i = 0; i < 8; ++i) operand.row[i] = static_cast<const uint16_t*>(row)[i];
    warp_collective(&operand, load_matrices_combine<Transposed>, "ldmatrix", site);
}

// Copies word by word, in the lane that asked for it and seen by sanitizers.
inline void make_async_copy(const AsyncCopy& c) {
    for (int i = 0; i < c.bytes / 4; ++i)
        static_cast<uint32_t*>(c.to)[i] = i < c.valid / 4 ? static_cast<const uint32_t*>(c.from)[i] : 0;
}

inline void issue_async_copy(void* to, const void* from, int bytes, bool valid, Site site) {
    AsyncCopies& a = async_copies();
    if (reinterpret_cast<uintptr_t>(to) % size_t(bytes) || reinterpret_cast<uintptr_t>(from) % size_t(bytes))
        die("cp.async at %s:%d: an address is not a multiple of %d", site.file, site.line, bytes);
    if (a.n_copies == kMaxAsyncCopies) die("cp.async at %s:%d: more than %d copies in flight", site.file, site.line, kMaxAsyncCopies);
    AsyncCopy& c = a.copies[a.n_copies++];
    c = {to, from, bytes, valid ? bytes : 0};
    if (options().async == Async::early) {
        make_async_copy(c);
        c.bytes = 0;
    }
}

// Makes the copies of all but the newest `keep` groups.
inline void finish_async_copies(int keep) {
    AsyncCopies& a = async_copies();
    const int groups = a.n_groups - keep;
    if (groups <= 0) return;
    const int n = a.group_end[groups - 1];
    for (int i = 0; i < n; ++i) make_async_copy(a.copies[i]);
    for (int i = n; i < a.n_copies; ++i) a.copies[i - n] = a.copies[i];
    for (int i = groups; i < a.n_groups; ++i) a.group_end[i - groups] = a.group_end[i] - n;
    a.n_copies -= n;
    a.n_groups -= groups;
}

}  // namespace emu

inline void mma(float d[4], const uint32_t a[4], const uint32_t b[2], const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::MmaOperand operand{d, a, b};
    emu::warp_collective(&operand, emu::mma_combine, "mma", {file, line});
}
inline void load_matrices(uint32_t r[4], const void* row, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::load_matrices_twin<false>(r, row, {file, line});
}
inline void load_matrices_transposed(uint32_t r[4], const void* row, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::load_matrices_twin<true>(r, row, {file, line});
}
inline void async_copy16(void* to, const void* from, bool valid, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::issue_async_copy(to, from, 16, valid, {file, line});
}
inline void async_copy4(void* to, const void* from, bool valid, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::issue_async_copy(to, from, 4, valid, {file, line});
}
inline void async_commit() {
    emu::AsyncCopies& a = emu::async_copies();
    if (a.n_groups == emu::kMaxAsyncCopies) emu::die("more than %d groups of cp.async in flight", emu::kMaxAsyncCopies);
    a.group_end[a.n_groups++] = a.n_copies;
}
template <int N>
void async_wait() { emu::finish_async_copies(N); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float rounded_product(float a, float b) {
    float p = a * b;
    asm("" : "+m"(p));
    return p;
}
inline uint32_t pack_bf16(float lo, float hi) {
    return __builtin_bit_cast(uint16_t, __float2bfloat16(lo)) | uint32_t(__builtin_bit_cast(uint16_t, __float2bfloat16(hi))) << 16;
}

#endif

}  // namespace bam
