// The room where the ranks of a communicator meet: shared memory without a name (memfd), which the others open through /proc of the process
// that made it. So nothing is left behind, however the ranks end.
//
// Each rank has a seat with a count of the turns it has come to, and two desks, used in turn: who comes to turn n + 1 has read all that was
// shown in turn n, so what is shown in turn n + 2 may replace it. That takes one wait a turn, on a futex that the last to come rings.
//
// A rank holds a lock on one byte of the file. The kernel lets go of it when the process ends, a zombie too: those who wait look every 50 ms.
#include "cuda/emulate/ranks.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "cuda/emulate/parts.h"

namespace bam::emu {
namespace {

constexpr char kMagic[8] = "bam-emu";
constexpr int kMakersPlace = kMaxRanks;  // the byte that the maker of the room holds locked

enum class Seated : uint32_t { not_yet, yes, finished, aborted };

struct Seat {
    std::atomic<Seated> seated;
    int32_t process;
    std::atomic<uint64_t> turns;  // that its rank has come to
    char calls[2][128];           // what for
    alignas(64) char desks[2][kDeskBytes];
};

}  // namespace

struct Shared {
    uint64_t key;
    int32_t maker;                   // the process
    std::atomic<uint64_t> agreed;    // number of ranks << 32 | the rank that said so first
    std::atomic<uint64_t> comings;   // of all ranks to all turns
    std::atomic<uint32_t> bell;      // counts turns that all have come to, and other news
    std::atomic<uint32_t> refusals;  // to go on; the first leaves its reason
    std::atomic<bool> has_reason;
    char reason[256];
    Seat seats[kMaxRanks];
};

namespace {

void ring(Shared& s) {
    s.bell.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &s.bell, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0);
}

void wait_for_bell(Shared& s, uint32_t heard) {
    const timespec look_around{0, 50'000'000};
    syscall(SYS_futex, &s.bell, FUTEX_WAIT, heard, &look_around, nullptr, 0);
}

// Dies, and so do all others at their next turn.
template <typename... P>
[[noreturn]] void refuse(Shared& s, const char* format, P... values) {
    char reason[sizeof s.reason];
    snprintf(reason, sizeof reason, format, values...);
    if (s.refusals.fetch_add(1) == 0) {
        memcpy(s.reason, reason, sizeof reason);
        s.has_reason.store(true, std::memory_order_release);
        ring(s);
    }
    die("NCCL: %s", reason);
}

// Seconds that ranks wait for each other.
double time_limit() {
    const char* v = getenv("EMU_NCCL_TIMEOUT");
    if (!v) return 60;
    char* end;
    const double seconds = strtod(v, &end);
    if (end == v || *end || !(seconds > 0)) die("EMU_NCCL_TIMEOUT=%s, expected seconds", v);
    return seconds;
}

struct flock lock_of(int place) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = place;
    lock.l_len = 1;
    return lock;
}

bool try_lock(int file, int place) {
    struct flock lock = lock_of(place);
    return fcntl(file, F_SETLK, &lock) == 0;
}

std::string maker_ended(int process) { return "process " + std::to_string(process) + ", which made the id, has ended"; }

std::string place_of(uint64_t call) { return call ? " (call " + std::to_string(call) + " of the communicator)" : ""; }

Shared* map(int file) {
    void* p = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED) die("NCCL: no shared memory: %s", strerror(errno));
    return static_cast<Shared*>(p);
}

}  // namespace

RoomId make_room() {
    RoomId id{};
    memcpy(id.magic, kMagic, sizeof id.magic);
    id.process = getpid();
    id.file = memfd_create("bam-nccl", MFD_CLOEXEC);
    if (id.file < 0 || ftruncate(id.file, sizeof(Shared)) || !try_lock(id.file, kMakersPlace))
        die("NCCL: no shared memory: %s", strerror(errno));
    std::random_device random;
    id.key = uint64_t(random()) << 32 | random();
    Shared* shared = map(id.file);
    shared->key = id.key;
    shared->maker = id.process;
    munmap(shared, sizeof(Shared));
    return id;
}

Room::Room(const RoomId& id, int n, int r) : ranks(n), rank(r), key(id.key) {
    if (memcmp(id.magic, kMagic, sizeof id.magic)) die("NCCL: rank %d has an id that ncclGetUniqueId did not make", rank);
    // The maker must not open the file again: closing either descriptor would give up the locks of both.
    const std::string maker = "/proc/" + std::to_string(id.process), path = maker + "/fd/" + std::to_string(id.file);
    file = id.process == getpid() ? id.file : open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status;
    if (file < 0 && access((maker + "/exe").c_str(), F_OK)) {  // a zombie has no program
        lost = maker_ended(id.process);
        return;
    }
    if (file < 0 || fstat(file, &status) || size_t(status.st_size) != sizeof(Shared) || (shared = map(file))->key != id.key)
        die("NCCL: rank %d has the id of a communicator that is over", rank);
    take_seat();
}

