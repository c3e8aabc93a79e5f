// Runs the threads of a block as fibers: each runs until it waits at a barrier or a warp operation, in the order that
// EMU_SCHEDULE asks for. When nothing can move, or threads wait at different barriers, it says who waits where and aborts.
#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/emulate/parts.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMU_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#if defined(EMU_TSAN)
// The first race ends the process. Page faults are handled where they happen, so nothing in their handler is unsafe.
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:report_signal_unsafe=0"; }
#endif

namespace bam::emu {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

enum class State : uint8_t { ready, at_barrier, at_warp_op, returned };

struct Thread {
    fcontext_t context;
    State state;
    const char* what;  // the warp operation it waits in
    Site site;
    void* operand;
    Combine combine;
    unsigned x, y, z;
    unsigned barriers, warp_ops;  // passed so far: which of two alternating TSan tokens is next
    void* fake_stack;             // ASan
    void* fiber;                  // TSan
    AsyncCopies async;
};

struct Warp {
    int waiting;
    char token[2];
};

constexpr size_t kPage = 4096;
#if defined(__SANITIZE_ADDRESS__) || defined(EMU_TSAN)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxShared = 232448;
constexpr unsigned char kCanary = 0xc5;

// Everything about the block that runs now.
struct Block {
    std::unique_ptr<Thread[]> threads{new Thread[kMaxThreads]};
    std::vector<int> order;
    Warp warps[kMaxThreads / kWarp];
    char* stacks = nullptr;   // kMaxThreads stacks, each above a guard page
    int fibers = 0;           // TSan fibers made so far
    char* shared_end = nullptr;  // dynamic shared memory ends at a guard page
    char* shared = nullptr;
    size_t shared_bytes = 0;
    int n = 0, current = -1, returned = 0;
    fcontext_t scheduler{};
    void *scheduler_fiber = nullptr, *scheduler_fake_stack = nullptr;
    const void* scheduler_stack = nullptr;
    size_t scheduler_stack_bytes = 0;
    const std::function<void()>* body = nullptr;
    Site launch_site{};
    char launch_token, barrier_token[2];
};

Block& block() {
    static Block b;
    return b;
}

// ---- switching --------------------------------------------------------------------------------------------------------------

#if defined(EMU_TSAN)
void tsan_release(void* token) { __tsan_release(token); }
void tsan_acquire(void* token) { __tsan_acquire(token); }
#else
void tsan_release(void*) {}
void tsan_acquire(void*) {}
#endif

// From a thread back to the scheduler.
void leave_thread(Block& b) {
    [[maybe_unused]] Thread& t = b.threads[b.current];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(t.state == State::returned ? nullptr : &t.fake_stack, b.scheduler_stack, b.scheduler_stack_bytes);
#endif
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(b.scheduler_fiber, __tsan_switch_to_fiber_no_sync);
#endif
    b.scheduler = jump_fcontext(b.scheduler, nullptr).fctx;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(t.fake_stack, &b.scheduler_stack, &b.scheduler_stack_bytes);
#endif
}

char* stack_of(Block& b, int i) { return b.stacks + size_t(i) * (kStackBytes + kPage) + kPage; }

void resume(Block& b, int i) {
    Thread& t = b.threads[i];
    b.current = i;
    threadIdx.x.value = t.x;
    threadIdx.y.value = t.y;
    threadIdx.z.value = t.z;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&b.scheduler_fake_stack, stack_of(b, i), kStackBytes);
#endif
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(t.fiber, __tsan_switch_to_fiber_no_sync);
#endif
    t.context = jump_fcontext(t.context, nullptr).fctx;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(b.scheduler_fake_stack, nullptr, nullptr);
#endif
}

void thread_entry(transfer_t from) {
    Block& b = block();
    b.scheduler = from.fctx;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &b.scheduler_stack, &b.scheduler_stack_bytes);
#endif
    tsan_acquire(&b.launch_token);
    (*b.body)();
    tsan_release(&b.launch_token);
    Thread& t = b.threads[b.current];
    if (t.async.n_copies) die("a thread returned with cp.async copies that it never waited for");
    t.state = State::returned;
    ++b.returned;
    leave_thread(b);
    abort();  // a returned thread is never resumed
}

// ---- one block --------------------------------------------------------------------------------------------------------------

