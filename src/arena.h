// Cuts one device allocation into tensors. Layout code runs twice: first against an empty arena, which only counts (that is
// also how `--dry-run` knows the memory), then against the allocated one.
#pragma once
#include <initializer_list>
#include <memory>

#include "backend.h"

namespace bam {

class Arena {
public:
    Arena() = default;
    Arena(Backend& device, int64_t bytes) : device_(&device), base_(static_cast<char*>(device.allocate(bytes))) {}
    ~Arena() {
        if (base_) device_->release(base_);
    }
    Arena(Arena&& other) noexcept { *this = std::move(other); }
    Arena& operator=(Arena&& other) noexcept {
        std::swap(device_, other.device_);
        std::swap(base_, other.base_);
        std::swap(used_, other.used_);
        return *this;
    }

    Tensor take(DType dtype, std::initializer_list<int64_t> dims) {
        Tensor t(nullptr, dtype, dims);
        if (base_) t.data = base_ + used_;
        used_ += (t.bytes() + 63) / 64 * 64;
        return t;
    }
    int64_t used() const { return used_; }
    void rewind() { used_ = 0; }  // tensors taken so far must not be used any more

private:
    Backend* device_ = nullptr;
    char* base_ = nullptr;
    int64_t used_ = 0;
};

// Lays out with `layout(arena)`, allocates, lays out again; returns the arena that owns the memory.
template <typename Layout>
Arena make_arena(Backend& device, Layout layout) {
    Arena counting;
    layout(counting);
    Arena arena(device, counting.used());
    layout(arena);
    return arena;
}

}  // namespace bam
