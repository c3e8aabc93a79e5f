// The emulation of NCCL: each collective over 1 to 4 processes against plain loops, bit by bit, under every order of streams.
#if __has_include(<nccl.h>)
#include "cuda_nccl_support.h"

namespace bam {
namespace {

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast };
using Bytes = std::vector<char>;

struct Case {
    Kind kind;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    size_t count;
    bool in_place;
    int root;

    size_t element() const { return type == ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclInt64 || type == ncclFloat64 ? 8 : 4; }
    size_t send_count(int ranks) const { return kind == Kind::reduce_scatter ? count * size_t(ranks) : count; }
    size_t recv_count(int ranks) const { return kind == Kind::all_gather ? count * size_t(ranks) : count; }
    // One allocation holds both buffers: one in the other, or recv right behind send.
    size_t total(int ranks) const { return in_place ? std::max(send_count(ranks), recv_count(ranks)) : send_count(ranks) + recv_count(ranks); }
    size_t send_at(int rank) const { return in_place && kind == Kind::all_gather ? size_t(rank) * count : 0; }
    size_t recv_at(int ranks, int rank) const { return !in_place ? send_count(ranks) : kind == Kind::reduce_scatter ? size_t(rank) * count : 0; }
};
std::ostream& operator<<(std::ostream& o, const Case& c) {
    return o << "kind " << int(c.kind) << " type " << c.type << " reduction " << c.reduction << " count " << c.count
             << (c.in_place ? " in place" : "") << " root " << c.root;
}

// Bits that differ from rank to rank and element to element; as floats, of so many sizes that each order of adding rounds otherwise.
uint64_t bits(int rank, size_t i) {
    uint64_t x = (uint64_t(rank) << 40 | i) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}
template <typename T>
T number(int rank, size_t i) {
    const uint64_t b = bits(rank, i);
    if constexpr (std::is_integral_v<T>) return T(b);
    else return T(float(std::ldexp(double(b % 100003) - 50001, int(b >> 50) % 24 - 30)));
}

template <typename T>
Bytes start(const Case& c, int ranks, int rank) {
    std::vector<T> v(c.total(ranks));
    for (size_t i = 0; i < v.size(); ++i) v[i] = number<T>(rank, i);
    const char* p = reinterpret_cast<const char*>(v.data());
    return Bytes(p, p + v.size() * sizeof(T));
}

// What a rank's allocation must hold afterwards.
template <typename T, typename Sum>
Bytes expected(const Case& c, int ranks, int rank) {
    Bytes bytes = start<T>(c, ranks, rank);
    T* recv = reinterpret_cast<T*>(bytes.data()) + c.recv_at(ranks, rank);
    const size_t n = c.count, me = size_t(rank);
    if (c.kind == Kind::broadcast)
        for (size_t i = 0; i < n; ++i) recv[i] = number<T>(c.root, i);
    else if (c.kind == Kind::all_gather)
        for (int r = 0; r < ranks; ++r)
            for (size_t i = 0; i < n; ++i) recv[size_t(r) * n + i] = number<T>(r, c.send_at(r) + i);
    else
        for (size_t i = 0; i < n; ++i) {
            const size_t at = c.kind == Kind::reduce_scatter ? me * n + i : i;
            Sum sum = Sum(number<T>(0, at));
            for (int r = 1; r < ranks; ++r) {
                const Sum x = Sum(number<T>(r, at));
                sum = c.reduction == ncclSum ? Sum(sum + x) : x > sum ? x : sum;
            }
            recv[i] = T(sum);
        }
    return bytes;
}

Bytes start_of(const Case& c, int ranks, int rank) {
    switch (c.type) {
        case ncclUint8: return start<uint8_t>(c, ranks, rank);
        case ncclInt32: return start<int32_t>(c, ranks, rank);
        case ncclInt64: return start<int64_t>(c, ranks, rank);
        case ncclFloat32: return start<float>(c, ranks, rank);
        case ncclFloat64: return start<double>(c, ranks, rank);
        default: return start<__nv_bfloat16>(c, ranks, rank);
    }
}
Bytes expected_of(const Case& c, int ranks, int rank) {
    const bool sum = c.reduction == ncclSum;  // of integers it wraps
    switch (c.type) {
        case ncclUint8: return expected<uint8_t, uint8_t>(c, ranks, rank);
        case ncclInt32: return sum ? expected<int32_t, uint32_t>(c, ranks, rank) : expected<int32_t, int32_t>(c, ranks, rank);
        case ncclInt64: return sum ? expected<int64_t, uint64_t>(c, ranks, rank) : expected<int64_t, int64_t>(c, ranks, rank);
        case ncclFloat32: return expected<float, float>(c, ranks, rank);
        case ncclFloat64: return expected<double, double>(c, ranks, rank);
        default: return expected<__nv_bfloat16, float>(c, ranks, rank);
    }
}

void issue(const Case& c, const Rank& r, char* p) {
    const char* send = p + c.send_at(r.rank) * c.element();
    char* recv = p + c.recv_at(r.ranks, r.rank) * c.element();
    ncclResult_t result = ncclSuccess;
    switch (c.kind) {
        case Kind::all_reduce: result = ncclAllReduce(send, recv, c.count, c.type, c.reduction, r.comm, r.stream); break;
        case Kind::reduce_scatter: result = ncclReduceScatter(send, recv, c.count, c.type, c.reduction, r.comm, r.stream); break;
        case Kind::all_gather: result = ncclAllGather(send, recv, c.count, c.type, r.comm, r.stream); break;
        case Kind::broadcast: result = ncclBroadcast(send, recv, c.count, c.type, c.root, r.comm, r.stream); break;
    }
    require(result == ncclSuccess, "a collective");
}

constexpr size_t kLarge = 40009;  // fp32: several turns of the ranks' shared buffers

std::vector<Case> all_cases(int ranks) {
    std::vector<Case> cases;
    const ncclDataType_t few[] = {ncclFloat32, ncclBfloat16}, all[] = {ncclFloat32, ncclBfloat16, ncclInt32, ncclInt64, ncclFloat64};
    for (bool in_place : {false, true}) {
        for (Kind kind : {Kind::all_reduce, Kind::reduce_scatter}) {
            for (ncclRedOp_t reduction : {ncclSum, ncclMax}) {
                for (ncclDataType_t type : few)
                    for (size_t count : {0, 1}) cases.push_back({kind, type, reduction, count, in_place, 0});
                for (ncclDataType_t type : all) cases.push_back({kind, type, reduction, 77, in_place, 0});
            }
            cases.push_back({kind, ncclFloat32, ncclSum, kLarge, in_place, 0});
        }
        for (size_t count : {size_t(0), size_t(1), size_t(77), kLarge}) {
            cases.push_back({Kind::all_gather, ncclFloat32, ncclSum, count, in_place, 0});
            cases.push_back({Kind::all_gather, ncclUint8, ncclSum, count, in_place, 0});
            cases.push_back({Kind::broadcast, ncclFloat32, ncclSum, count, in_place, 0});
            cases.push_back({Kind::broadcast, ncclBfloat16, ncclSum, count, in_place, ranks - 1});
        }
    }
    return cases;
}

// All in one allocation, so that a case that writes into another's part is seen.
void run_cases(int ranks) {
    const std::vector<Case> cases = all_cases(ranks);
    std::vector<size_t> at;
    size_t bytes = 0;
    for (const Case& c : cases) {
        at.push_back(bytes);
        bytes += (c.total(ranks) * c.element() + 7) / 8 * 8;
    }
    Common<char> results(bytes * size_t(ranks));
    expect_well(run_comm(ranks, [&](Rank& r) {
        Bytes all(bytes);
        for (size_t i = 0; i < cases.size(); ++i) std::ranges::copy(start_of(cases[i], ranks, r.rank), all.data() + at[i]);
        char* p = r.make(all);
        for (size_t i = 0; i < cases.size(); ++i) issue(cases[i], r, p + at[i]);
        all = r.read(p, bytes);
        std::copy(all.begin(), all.end(), results.p + size_t(r.rank) * bytes);
    }));
    for (int rank = 0; rank < ranks; ++rank)
        for (size_t i = 0; i < cases.size(); ++i) {
            const Bytes want = expected_of(cases[i], ranks, rank);
            const char* got = results.p + size_t(rank) * bytes + at[i];
            EXPECT_TRUE(std::equal(want.begin(), want.end(), got)) << "rank " << rank << " of " << ranks << ": " << cases[i];
        }
}

TEST(CudaNccl, CollectivesAreWhatPlainLoopsGive) {
    in_stream_orders([] { run_cases(3); });
    for (int ranks : {1, 2, 4}) run_cases(ranks);
}

TEST(CudaNccl, SumsInRankOrderAndRoundsBf16Once) {
    expect_well(run_comm(3, [](Rank& r) {
        const float of_rank[3][2] = {{1e8f, 1}, {-1e8f, NAN}, {1, 3}};
        float* x = r.make(std::vector<float>(of_rank[r.rank], of_rank[r.rank] + 2));
        // 256 + 1 is 256 in bf16, if it is rounded there.
        __nv_bfloat16* y = r.make(std::vector<__nv_bfloat16>{__float2bfloat16(r.rank == 0 ? 256 : 1)});
        ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, r.comm, r.stream);
        ncclAllReduce(x + 1, x + 1, 1, ncclFloat32, ncclMax, r.comm, r.stream);
        ncclAllReduce(y, y, 1, ncclBfloat16, ncclSum, r.comm, r.stream);
        require(r.read(x, 2) == std::vector<float>{1, 3}, "1e8 - 1e8 + 1 is 1, and a NaN is not the greatest");
        require(float(r.read(y, 1)[0]) == 258, "256 + 1 + 1 is 258");
    }));
}

