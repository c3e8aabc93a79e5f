// Checks that accesses of two streams to the same bytes are ordered: by an event that one records and the other waits for, or by the
// host waiting for one before it issues the other. Only what copies, fills and library calls touch is known; kernels' accesses are not.
#include <algorithm>
#include <map>
#include <vector>

#include "cuda/emulate/parts.h"

namespace bam::emu {
namespace {

// How far other streams' work is known to be done before what is issued now.
struct Clock {
    std::map<cudaStream_t, uint64_t> done;
    bool covers(cudaStream_t s, uint64_t position) const {
        const auto it = done.find(s);
        return it != done.end() && it->second >= position;
    }
    void advance(cudaStream_t s, uint64_t position) { done[s] = std::max(done[s], position); }
    void advance(const Clock& o) {
        for (const auto& [s, position] : o.done) advance(s, position);
    }
};

struct Access {
    const char *begin, *end;
    cudaStream_t stream;
    uint64_t position;  // of the work in its stream
    bool writes;
    const char* what;
};

struct Orders {
    Clock host;  // what the host has waited for
    std::map<cudaStream_t, Clock> streams;
    std::map<cudaEvent_t, Clock> events;
    std::vector<Access> accesses;  // that the host has not waited for
};

Orders& orders() {
    static Orders o;
    return o;
}

}  // namespace

void check_access(cudaStream_t s, uint64_t position, const void* p, size_t bytes, bool writes, const char* what) {
    Orders& o = orders();
    Clock& now = o.streams[s];
    now.advance(o.host);
    const Access mine{static_cast<const char*>(p), static_cast<const char*>(p) + bytes, s, position, writes, what};
    for (const Access& a : o.accesses) {
        if (a.stream == s || a.end <= mine.begin || mine.end <= a.begin || (!a.writes && !writes) || now.covers(a.stream, a.position)) continue;
        die("%s %s bytes that %s %s on another stream, and no event orders them (%zu bytes at %p)", what, writes ? "writes" : "reads", a.what,
            a.writes ? "writes" : "reads", size_t(std::min(a.end, mine.end) - std::max(a.begin, mine.begin)), static_cast<const void*>(std::max(a.begin, mine.begin)));
    }
    o.accesses.push_back(mine);
}

void note_record(cudaEvent_t e, cudaStream_t s, uint64_t position) {
    Clock c = orders().streams[s];
    c.advance(s, position);
    orders().events[e] = std::move(c);
}

void note_wait(cudaStream_t s, cudaEvent_t e) { orders().streams[s].advance(orders().events[e]); }

void note_host_wait(cudaStream_t s, uint64_t position) {
    Orders& o = orders();
    o.host.advance(o.streams[s]);
    o.host.advance(s, position);
    std::erase_if(o.accesses, [&](const Access& a) { return o.host.covers(a.stream, a.position); });
}

void note_host_wait(cudaEvent_t e) {
    Orders& o = orders();
    o.host.advance(o.events[e]);
    std::erase_if(o.accesses, [&](const Access& a) { return o.host.covers(a.stream, a.position); });
}

// Another stream may get the same address.
void forget(cudaStream_t s) {
    Orders& o = orders();
    o.streams.erase(s);
    o.host.done.erase(s);
    for (auto& [other, clock] : o.streams) clock.done.erase(s);
    for (auto& [event, clock] : o.events) clock.done.erase(s);
}
void forget(cudaEvent_t e) { orders().events.erase(e); }

}  // namespace bam::emu
