// Working memory that grows to the largest size asked for and is kept: 64-byte aligned, contents undefined.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "check.h"

namespace bam {

class Buffer {
public:
    template <typename T>
    T* room(int64_t n) {
        const int64_t bytes = n * int64_t(sizeof(T));
        if (bytes > size_) {
            data_.reset();
            size_ = (bytes + 63) / 64 * 64;
            data_.reset(std::aligned_alloc(64, size_));
            if (!data_) size_ = 0, throw Error(kExitFailure, "out of memory: " + std::to_string(bytes) + " bytes");
        }
        return static_cast<T*>(data_.get());
    }
    template <typename T>
    T* get() const { return static_cast<T*>(data_.get()); }

private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> data_;
    int64_t size_ = 0;
};

}  // namespace bam