TEST(CudaNccl, KnowsItself) {
    expect_well(run_comm(2, [](Rank& r) {
        int version = 0, count = 0, rank = -1;
        ncclResult_t error = ncclInternalError;
        ncclGetVersion(&version);
        ncclCommCount(r.comm, &count);
        ncclCommUserRank(r.comm, &rank);
        ncclCommGetAsyncError(r.comm, &error);
        require(version == NCCL_VERSION_CODE && count == 2 && rank == r.rank && error == ncclSuccess, "version, count, rank, no error");
        require(!*ncclGetLastError(r.comm) && !strcmp(ncclGetErrorString(error), "no error"), "no error");
    }));
}

// Two buckets: copied on one stream, reduced on another while the next is copied, read on the first.
TEST(CudaNccl, RunsInTheOrderThatEventsGive) {
    in_stream_orders([] {
        expect_well(run_comm(3, [](Rank& r) {
            cudaStream_t reducing = Device::new_stream();
            cudaEvent_t copied, reduced;
            cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
            cudaEventCreateWithFlags(&reduced, cudaEventDisableTiming);
            float* buckets[2];
            for (float*& x : buckets) {
                x = r.make(std::vector<float>(40000, float(r.rank + 1)));
                cudaEventRecord(copied, r.stream);
                cudaStreamWaitEvent(reducing, copied, 0);
                require(ncclAllReduce(x, x, 40000, ncclFloat32, ncclSum, r.comm, reducing) == ncclSuccess, "ncclAllReduce");
            }
            cudaEventRecord(reduced, reducing);
            cudaStreamWaitEvent(r.stream, reduced, 0);
            for (float* x : buckets) require(r.read(x, 40000) == std::vector<float>(40000, 6), "1 + 2 + 3");
            cudaStreamDestroy(reducing);
        }));
    });
}

