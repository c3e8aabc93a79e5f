// The emulated device's memory: one arena that host code cannot touch, allocations on pages of their own and filled with NaN, and the
// check that no two blocks of a launch write one byte.
//
// The check works by page faults: device memory is read-only when a block starts; the first write to a page saves the page and opens
// it; after the block its bytes are compared. So a write of the value that was there goes unseen, and nothing has to be instrumented.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda/emulate/parts.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// Whole pages are read, poisoned bytes behind allocations too; and no loop may become a call of memcpy, which ASan intercepts.
#define EMU_WHOLE_PAGES __attribute__((no_sanitize_address, optimize("no-tree-loop-distribute-patterns")))

namespace bam::emu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArena = 64ull << 30;      // address space; options().memory limits what can be allocated
constexpr size_t kLeftZero = 1ull << 30;    // allocations from this size on are not NaN-filled: their pages stay virtual
constexpr size_t kMaxArgumentBytes = 4096;  // of all arguments of a kernel

// Bytes [begin, end) of the arena that a block wrote in the running launch, kept to name it when another writes there too.
struct Written {
    size_t begin, end;
    dim3 block;
};

struct Memory {
    char* base = nullptr;
    size_t top = 0;                        // end of the highest allocation so far, in bytes from base
    size_t in_use = 0;
    std::map<size_t, size_t> live;         // offset -> bytes
    std::multimap<size_t, size_t> holes;   // bytes -> offset, below top
    int access = 0;                        // DeviceAccess objects alive
    // write-set check
    bool checking = false, in_block = false;
    char* saved = nullptr;                 // page contents before the running block wrote them, at the page's offset
    unsigned char* owned = nullptr;        // a bit for each byte written by an earlier block of this launch
    uint32_t* dirty = nullptr;             // pages the running block opened
    size_t n_dirty = 0;
    std::vector<uint32_t> owned_pages;     // pages with bits set
    std::vector<Written> written;
    std::vector<std::pair<size_t, size_t>> atomics;  // offset, bytes
    struct sigaction previous_segv;
};

Memory& memory() {
    static Memory m;
    return m;
}

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void poison([[maybe_unused]] char* p, [[maybe_unused]] size_t n) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(p, std::min(n, kLeftZero));  // shadow memory is real memory
#endif
}
void unpoison([[maybe_unused]] char* p, [[maybe_unused]] size_t n) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(p, n);
#endif
}

void protect(size_t begin, size_t end, int protection) {
    if (end > begin && mprotect(memory().base + begin, end - begin, protection)) {
        perror("emu: mprotect");
        abort();
    }
}

using Word = uint64_t;
constexpr size_t kWords = kPage / sizeof(Word);

EMU_WHOLE_PAGES void copy_page(char* to, const char* from) {
    for (size_t i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
}

// A page fault in the arena is either the first write of a block to a page, or a defect. Others go where they went before.
void on_fault(int, siginfo_t* info, void*) {
    Memory& m = memory();
    char* address = static_cast<char*>(info->si_addr);
    int thread;
    if (is_stack_overflow(address, &thread)) die("stack overflow of thread %d", thread);
    if (is_behind_shared(address)) die("access behind dynamic shared memory");
    if (!is_device_pointer(address)) {
        sigaction(SIGSEGV, &m.previous_segv, nullptr);
        return;
    }
    const size_t offset = size_t(address - m.base), page = offset / kPage;
    if (!m.in_block) die("host code touches device memory at %p (byte %zu of the arena)", static_cast<void*>(address), offset);
    if (offset >= up(m.top, kPage)) die("access outside all device allocations at %p", static_cast<void*>(address));
    copy_page(m.saved + page * kPage, m.base + page * kPage);
    protect(page * kPage, (page + 1) * kPage, PROT_READ | PROT_WRITE);
    m.dirty[m.n_dirty++] = uint32_t(page);
}

void* reserve(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) die("no address space for device memory");
    return p;
}

void make_arena() {
    Memory& m = memory();
    if (m.base) return;
    m.base = static_cast<char*>(reserve(kArena, PROT_NONE));
    m.saved = static_cast<char*>(reserve(kArena, PROT_READ | PROT_WRITE));
    m.owned = static_cast<unsigned char*>(reserve(kArena / 8, PROT_READ | PROT_WRITE));
    m.dirty = static_cast<uint32_t*>(reserve(kArena / kPage * sizeof(uint32_t), PROT_READ | PROT_WRITE));
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &m.previous_segv);
}

// Fault handlers run on a stack of their own: a fiber's may be what overflowed.
void make_signal_stack() {
    static thread_local bool made = false;
    stack_t now;
    if (made || (sigaltstack(nullptr, &now) == 0 && !(now.ss_flags & SS_DISABLE))) return;
    const size_t bytes = 256 << 10;
    stack_t stack{reserve(bytes, PROT_READ | PROT_WRITE), 0, bytes};
    sigaltstack(&stack, nullptr);
    made = true;
}

// The live allocation that starts last at or before offset, or live.end().
std::map<size_t, size_t>::iterator allocation_before(size_t offset) {
    Memory& m = memory();
    auto it = m.live.upper_bound(offset);
    return it == m.live.begin() ? m.live.end() : std::prev(it);
}

