// Stand-ins for the part of NCCL that training on many devices uses, with the real prototypes, stricter than the library. Ranks are
// processes of one machine (ranks.cpp); several ranks in one process are not emulated.
//
// - A collective is work on its stream, and the host never waits for it. It runs when EMU_STREAMS says so, on the thread that waits: with
//   lazy streams a host that waits for another rank by other means must have waited for its own streams before.
// - Ranks must agree on each call: collective, count, type, reduction, root and whether it is in place. If not, every rank dies and names
//   the odd one. So does a rank that waits longer than EMU_NCCL_TIMEOUT seconds (60).
// - A process that has ended, or aborted its communicator, is nobody's mistake here: the others' collectives finish with NaN, further calls
//   return ncclRemoteError, as does ncclCommGetAsyncError, and ncclGetLastError names the rank. (The library would wait for ever on some
//   links; its users poll and abort.)
// - All collectives of a process, of whatever communicators, are in one order: on two streams an event or the host must give it. NCCL
//   only recommends that; without it ranks may wait for each other.
// - Sums are taken in rank order, bf16 in fp32 and rounded once. NCCL's rings and trees add in other orders, and round bf16 at each hop.
#if __has_include(<nccl.h>)
#include <nccl.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/emulate/parts.h"
#include "cuda/emulate/ranks.h"

using namespace bam::emu;

struct ncclComm {
    Room room;
    int process;
    uint64_t calls = 0;
    const char* end = nullptr;  // how it ended; kept to name its use
};

namespace {

enum class Kind : uint8_t { all_reduce, reduce_scatter, all_gather, broadcast };
constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast"};
constexpr const char* kTurns[] = {"the turn of ncclAllReduce", "the turn of ncclReduceScatter", "the turn of ncclAllGather",
                                  "the turn of ncclBroadcast"};

struct Type {
    const char* name;
    size_t bytes;
};
constexpr Type kTypes[ncclNumTypes] = {{"int8", 1}, {"uint8", 1}, {"int32", 4}, {"uint32", 4}, {"int64", 8}, {"uint64", 8}, {"float16", 2},
                                       {"float32", 4}, {"float64", 8}, {"bfloat16", 2}, {"float8e4m3", 1}, {"float8e5m2", 1}};

struct Call {
    Kind kind;
    const char* send;
    char* recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root;
    ncclComm* comm;
    cudaStream_t stream;
    uint64_t number = 0;  // among the communicator's calls

