// Memory: 64-byte aligned; blocks of megabytes ask for huge pages, without which they are slow.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace bam {

void* allocate_memory(
    int64_t bytes);  // contents undefined; released by std::free. Error(kExitFailure) if there is none

// Working memory that grows to the largest size asked for and is kept.
class Buffer {
public:
    template <typename T>
    T* room(int64_t n) {
        const int64_t bytes = n * int64_t(sizeof(T));
        if (bytes > size_) {
            data_.reset();
            size_ = 0;
            data_.reset(allocate_memory(bytes));
            size_ = bytes;
        }
        return static_cast<T*>(data_.get());
    }
    template <typename T>
    T* get() const {
        return static_cast<T*>(data_.get());
    }

private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> data_;
    int64_t size_ = 0;
};

}  // namespace bam