void Room::take_seat() {
    time_limit();  // a wrong one is reported before it is needed
    if (ranks < 1 || ranks > kMaxRanks) refuse(*shared, "ncclCommInitRank of %d ranks, expected 1 to %d", ranks, kMaxRanks);
    if (rank < 0 || rank >= ranks) refuse(*shared, "rank %d of %d ranks, expected 0 to %d", rank, ranks, ranks - 1);
    uint64_t agreed = 0;
    if (!shared->agreed.compare_exchange_strong(agreed, uint64_t(ranks) << 32 | uint64_t(rank)) && agreed >> 32 != uint64_t(ranks))
        refuse(*shared, "rank %d is of %d ranks, rank %u of %u", rank, ranks, unsigned(agreed), unsigned(agreed >> 32));
    for (int r = 0; r < ranks; ++r)
        if (shared->seats[r].seated != Seated::not_yet && shared->seats[r].process == getpid())
            die("NCCL: process %d is rank %d of this communicator and would be rank %d as well: the emulation wants a process for each rank",
                getpid(), r, rank);
    Seat& seat = shared->seats[rank];
    if (!try_lock(file, rank)) refuse(*shared, "process %d would be rank %d, but process %d is", getpid(), rank, holder(rank));
    if (seat.seated != Seated::not_yet) refuse(*shared, "process %d would be rank %d, but process %d was", getpid(), rank, seat.process);
    seat.process = getpid();
    seat.seated = Seated::yes;
    meet(("ncclCommInitRank of " + std::to_string(ranks) + " ranks").c_str(), 0);
}

char* Room::desk() {
    Seat& seat = shared->seats[rank];
    return seat.desks[(seat.turns + 1) % 2];
}

const char* Room::desk(int other) const { return shared->seats[other].desks[shared->seats[rank].turns % 2]; }

bool Room::meet(const char* call, uint64_t number) {
    if (!lost.empty()) return false;
    Seat& seat = shared->seats[rank];
    const uint64_t turn = seat.turns + 1;
    snprintf(seat.calls[turn % 2], sizeof seat.calls[0], "%s", call);
    seat.turns.store(turn, std::memory_order_release);
    // Nobody comes to a turn before all have come to the one before, so these are the last of each turn.
    if ((shared->comings.fetch_add(1) + 1) % uint64_t(ranks) == 0) ring(*shared);
    if (!wait_for_all(turn, call, number)) return false;
    compare(turn, number);
    return true;
}

bool Room::wait_for_all(uint64_t turn, const char* call, uint64_t number) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (;;) {
        const uint32_t heard = shared->bell.load(std::memory_order_acquire);
        int missing = -1;
        for (int r = ranks - 1; r >= 0; --r)
            if (shared->seats[r].turns.load(std::memory_order_acquire) < turn) missing = r;
        if (shared->has_reason.load(std::memory_order_acquire)) die("NCCL: %s", shared->reason);
        if (missing < 0) return true;
        if (!lost.empty()) return false;
        wait_for_bell(*shared, heard);
        if (shared->bell.load(std::memory_order_acquire) != heard) continue;
        look_for_losses(turn, missing, call, number);
        if (lost.empty() && std::chrono::duration<double>(Clock::now() - begin).count() > time_limit())
            refuse(*shared, "rank %d has not come to %s after %g s%s", missing, call, time_limit(), place_of(number).c_str());
    }
}

int Room::holder(int place) const {
    struct flock lock = lock_of(place);
    if (fcntl(file, F_GETLK, &lock)) die("NCCL: no locks in shared memory: %s", strerror(errno));
    return lock.l_type == F_UNLCK ? 0 : lock.l_pid;
}

// A rank that will never come is lost when its process has ended or it has aborted; to have finished before is misuse.
void Room::look_for_losses(uint64_t turn, int missing, const char* call, uint64_t number) {
    const bool can_come = shared->maker == getpid() || holder(kMakersPlace);  // a process's own locks are not shown to it
    if (shared->seats[missing].seated == Seated::not_yet && !can_come) lost = maker_ended(shared->maker);
    for (int r = 0; r < ranks && lost.empty(); ++r) {
        const Seat& seat = shared->seats[r];
        const bool has_ended = r != rank && !holder(r);  // before the rest: a rank that leaves says how before it unlocks
        const Seated seated = seat.seated;
        // Who came and then ended did its part, but to join.
        if (seat.turns.load(std::memory_order_acquire) >= turn && (number || seated != Seated::yes)) continue;
        const std::string name = "rank " + std::to_string(r) + " (process " + std::to_string(seat.process) + ")";
        if (seated == Seated::finished)
            die("NCCL: rank %d has destroyed its communicator, rank %d called %s%s", r, rank, call, place_of(number).c_str());
        if (seated == Seated::aborted) lost = name + " has aborted its communicator";
        if (seated == Seated::yes && has_ended) lost = name + " has ended";
    }
}

// The call that most ranks came for is the right one; of as many, that of the lowest rank.
void Room::compare(uint64_t turn, uint64_t number) const {
    const auto call = [&](int r) { return shared->seats[r].calls[turn % 2]; };
    const auto first_other = [&](int than) {
        int r = 0;
        while (r < ranks && !strcmp(call(r), call(than))) ++r;
        return r;
    };
    if (first_other(0) == ranks) return;
    int right = 0, most = 0;
    for (int r = 0; r < ranks; ++r) {
        int votes = 0;
        for (int q = 0; q < ranks; ++q) votes += !strcmp(call(q), call(r));
        if (votes > most) most = votes, right = r;
    }
    const int odd = first_other(right);
    die("NCCL: rank %d called %s, rank %d %s%s", odd, call(odd), right, call(right), place_of(number).c_str());
}

void Room::leave(bool finished) {
    shared->seats[rank].seated = finished ? Seated::finished : Seated::aborted;
    ring(*shared);
    close();
}

void Room::close() {
    if (shared) munmap(shared, sizeof(Shared));
    if (file >= 0) ::close(file);
    shared = nullptr;
    file = -1;
}

}  // namespace bam::emu
