// Processes of one machine that meet as the ranks of a communicator: what nccl.cpp stands on (ranks.cpp).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace bam::emu {

constexpr int kMaxRanks = 64;
constexpr size_t kDeskBytes = 128 << 10;  // what a rank shows the others in one turn

// Names a room. The process that made it must live until all ranks have come.
struct RoomId {
    char magic[8];
    int32_t process, file;  // who made it, and its descriptor there
    uint64_t key;
};
RoomId make_room();

struct Shared;

// One rank's place in a room. Ranks go through their calls in turns, each on its desk of the coming turn until all have met.
struct Room {
    Room(const RoomId& id, int ranks, int rank);
    Room(const Room&) = delete;
    ~Room() { close(); }  // in a forked child too, so it tells the others nothing

    // Waits until all ranks have come to this turn, and dies when they have not come for the same call. False: a rank is lost.
    bool meet(const char* call, uint64_t number);
    char* desk();                      // this rank's, of the coming turn
    const char* desk(int rank) const;  // any rank's, of the last turn, until this rank comes to the next one
    void leave(bool finished);         // finished: who still waits for this rank is wrong

    int ranks, rank;
    uint64_t key;
    std::string lost;  // which rank is, and how

private:
    void take_seat();
    void close();
    bool wait_for_all(uint64_t turn, const char* call, uint64_t number);
    void look_for_losses(uint64_t turn, int missing, const char* call, uint64_t number);
    int holder(int place) const;  // the process that has this byte of the file locked, or 0
    void compare(uint64_t turn, uint64_t number) const;

    int file = -1;
    Shared* shared = nullptr;
};

}  // namespace bam::emu