// The live allocation that holds offset or ends there, or live.end().
std::map<size_t, size_t>::iterator allocation_at(size_t offset) {
    auto it = allocation_before(offset);
    return it != memory().live.end() && offset <= it->first + it->second ? it : memory().live.end();
}

std::string describe(size_t offset) {
    auto it = allocation_before(offset);
    if (it == memory().live.end()) return "a byte before all allocations";
    return "byte " + std::to_string(offset - it->first) + " of an allocation of " + std::to_string(it->second) + " bytes";
}

}  // namespace

char* device_allocate(size_t bytes) {
    make_arena();
    Memory& m = memory();
    bytes = std::max<size_t>(bytes, 1);
    const size_t room = up(bytes, kPage) + kPage;  // a page behind that belongs to nobody
    if (m.in_use + bytes > size_t(options().memory)) return nullptr;
    size_t offset;
    if (auto hole = m.holes.lower_bound(room); hole != m.holes.end()) {
        offset = hole->second;
        const size_t rest = hole->first - room;
        m.holes.erase(hole);
        if (rest) m.holes.emplace(rest, offset + room);
    } else {
        offset = m.top;
        if (offset + room > kArena) return nullptr;
        m.top += room;
    }
    m.live[offset] = bytes;
    m.in_use += bytes;
    unpoison(m.base + offset, bytes);
    poison(m.base + offset + bytes, room - bytes);
    if (bytes < kLeftZero) {
        DeviceAccess access;
        memset(m.base + offset, 0xff, bytes);
    }
    return m.base + offset;
}

bool device_release(void* p) {
    Memory& m = memory();
    if (!is_device_pointer(p)) return false;
    auto it = m.live.find(size_t(static_cast<char*>(p) - m.base));
    if (it == m.live.end()) return false;
    const size_t room = up(it->second, kPage) + kPage;
    m.in_use -= it->second;
    madvise(m.base + it->first, room, MADV_DONTNEED);
    poison(m.base + it->first, room);
    m.holes.emplace(room, it->first);
    m.live.erase(it);
    return true;
}

size_t device_bytes_in_use() { return memory().in_use; }

bool is_device_pointer(const void* p) {
    const Memory& m = memory();
    const char* c = static_cast<const char*>(p);
    return m.base && c >= m.base && c < m.base + kArena;
}

void check_device_range(const void* p, size_t bytes, const char* what) {
    if (bytes == 0) return;
    if (!is_device_pointer(p)) die("%s: %p is not device memory", what, p);
    const size_t offset = size_t(static_cast<const char*>(p) - memory().base);
    auto it = allocation_at(offset);
    if (it == memory().live.end() || offset + bytes > it->first + it->second)
        die("%s: %zu bytes at %p (%s) leave the allocation", what, bytes, p, describe(offset).c_str());
}

DeviceAccess::DeviceAccess() {
    Memory& m = memory();
    if (m.access++ == 0 && m.base) protect(0, m.top, PROT_READ | PROT_WRITE);
}
DeviceAccess::~DeviceAccess() {
    Memory& m = memory();
    if (--m.access == 0 && m.base) protect(0, m.top, PROT_NONE);
}

// ---- write-set check --------------------------------------------------------------------------------------------------------

namespace {

// Marks bytes [begin, end) as written by this block; dies when an earlier block wrote one of them.
void own(size_t begin, size_t end, dim3 block) {
    Memory& m = memory();
    for (size_t i = begin; i < end; ++i) {
        unsigned char& byte = m.owned[i / 8];
        const unsigned char bit = static_cast<unsigned char>(1u << (i % 8));
        if (byte & bit) {
            bool atomic = false;
            for (const auto& [at, bytes] : m.atomics) atomic |= i >= at && i < at + bytes;
            if (atomic) continue;
            for (const Written& w : m.written)
                if (i >= w.begin && i < w.end)
                    die("two blocks write %s: block (%u,%u,%u) before,", describe(i).c_str(), w.block.x, w.block.y, w.block.z);
            die("two blocks write %s", describe(i).c_str());
        }
        byte = static_cast<unsigned char>(byte | bit);
    }
    // Runs with small gaps are remembered as one: it only serves the message above.
    if (!m.written.empty() && m.written.back().end + 16 >= begin && m.written.back().end <= begin &&
        m.written.back().block.x == block.x && m.written.back().block.y == block.y && m.written.back().block.z == block.z)
        m.written.back().end = end;
    else
        m.written.push_back({begin, end, block});
}

// The next run [*begin, *end) of bytes that differ, from *end on; false when there is none.
EMU_WHOLE_PAGES bool next_change(const char* now, const char* before, size_t* begin, size_t* end) {
    size_t i = *end;
    while (i < kPage && now[i] == before[i])
        if (i % sizeof(Word) == 0 && reinterpret_cast<const Word*>(now)[i / 8] == reinterpret_cast<const Word*>(before)[i / 8]) i += 8;
        else ++i;
    *begin = i;
    while (i < kPage && now[i] != before[i]) ++i;
    *end = i;
    return *begin < kPage;
}

void compare_page(uint32_t page, dim3 block) {
    Memory& m = memory();
    const size_t at = size_t(page) * kPage;
    const auto it = allocation_at(at);
    const size_t limit = it == m.live.end() ? at : std::min(at + kPage, it->first + it->second);
    size_t begin, end = 0;
    while (next_change(m.base + at, m.saved + at, &begin, &end)) {
        if (at + end > limit) die("write outside the allocation: %s,", describe(std::max(at + begin, limit)).c_str());
        own(at + begin, at + end, block);
    }
    m.owned_pages.push_back(page);
}

}  // namespace