TEST(CudaNccl, DoesNotWaitBeforeItsStreamIsWaitedFor) {
    WithOptions restore;
    emu::options().streams = Streams::lazy;
    Common<std::atomic<int>> issued(1);
    expect_well(run_comm(2, [&](Rank& r) {
        float* x = r.make(std::vector<float>{2});
        if (r.rank == 1)
            while (!*issued.p) usleep(1000);  // rank 0 must get by without this one
        r.all_reduce(x, 1);
        if (r.rank == 0) *issued.p = 1;
        require(r.read(x, 1)[0] == 4, "2 + 2");
    }));
}

// Two communicators, in a group in another order on each rank, then one after the other; the second has the ranks reversed.
TEST(CudaNccl, GroupsAndTwoCommunicators) {
    in_stream_orders([] {
        const ncclUniqueId second_id = new_id();
        expect_well(run_comm(3, [&](Rank& r) {
            ncclComm_t second;
            require(ncclCommInitRank(&second, 3, second_id, 2 - r.rank) == ncclSuccess, "ncclCommInitRank");
            const float me = float(r.rank);
            float *x = r.make(std::vector<float>{me, 5}), *y = r.make(std::vector<float>(3, me)), *z = r.make(std::vector<float>{1});
            ncclGroupStart();
            ncclGroupStart();
            if (r.rank == 1) ncclAllGather(y + 2 - r.rank, y, 1, ncclFloat32, second, r.stream);
            r.all_reduce(x, 1);
            ncclGroupEnd();
            ncclAllReduce(z, z, 1, ncclFloat32, ncclSum, r.comm, r.stream);
            if (r.rank != 1) ncclAllGather(y + 2 - r.rank, y, 1, ncclFloat32, second, r.stream);
            ncclGroupEnd();
            ncclBroadcast(x, x + 1, 1, ncclFloat32, 0, second, r.stream);
            require(r.read(x, 2) == std::vector<float>{3, 3}, "0 + 1 + 2, broadcast");
            require(r.read(y, 3) == std::vector<float>{2, 1, 0}, "gathered in the second's order");
            require(r.read(z, 1)[0] == 3, "1 + 1 + 1");
            ncclCommDestroy(second);
        }));
    });
}

TEST(CudaNccl, ARankMayMakeTheId) {
    Common<ncclUniqueId> id(1);
    Common<std::atomic<int>> made(1);
    expect_well(run_ranks(3, [&](int rank) {
        if (rank == 2) ncclGetUniqueId(id.p), *made.p = 1;
        while (!*made.p) usleep(1000);
        Rank r(*id.p, 3, rank);
        float* x = r.make(std::vector<float>{1});
        r.all_reduce(x, 1);
        require(r.read(x, 1)[0] == 3, "1 + 1 + 1");
        r.finish();
    }));
}

}  // namespace
}  // namespace bam

#else
#include <gtest/gtest.h>
TEST(CudaNccl, HasItsHeader) { GTEST_SKIP() << "nccl.h is missing: NCCL is not emulated"; }
#endif
