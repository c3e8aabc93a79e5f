// A non-owning view of dense, row-major memory on some device: pointer, element type and at most four dimensions.
// Owners are arenas and backends. A Tensor is passed by value; an empty one (data == nullptr) means "not given".
#pragma once
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace bam {

enum class DType : uint8_t { f32, bf16, i32 };

inline int64_t size_of(DType t) { return t == DType::bf16 ? 2 : 4; }
inline const char* name_of(DType t) { return t == DType::f32 ? "fp32" : t == DType::bf16 ? "bf16" : "int32"; }

// bfloat16 as storage only; arithmetic is fp32.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline bf16 to_bf16(float x) {
    const uint32_t u = __builtin_bit_cast(uint32_t, x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) { return to_bf16(x); }

template <typename T>
constexpr DType dtype_of() {
    if constexpr (sizeof(T) == 2) return DType::bf16;
    return std::is_same_v<T, float> ? DType::f32 : DType::i32;
}

struct Tensor {
    void* data = nullptr;
    DType dtype = DType::f32;
    int rank = 0;
    int64_t shape[4] = {1, 1, 1, 1};

    Tensor() = default;
    Tensor(void* data, DType dtype, std::initializer_list<int64_t> dims) : data(data), dtype(dtype) {
        for (int64_t d : dims) shape[rank++] = d;
    }

    explicit operator bool() const { return data != nullptr; }
    int64_t numel() const { return rank ? shape[0] * shape[1] * shape[2] * shape[3] : 0; }
    int64_t bytes() const { return numel() * size_of(dtype); }
    int64_t last() const { return shape[rank - 1]; }            // innermost dimension
    int64_t rows() const { return rank ? numel() / last() : 0; }  // all the others together

    // The elements as T; a mismatch is a bug in the caller.
    template <typename T>
    T* as() const {
        if (data && dtype != dtype_of<T>()) throw std::logic_error(std::string("tensor holds ") + name_of(dtype));
        return static_cast<T*>(data);
    }

    // Rows [begin, begin + count) of the first dimension.
    Tensor slice(int64_t begin, int64_t count) const {
        Tensor t = *this;
        t.data = static_cast<char*>(data) + begin * (numel() / shape[0]) * size_of(dtype);
        t.shape[0] = count;
        return t;
    }

    Tensor view(std::initializer_list<int64_t> dims) const {
        Tensor t(data, dtype, dims);
        if (t.numel() != numel()) throw std::logic_error("view of another size");
        return t;
    }
};

}  // namespace bam