    const char* name() const { return kNames[int(kind)]; }
    bool reduces() const { return kind == Kind::all_reduce || kind == Kind::reduce_scatter; }
    bool sends() const { return kind != Kind::broadcast || root == comm->room.rank; }
    size_t element() const { return kTypes[type].bytes; }
    size_t bytes() const { return count * element(); }
    size_t send_bytes() const { return kind == Kind::reduce_scatter ? bytes() * size_t(comm->room.ranks) : sends() ? bytes() : 0; }
    size_t recv_bytes() const { return kind == Kind::all_gather ? bytes() * size_t(comm->room.ranks) : bytes(); }
    // Where NCCL lets the two buffers meet: at this rank's own part.
    bool is_in_place() const {
        const size_t mine = size_t(comm->room.rank) * bytes();
        return count && send + (kind == Kind::reduce_scatter ? mine : 0) == recv + (kind == Kind::all_gather ? mine : 0);
    }
};

struct Nccl {
    std::vector<std::unique_ptr<ncclComm>> comms;  // ended ones too
    std::string error;                             // the last one
    int group_depth = 0;
    std::vector<Call> group;
    char turn;  // stands for the order of all collectives
};

Nccl& nccl() {
    static Nccl n;
    return n;
}

ncclComm& check_comm(ncclComm_t comm, const char* what) {
    for (const auto& c : nccl().comms) {
        if (c.get() != comm) continue;
        if (c->process != getpid()) die("%s: the communicator of rank %d is that of another process", what, c->room.rank);
        if (c->end) die("%s: the communicator of rank %d was %s", what, c->room.rank, c->end);
        return *c;
    }
    die("%s: %p is not a communicator", what, static_cast<void*>(comm));
}

ncclResult_t state_of(const ncclComm& comm) {
    if (comm.room.lost.empty()) return ncclSuccess;
    nccl().error = comm.room.lost;
    return ncclRemoteError;
}

// What must be the same on all ranks.
std::string describe(const Call& c) {
    std::string s = std::string(c.name()) + " of " + std::to_string(c.count) + " " + kTypes[c.type].name;
    if (c.reduces()) s += c.reduction == ncclSum ? " (sum)" : " (max)";
    if (c.kind == Kind::broadcast) s += " from " + std::to_string(c.root);
    else if (c.is_in_place()) s += " in place";
    return s;
}

// ---- the arithmetic -----------------------------------------------------------------------------------------------------------

template <typename Stored, typename Sum = Stored>
void reduce(void* to, const std::vector<const char*>& from, size_t n, ncclRedOp_t reduction) {
    for (size_t i = 0; i < n; ++i) {
        const auto value = [&](const char* p) { return Sum(reinterpret_cast<const Stored*>(p)[i]); };
        Sum sum = value(from[0]);
        for (size_t r = 1; r < from.size(); ++r) {
            const Sum x = value(from[r]);
            if constexpr (std::is_integral_v<Sum>) {
                if (reduction == ncclMax) sum = std::max(sum, x);
                else __builtin_add_overflow(sum, x, &sum);  // wraps, as on a GPU
            } else {
                sum = reduction == ncclMax ? std::fmax(sum, x) : sum + x;  // a NaN is never the greatest, as in NCCL
            }
        }
        static_cast<Stored*>(to)[i] = Stored(sum);
    }
}

void reduce(void* to, const std::vector<const char*>& from, size_t n, ncclDataType_t type, ncclRedOp_t reduction) {
    switch (type) {
        case ncclInt32: return reduce<int32_t>(to, from, n, reduction);
        case ncclInt64: return reduce<int64_t>(to, from, n, reduction);
        case ncclFloat32: return reduce<float>(to, from, n, reduction);
        case ncclFloat64: return reduce<double>(to, from, n, reduction);
        default: return reduce<__nv_bfloat16, float>(to, from, n, reduction);
    }
}

void copy(void* to, const void* from, size_t n) {
    if (n) memcpy(to, from, n);
}

// Elements [begin, begin + n) of each part, from the ranks' desks, where parts are `stride` elements apart.
void receive(const Call& c, size_t begin, size_t n, size_t stride) {
    const Room& room = c.comm->room;
    char* to = c.recv + begin * c.element();
    const size_t mine = c.kind == Kind::reduce_scatter ? size_t(room.rank) * stride * c.element() : 0;
    std::vector<const char*> desks;
    for (int r = 0; r < room.ranks; ++r) desks.push_back(room.desk(r) + mine);
    if (c.reduces()) return reduce(to, desks, n, c.type, c.reduction);
    if (c.kind == Kind::broadcast) return copy(to, desks[size_t(c.root)], n * c.element());
    for (size_t r = 0; r < desks.size(); ++r) copy(to + r * c.bytes(), desks[r], n * c.element());
}

// In turns of as much as a desk holds, and in one turn when there is nothing to do: the ranks' calls are compared all the same.
void run(const Call& c) {
    Room& room = c.comm->room;
    const std::string what = describe(c);
    const size_t parts = c.kind == Kind::reduce_scatter ? size_t(room.ranks) : 1;
    const size_t stride = kDeskBytes / c.element() / parts;
    size_t begin = 0;
    do {
        const size_t n = std::min(c.count - begin, stride);
        bool met = !c.comm->end && room.lost.empty();
        for (size_t p = 0; met && c.sends() && p < parts; ++p)
            copy(room.desk() + p * stride * c.element(), c.send + p * c.bytes() + begin * c.element(), n * c.element());
        met = met && room.meet(what.c_str(), c.number);
        if (!met) {
            if (c.count) memset(c.recv, 0xff, c.recv_bytes());
            return;
        }
        receive(c, begin, n, stride);
        begin += n;
    } while (begin < c.count);
}

// ---- calls --------------------------------------------------------------------------------------------------------------------

bool overlap(const char* a, size_t n, const char* b, size_t m) { return n && m && a < b + m && b < a + n; }

void check_buffer(const Call& c, const char* name, const char* p, size_t bytes) {
    const std::string what = std::string(c.name()) + ": " + name;
    check_device_range(p, bytes, what.c_str());
    if (bytes && reinterpret_cast<uintptr_t>(p) % c.element()) die("%s is not aligned to its %s", what.c_str(), kTypes[c.type].name);
}

void check_call(const Call& c) {
    if (c.type < 0 || c.type >= ncclNumTypes) die("%s: type %d", c.name(), c.type);
    if (c.reduces()) {
        bool known = false;
        for (ncclDataType_t t : {ncclInt32, ncclInt64, ncclFloat32, ncclFloat64, ncclBfloat16}) known |= t == c.type;
        if (!known || (c.reduction != ncclSum && c.reduction != ncclMax))
            die("%s: reduction %d of %s is not emulated", c.name(), c.reduction, kTypes[c.type].name);
    }
    if (c.root < 0 || c.root >= c.comm->room.ranks) die("%s: root %d of %d ranks", c.name(), c.root, c.comm->room.ranks);
    check_buffer(c, "sendbuff", c.send, c.send_bytes());
    check_buffer(c, "recvbuff", c.recv, c.recv_bytes());
    if (!c.is_in_place() && overlap(c.send, c.send_bytes(), c.recv, c.recv_bytes()))
        die("%s: sendbuff and recvbuff overlap, but not as it works in place", c.name());
}

// Calls of one group run at once, as far as a program may know.
void check_group(const std::vector<Call>& calls) {
    for (size_t i = 0; i < calls.size(); ++i)
        for (size_t j = 0; j < i; ++j) {
            const Call &a = calls[j], &b = calls[i];
            if (a.stream != b.stream) die("ncclGroupEnd: %s and %s of one group are on two streams: not emulated", a.name(), b.name());
            if (overlap(a.recv, a.recv_bytes(), b.recv, b.recv_bytes()) || overlap(a.recv, a.recv_bytes(), b.send, b.send_bytes()) ||
                overlap(a.send, a.send_bytes(), b.recv, b.recv_bytes()))
                die("ncclGroupEnd: %s and %s of one group touch the same bytes, and one writes them", a.name(), b.name());
        }
}

void submit(Call c) {
    c.number = ++c.comm->calls;
    enqueue(c.stream, [] {}, kTurns[int(c.kind)], {{&nccl().turn, 1, true}});
    enqueue(c.stream, [c] {
        DeviceAccess access;
        run(c);
    }, c.name(), {{c.send_bytes() ? c.send : nullptr, c.send_bytes(), false}, {c.recv_bytes() ? c.recv : nullptr, c.recv_bytes(), true}});
}

ncclResult_t call(Kind kind, const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int root, ncclComm_t comm,
                  cudaStream_t stream) {
    ncclComm& live = check_comm(comm, kNames[int(kind)]);
    const Call c{kind, static_cast<const char*>(send), static_cast<char*>(recv), count, type, reduction, root, &live, stream};
    check_call(c);
    if (const ncclResult_t state = state_of(live)) return state;
    if (nccl().group_depth) nccl().group.push_back(c);
    else submit(c);
    return ncclSuccess;
}

void end_comm(ncclComm& comm, const char* how, bool finished) {
    for (const Call& c : nccl().group)
        if (c.comm == &comm) die("the communicator of rank %d is %s in a group that has an %s of it", comm.room.rank, how, c.name());
    comm.end = how;
    comm.room.leave(finished);
}

}  // namespace