void make_threads(Block& b, dim3 shape) {
    if (!b.stacks) {
        const size_t bytes = kMaxThreads * (kStackBytes + kPage);
        b.stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (b.stacks == MAP_FAILED) die("no memory for the stacks of a block");
        for (int i = 0; i < kMaxThreads; ++i) mprotect(b.stacks + size_t(i) * (kStackBytes + kPage), kPage, PROT_NONE);
    }
    b.n = int(shape.x * shape.y * shape.z);
#if defined(EMU_TSAN)
    for (; b.fibers < b.n; ++b.fibers) b.threads[b.fibers].fiber = __tsan_create_fiber(0);  // ~0.4 ms each: made once
#endif
    for (int i = 0; i < b.n; ++i) {
        Thread& t = b.threads[i];
        t.x = unsigned(i) % shape.x;
        t.y = unsigned(i) / shape.x % shape.y;
        t.z = unsigned(i) / (shape.x * shape.y);
    }
    b.order.resize(size_t(b.n));
    for (int i = 0; i < b.n; ++i) b.order[size_t(i)] = options().schedule == Order::reverse ? b.n - 1 - i : i;
}

// Dynamic shared memory ends at a guard page; the few bytes up to it, which keep the start aligned, hold a canary.
void make_shared(Block& b, size_t bytes) {
    const size_t room = (kMaxShared + kPage - 1) / kPage * kPage;
    if (!b.shared_end) {
        char* p = static_cast<char*>(mmap(nullptr, room + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (p == MAP_FAILED) die("no memory for shared memory");
        b.shared_end = p + room;
        mprotect(b.shared_end, kPage, PROT_NONE);
    }
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(b.shared_end - room, room);
#endif
    b.shared_bytes = bytes;
    b.shared = b.shared_end - (bytes + 127) / 128 * 128;
    memset(b.shared + bytes, kCanary, size_t(b.shared_end - b.shared) - bytes);
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(b.shared_end - room, room - size_t(b.shared_end - b.shared));
    ASAN_POISON_MEMORY_REGION(b.shared + bytes, size_t(b.shared_end - b.shared) - bytes + kPage);
#endif
}

void check_shared_canary([[maybe_unused]] Block& b) {
#if !defined(__SANITIZE_ADDRESS__)
    for (char* p = b.shared + b.shared_bytes; p < b.shared_end; ++p)
        if (static_cast<unsigned char>(*p) != kCanary)
            die("write behind dynamic shared memory: byte %td of %zu", p - b.shared, b.shared_bytes);
#endif
}

void reset_threads(Block& b) {
    for (int i = 0; i < b.n; ++i) {
        Thread& t = b.threads[i];
        // Tops staggered by 64 bytes: stacks aligned alike would share cache sets.
        t.context = make_fcontext(stack_of(b, i) + kStackBytes - size_t(i % 32) * 64, kStackBytes - 32 * 64, thread_entry);
        t.state = State::ready;
        t.site = {nullptr, 0};
        t.barriers = t.warp_ops = 0;
        t.fake_stack = nullptr;
        t.async.n_copies = t.async.n_groups = 0;
    }
    for (int w = 0; w < b.n / kWarp; ++w) b.warps[w].waiting = 0;
    b.returned = 0;
    if (b.shared_bytes) memset(b.shared, 0xff, b.shared_bytes);  // NaN: uninitialised reads show up
}

bool same_place(Site a, Site b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

// Lets all threads past a barrier that every one of them has reached. False: not all have.
bool open_barrier(Block& b) {
    Site site{};
    int waiting = 0;
    bool same = true;
    for (int i = 0; i < b.n; ++i) {
        const Thread& t = b.threads[i];
        if (t.state != State::at_barrier) continue;
        if (waiting++ && !same_place(t.site, site)) same = false;
        site = t.site;
    }
    if (waiting == 0 || waiting + b.returned < b.n) return false;
    if (!same) die("divergent __syncthreads");
    if (b.returned) die("threads returned before a __syncthreads that others wait at");
    for (int i = 0; i < b.n; ++i) b.threads[i].state = State::ready;
    return true;
}

void run_block(Block& b, std::mt19937& random) {
    reset_threads(b);
    tsan_release(&b.launch_token);
    while (b.returned < b.n) {
        if (options().schedule == Order::random) std::shuffle(b.order.begin(), b.order.end(), random);
        bool moved = false;
        for (int i : b.order) {
            if (b.threads[i].state != State::ready) continue;
            resume(b, i);
            moved = true;
        }
        if (!open_barrier(b) && !moved) die("deadlock: threads wait for each other");
    }
    tsan_acquire(&b.launch_token);
    b.current = -1;
    check_shared_canary(b);
}

const char* name_of(State s, const Thread& t) {
    switch (s) {
        case State::ready: return "running";
        case State::at_barrier: return "wait at __syncthreads";
        case State::at_warp_op: return t.what;
        default: return "returned";
    }
}

void print_threads(const Block& b) {
    for (int i = 0; i < b.n;) {
        const Thread& t = b.threads[i];
        int j = i + 1;
        for (; j < b.n; ++j) {
            const Thread& u = b.threads[j];
            if (u.state != t.state || u.site.line != t.site.line || u.site.file != t.site.file) break;
        }
        fprintf(stderr, "emu:   thread%s %d", j - i > 1 ? "s" : "", i);
        if (j - i > 1) fprintf(stderr, "-%d", j - 1);
        fprintf(stderr, ": %s%s", t.state == State::at_warp_op ? "wait in " : "", name_of(t.state, t));
        if (t.site.file && t.state != State::returned) fprintf(stderr, "%s %s:%d", t.state == State::ready ? ", last stop" : ",", t.site.file, t.site.line);
        fprintf(stderr, "\n");
        i = j;
    }
}

}  // namespace

void die(const char* format, ...) {
    Block& b = block();
    va_list args;
    va_start(args, format);
    fprintf(stderr, "emu: ");
    vfprintf(stderr, format, args);
    va_end(args);
    if (b.body)
        fprintf(stderr, " in block (%u,%u,%u) of the kernel launched at %s:%d", blockIdx.x.value, blockIdx.y.value, blockIdx.z.value,
                b.launch_site.file, b.launch_site.line);
    fprintf(stderr, "\n");
    if (b.body && b.current >= 0) print_threads(b);
    fflush(stderr);
    abort();
}

bool is_stack_overflow(const void* address, int* thread) {
    Block& b = block();
    const char* p = static_cast<const char*>(address);
    if (!b.stacks || p < b.stacks || p >= b.stacks + kMaxThreads * (kStackBytes + kPage)) return false;
    *thread = int(size_t(p - b.stacks) / (kStackBytes + kPage));
    return size_t(p - b.stacks) % (kStackBytes + kPage) < kPage;
}

bool is_behind_shared(const void* address) {
    const Block& b = block();
    return b.shared_end && address >= b.shared_end && address < b.shared_end + kPage;
}

void run_grid(const LaunchShape& shape, const std::function<void()>& thread_body) {
    Block& b = block();
    const int64_t blocks = shape.grid.x * shape.grid.y * shape.grid.z;
    b.body = &thread_body;
    b.launch_site = shape.grid.site;
    make_threads(b, shape.block);
    make_shared(b, shape.shared_bytes);
#if defined(EMU_TSAN)
    b.scheduler_fiber = __tsan_get_current_fiber();
#endif
    const auto set = [](Index3& to, unsigned x, unsigned y, unsigned z) { to = {{x}, {y}, {z}}; };
    set(blockDim, shape.block.x, shape.block.y, shape.block.z);
    set(gridDim, unsigned(shape.grid.x), unsigned(shape.grid.y), unsigned(shape.grid.z));
    std::mt19937 random(options().seed);
    std::vector<int64_t> order;
    if (options().schedule == Order::random) {
        order.resize(size_t(blocks));
        for (int64_t i = 0; i < blocks; ++i) order[size_t(i)] = i;
        std::shuffle(order.begin(), order.end(), random);
    }
    writes_begin();
    for (int64_t i = 0; i < blocks; ++i) {
        const int64_t id = !order.empty() ? order[size_t(i)] : options().schedule == Order::reverse ? blocks - 1 - i : i;
        if (options().ends_only && id != 0 && id != blocks - 1) continue;
        set(blockIdx, unsigned(id % shape.grid.x), unsigned(id / shape.grid.x % shape.grid.y), unsigned(id / (shape.grid.x * shape.grid.y)));
        block_begin();
        run_block(b, random);
        block_end(uint64_t(id), {blockIdx.x.value, blockIdx.y.value, blockIdx.z.value});
    }
    writes_end();
    b.body = nullptr;
}

// ---- inside a kernel --------------------------------------------------------------------------------------------------------

int lane() { return block().current % kWarp; }
char* dynamic_shared_memory() { return block().shared; }
AsyncCopies& async_copies() { return block().threads[block().current].async; }

void barrier(Site site) {
    Block& b = block();
    Thread& t = b.threads[b.current];
    t.state = State::at_barrier;
    t.site = site;
    void* token = &b.barrier_token[t.barriers++ & 1];
    tsan_release(token);
    leave_thread(b);
    tsan_acquire(token);
}

void check_full_mask(unsigned mask, const char* what, Site site) {
    if (mask != 0xffffffffu) die("%s at %s:%d with mask 0x%08x: kernels use the full mask", what, site.file, site.line, mask);
}

void warp_collective(void* operand, Combine combine, const char* what, Site site, bool orders_memory) {
    Block& b = block();
    const int first = b.current / kWarp * kWarp;
    Warp& warp = b.warps[b.current / kWarp];
    Thread& t = b.threads[b.current];
    t.state = State::at_warp_op;
    t.what = what;
    t.site = site;
    t.operand = operand;
    t.combine = combine;
    void* token = &warp.token[t.warp_ops++ & 1];
    if (orders_memory) tsan_release(token);
    if (++warp.waiting < kWarp) {
        leave_thread(b);
    } else {  // the last lane to come completes the operation and goes on
        void* operands[kWarp];
        for (int i = 0; i < kWarp; ++i) {
            const Thread& u = b.threads[first + i];
            if (u.combine != combine || !same_place(u.site, site)) die("divergent warp operation");
            operands[i] = u.operand;
        }
        combine(operands);
        for (int i = 0; i < kWarp; ++i) b.threads[first + i].state = State::ready;
        warp.waiting = 0;
    }
    if (orders_memory) tsan_acquire(token);
}

namespace {
struct Vote {
    bool predicate;
    unsigned result;
};
}  // namespace

unsigned ballot(unsigned mask, bool predicate, const char* what, Site site) {
    check_full_mask(mask, what, site);
    Vote vote{predicate, 0};
    warp_collective(
        &vote,
        [](void* const operands[kWarp]) {
            unsigned all = 0;
            for (int i = 0; i < kWarp; ++i) all |= unsigned(static_cast<Vote*>(operands[i])->predicate) << i;
            for (int i = 0; i < kWarp; ++i) static_cast<Vote*>(operands[i])->result = all;
        },
        what, site);
    return vote.result;
}

// ---- options ----------------------------------------------------------------------------------------------------------------

namespace {

[[noreturn]] void bad_option(const char* name, const char* value, const char* expected) {
    die("%s=%s, expected %s", name, value, expected);
}

// Splits "random:7" into its word and seed.
std::string word_of(const char* value, unsigned* seed) {
    const std::string s = value;
    const size_t colon = s.find(':');
    if (colon != std::string::npos) *seed = unsigned(strtoul(s.c_str() + colon + 1, nullptr, 10));
    return s.substr(0, colon);
}

Options read_options() {
    Options o;
    if (const char* v = getenv("EMU_SCHEDULE")) {
        const std::string w = word_of(v, &o.seed);
        if (w == "reverse") o.schedule = Order::reverse;
        else if (w == "random") o.schedule = Order::random;
        else if (w != "forward") bad_option("EMU_SCHEDULE", v, "forward, reverse, random or random:SEED");
    }
    if (const char* v = getenv("EMU_ASYNC")) {
        const std::string w = v;
        if (w == "late") o.async = Async::late;
        else if (w != "early") bad_option("EMU_ASYNC", v, "early or late");
    }
    if (const char* v = getenv("EMU_STREAMS")) {
        const std::string w = word_of(v, &o.seed);
        if (w == "eager") o.streams = Streams::eager;
        else if (w == "random") o.streams = Streams::random;
        else if (w != "lazy") bad_option("EMU_STREAMS", v, "lazy, eager, random or random:SEED");
    }
    if (const char* v = getenv("EMU_WRITES")) {
        const std::string w = v;
        if (w == "off") o.check_writes = false;
        else if (w != "check") bad_option("EMU_WRITES", v, "check or off");
    }
    if (const char* v = getenv("EMU_ARCH")) {
        o.arch = std::string(v) == "none" ? 0 : atoi(v);
        if (o.arch != 75 && o.arch != 80 && o.arch != 90 && std::string(v) != "none") bad_option("EMU_ARCH", v, "75, 80, 90 or none");
    }
    if (const char* v = getenv("EMU_MEMORY")) {
        o.memory = atoll(v);
        if (o.memory <= 0) bad_option("EMU_MEMORY", v, "bytes");
    }
    return o;
}

}  // namespace

Options& options() {
    static Options o = read_options();
    return o;
}

}  // namespace bam::emu