void writes_begin() {
    Memory& m = memory();
    make_arena();
    make_signal_stack();
    m.checking = options().check_writes;
#if defined(EMU_TSAN)
    m.checking = false;  // TSan's own view of the memory matters there
#endif
    m.written.clear();
    m.atomics.clear();
    m.in_block = true;
    protect(0, m.top, m.checking ? PROT_READ : PROT_READ | PROT_WRITE);
}

void block_begin() { memory().n_dirty = 0; }

void block_end(uint64_t, dim3 index) {
    Memory& m = memory();
    if (!m.checking) return;
    std::sort(m.dirty, m.dirty + m.n_dirty);
    for (size_t i = 0; i < m.n_dirty;) {
        size_t j = i;
        for (; j < m.n_dirty && m.dirty[j] == m.dirty[i] + (j - i); ++j) compare_page(m.dirty[j], index);
        protect(size_t(m.dirty[i]) * kPage, size_t(m.dirty[i] + (j - i)) * kPage, PROT_READ);
        i = j;
    }
    m.n_dirty = 0;
}

void writes_end() {
    Memory& m = memory();
    for (uint32_t page : m.owned_pages) memset(m.owned + size_t(page) * kPage / 8, 0, kPage / 8);
    m.owned_pages.clear();
    m.in_block = false;
    protect(0, m.top, m.access ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void note_atomic(void* address, size_t bytes) {
    if (is_device_pointer(address)) memory().atomics.emplace_back(size_t(static_cast<char*>(address) - memory().base), bytes);
}

// ---- launches ---------------------------------------------------------------------------------------------------------------

namespace {

std::string site_of(const LaunchShape& s) { return std::string(s.grid.site.file) + ":" + std::to_string(s.grid.site.line); }

bool is_mapped(uintptr_t address) {
    unsigned char residency;
    return mincore(reinterpret_cast<void*>(address / kPage * kPage), kPage, &residency) == 0;
}

}  // namespace

void check_launch(const LaunchShape& s) {
    const std::string at = "launch at " + site_of(s);
    const int64_t limits[3] = {0x7fffffff, 65535, 65535}, grid[3] = {s.grid.x, s.grid.y, s.grid.z};
    for (int i = 0; i < 3; ++i)
        if (grid[i] < 1 || grid[i] > limits[i])
            die("%s: grid.%c is %lld, expected 1 to %lld", at.c_str(), "xyz"[i], static_cast<long long>(grid[i]), static_cast<long long>(limits[i]));
    const uint64_t threads = uint64_t(s.block.x) * s.block.y * s.block.z;
    if (threads < 1 || threads > 1024 || s.block.z > 64) die("%s: %llu threads a block, expected at most 1024", at.c_str(), static_cast<unsigned long long>(threads));
    if (threads % kWarp) die("%s: %llu threads a block, expected a multiple of 32", at.c_str(), static_cast<unsigned long long>(threads));
    const size_t shared = options().arch == 80 ? 166912 : 232448;
    if (s.shared_bytes > shared) die("%s: %zu bytes of dynamic shared memory, sm_%d has %zu", at.c_str(), s.shared_bytes, options().arch, shared);
    if (s.argument_bytes > kMaxArgumentBytes) die("%s: %zu bytes of arguments, at most %zu", at.c_str(), s.argument_bytes, kMaxArgumentBytes);
}

// Every aligned word that could be a pointer: into the arena it must hit a live allocation; mapped elsewhere it is a host pointer.
// Words that clearing the padding changed hold none, but stale bytes that may look like one.
void check_argument(const LaunchShape& s, const void* argument, const void* cleared, size_t bytes) {
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uintptr_t word, same;
        memcpy(&word, static_cast<const char*>(argument) + i, 8);
        memcpy(&same, static_cast<const char*>(cleared) + i, 8);
        // Programs, heaps and stacks of 64-bit Linux lie in this range; below it are small numbers and ASan's shadow memory.
        if (word != same || word < (1ull << 45) || word >= (1ull << 48)) continue;
        const void* p = reinterpret_cast<const void*>(word);
        if (is_device_pointer(p)) {
            if (allocation_at(size_t(static_cast<const char*>(p) - memory().base)) == memory().live.end())
                die("launch at %s: argument holds a pointer to released device memory", site_of(s).c_str());
        } else if (is_mapped(word)) {
            die("launch at %s: argument holds a host pointer (%p, byte %zu of %zu)", site_of(s).c_str(), p, i, bytes);
        }
    }
}

}  // namespace bam::emu