// ---- communicators --------------------------------------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    const RoomId room = make_room();
    static_assert(sizeof room <= sizeof *id);
    *id = {};
    memcpy(id, &room, sizeof room);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    if (nccl().group_depth) die("ncclCommInitRank in a group: for several ranks in one process, which are not emulated");
    RoomId room;
    memcpy(&room, &id, sizeof room);
    std::unique_ptr<ncclComm> made(new ncclComm{Room(room, ranks, rank), getpid()});
    *comm = nullptr;
    if (const ncclResult_t state = state_of(*made)) return state;
    nccl().comms.push_back(std::move(made));
    *comm = nccl().comms.back().get();
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return *count = check_comm(comm, "ncclCommCount").room.ranks, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = check_comm(comm, "ncclCommUserRank").room.rank, ncclSuccess; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ncclComm& c = check_comm(comm, "ncclCommDestroy");
    drain_all();
    end_comm(c, "destroyed", c.room.lost.empty());
    return ncclSuccess;
}

// What of it has not run will do nothing.
ncclResult_t ncclCommAbort(ncclComm_t comm) { return end_comm(check_comm(comm, "ncclCommAbort"), "aborted", false), ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    return *error = state_of(check_comm(comm, "ncclCommGetAsyncError")), ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclRemoteError: return "remote process exited or there was a network error";
        default: return "emulated error";
    }
}
const char* ncclGetLastError(ncclComm_t) { return nccl().error.c_str(); }

// ---- collectives ----------------------------------------------------------------------------------------------------------------

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                           cudaStream_t stream) {
    return call(Kind::all_reduce, send, recv, count, type, reduction, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                               cudaStream_t stream) {
    return call(Kind::reduce_scatter, send, recv, count, type, reduction, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return call(Kind::all_gather, send, recv, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return call(Kind::broadcast, send, recv, count, type, ncclSum, root, comm, stream);
}

ncclResult_t ncclGroupStart() { return ++nccl().group_depth, ncclSuccess; }

ncclResult_t ncclGroupEnd() {
    Nccl& n = nccl();
    if (n.group_depth == 0) die("ncclGroupEnd without ncclGroupStart");
    if (--n.group_depth) return ncclSuccess;
    std::vector<Call> calls = std::move(n.group);
    n.group.clear();
    check_group(calls);
    // Within a group communicators may come in any order, on each rank another.
    std::stable_sort(calls.begin(), calls.end(), [](const Call& a, const Call& b) { return a.comm->room.key < b.comm->room.key; });
    for (const Call& c : calls) submit(c);
    return ncclSuccess;
}

#endif
