// Ranks that disagree or misuse the emulated NCCL, which must all be told; and ranks that are lost, which the others must survive.
#if __has_include(<nccl.h>)
#include "cuda_nccl_support.h"

namespace bam {
namespace {

class CudaNcclRejects : public testing::Test {
protected:
    // Two right calls, then one that rank `odd` makes otherwise.
    static void disagree(const std::string& with, const std::function<void(Rank&, float*, bool odd)>& last) {
        expect_all_die(run_comm(3, [&](Rank& r) {
            float* x = r.make(numbers(64));
            for (int i = 0; i < 2; ++i) r.all_reduce(x, 10);
            last(r, x, r.rank == 1);
            cudaStreamSynchronize(r.stream);
        }), "NCCL: rank 1 called " + with + " (call 3 of the communicator)");
    }
    static void misuse(const std::string& with, const std::function<void(Rank&, float*)>& f) {
        const std::vector<Ended> ended = run_comm(1, [&](Rank& r) {
            float* x = r.make(numbers(64));
            f(r, x);
            cudaStreamSynchronize(r.stream);
        });
        EXPECT_TRUE(ended[0].aborted()) << with;
        EXPECT_TRUE(says(ended[0], with)) << "expected " << with << "\nit said " << ended[0].said;
    }
};

TEST_F(CudaNcclRejects, RanksThatDisagree) {
    disagree("ncclBroadcast of 12 float32 from 0, rank 0 ncclAllReduce of 10 float32 (sum) in place", [](Rank& r, float* x, bool odd) {
        if (odd) ncclBroadcast(x, x, 12, ncclFloat32, 0, r.comm, r.stream);
        else r.all_reduce(x, 10);
    });
    disagree("ncclAllReduce of 11 float32 (sum) in place, rank 0 ncclAllReduce of 10 float32 (sum) in place",
             [](Rank& r, float* x, bool odd) { r.all_reduce(x, odd ? 11 : 10); });
    disagree("ncclAllReduce of 0 float32 (sum), rank 0 ncclAllReduce of 1 float32 (sum) in place",
             [](Rank& r, float* x, bool odd) { r.all_reduce(x, odd ? 0 : 1); });
    disagree("ncclReduceScatter of 2 int32 (sum), rank 0 ncclReduceScatter of 2 float32 (sum)", [](Rank& r, float* x, bool odd) {
        ncclReduceScatter(x, x + 32, 2, odd ? ncclInt32 : ncclFloat32, ncclSum, r.comm, r.stream);
    });
    disagree("ncclAllReduce of 1 float32 (max), rank 0 ncclAllReduce of 1 float32 (sum)", [](Rank& r, float* x, bool odd) {
        ncclAllReduce(x, x + 1, 1, ncclFloat32, odd ? ncclMax : ncclSum, r.comm, r.stream);
    });
    disagree("ncclBroadcast of 1 float32 from 1, rank 0 ncclBroadcast of 1 float32 from 2", [](Rank& r, float* x, bool odd) {
        ncclBroadcast(x, x, 1, ncclFloat32, odd ? 1 : 2, r.comm, r.stream);
    });
    disagree("ncclAllGather of 2 float32 in place, rank 0 ncclAllGather of 2 float32", [](Rank& r, float* x, bool odd) {
        ncclAllGather(x + (odd ? 2 : 32), x, 2, ncclFloat32, r.comm, r.stream);
    });
}
// The one that most others contradict is odd, be it rank 0.
TEST_F(CudaNcclRejects, TheOddRankIsRank0) {
    expect_all_die(run_comm(3, [&](Rank& r) { r.all_reduce(r.make<float>(8), r.rank == 0 ? 7 : 8), cudaStreamSynchronize(r.stream); }),
                   "NCCL: rank 0 called ncclAllReduce of 7 float32 (sum) in place, rank 1 ncclAllReduce of 8 float32 (sum) in place "
                   "(call 1 of the communicator)");
}
TEST_F(CudaNcclRejects, ARankThatDoesNotCome) {
    expect_all_die(run_comm(3, [](Rank& r) {
        setenv("EMU_NCCL_TIMEOUT", "0.2", 1);
        if (r.rank == 0) usleep(1'500'000);  // when it comes at last, it is told as well
        r.all_reduce(r.make<float>(4), 4);
        cudaStreamSynchronize(r.stream);
    }), "NCCL: rank 0 has not come to ncclAllReduce of 4 float32 (sum) in place after 0.2 s (call 1 of the communicator)");
    const ncclUniqueId id = new_id();
    const auto alone = [&](const char* limit) {
        return run_ranks(1, [&](int) {
            setenv("EMU_NCCL_TIMEOUT", limit, 1);
            Rank(id, 2, 0);
        });
    };
    expect_all_die(alone("soon"), "EMU_NCCL_TIMEOUT=soon, expected seconds");
    expect_all_die(alone("0.2"), "NCCL: rank 1 has not come to ncclCommInitRank of 2 ranks after 0.2 s");
}
TEST_F(CudaNcclRejects, ARankThatHasFinishedBefore) {
    const std::vector<Ended> ended = run_comm(2, [](Rank& r) {
        if (r.rank == 0) r.all_reduce(r.make<float>(4), 4);
        cudaStreamSynchronize(r.stream);
    });
    EXPECT_TRUE(ended[1].well());
    expect_all_die({ended[0]}, "NCCL: rank 1 has destroyed its communicator, rank 0 called ncclAllReduce of 4 float32 (sum) in place "
                               "(call 1 of the communicator)");
}

// All who wait are told.
TEST_F(CudaNcclRejects, RanksThatDoNotFitTogether) {
    const ncclUniqueId twice = new_id(), sizes = new_id(), outside = new_id(), none = {}, over = new_id();
    const std::vector<Ended> ended = run_ranks(3, [&](int i) { Rank(twice, 3, i == 2 ? 1 : i); });
    for (const Ended& e : ended) EXPECT_TRUE(says(e, "NCCL: process [0-9]+ would be rank 1, but process [0-9]+ is\n")) << e.said;
    for (const Ended& e : run_ranks(2, [&](int rank) { Rank(sizes, rank == 0 ? 3 : 4, rank); }))
        EXPECT_TRUE(says(e, "NCCL: rank (0 is of 3 ranks, rank 1 of 4|1 is of 4 ranks, rank 0 of 3)\n")) << e.said;
    expect_all_die(run_ranks(2, [&](int rank) { Rank(outside, 2, rank == 0 ? 0 : 2); }), "NCCL: rank 2 of 2 ranks, expected 0 to 1");
    expect_all_die(run_ranks(1, [&](int) { Rank(outside, 65, 0); }), "NCCL: ncclCommInitRank of 65 ranks, expected 1 to 64");
    expect_all_die(run_ranks(1, [&](int) { Rank(none, 1, 0); }), "NCCL: rank 0 has an id that ncclGetUniqueId did not make");
    expect_all_die(run_ranks(1, [&](int) {
        ncclUniqueId id;
        ncclGetUniqueId(&id);
        Rank(id, 1, 0).finish();
        Rank(id, 1, 0);
    }), "NCCL: rank 0 has the id of a communicator that is over");
    expect_well(run_ranks(1, [&](int) { Rank(over, 1, 0).finish(); }));
    EXPECT_NE(run_ranks(1, [&](int) { Rank(over, 1, 0); })[0].said.find("would be rank 0, but process"), std::string::npos);
}
TEST_F(CudaNcclRejects, TwoRanksInOneProcess) {
    const ncclUniqueId id = new_id();
    std::vector<Ended> ended = run_ranks(2, [&](int rank) {
        Rank r(id, 2, rank);
        if (rank == 0) Rank(id, 2, 1);
        r.finish();
    });
    EXPECT_TRUE(ended[1].well());
    EXPECT_TRUE(says(ended[0], "is rank 0 of this communicator and would be rank 1 as well: the emulation wants a process for each rank"));
    misuse("ncclCommInitRank in a group: for several ranks in one process, which are not emulated", [&](Rank&, float*) {
        ncclComm_t comm;
        ncclGroupStart();
        ncclCommInitRank(&comm, 1, new_id(), 0);
    });
}

TEST_F(CudaNcclRejects, Buffers) {
    std::vector<float> host(4);
    const auto reduce = [](Rank& r, const void* send, void* recv, size_t n, ncclDataType_t type = ncclFloat32, ncclRedOp_t reduction = ncclSum) {
        ncclAllReduce(send, recv, n, type, reduction, r.comm, r.stream);
    };
    misuse("ncclAllReduce: sendbuff: 0x[0-9a-f]+ is not device memory", [&](Rank& r, float* x) { reduce(r, host.data(), x, 4); });
    misuse("ncclAllReduce: recvbuff: 0x[0-9a-f]+ is not device memory", [&](Rank& r, float* x) { reduce(r, x, host.data(), 4); });
    misuse("ncclAllReduce: recvbuff: 132 bytes at .*leave the allocation", [&](Rank& r, float* x) { reduce(r, x, x + 32, 33); });
    misuse("ncclAllReduce: sendbuff is not aligned to its float32", [&](Rank& r, float* x) { reduce(r, reinterpret_cast<char*>(x) + 2, x + 8, 4); });
    misuse("ncclAllReduce: sendbuff and recvbuff overlap, but not as it works in place", [&](Rank& r, float* x) { reduce(r, x, x + 3, 4); });
    misuse("ncclAllReduce: reduction 1 of float32 is not emulated", [&](Rank& r, float* x) { reduce(r, x, x, 4, ncclFloat32, ncclProd); });
    misuse("ncclAllReduce: reduction 0 of float16 is not emulated", [&](Rank& r, float* x) { reduce(r, x, x, 4, ncclFloat16); });
    misuse("ncclAllGather: type 12", [](Rank& r, float* x) { ncclAllGather(x, x, 4, ncclNumTypes, r.comm, r.stream); });
    misuse("ncclBroadcast: root 1 of 1 ranks", [](Rank& r, float* x) { ncclBroadcast(x, x, 4, ncclFloat32, 1, r.comm, r.stream); });
    misuse("the default stream is used", [](Rank& r, float* x) { ncclBroadcast(x, x, 4, ncclFloat32, 0, r.comm, nullptr); });
    // At another rank's part.
    expect_all_die(run_comm(2, [](Rank& r) {
        float* x = r.make<float>(64);
        ncclReduceScatter(x, x + (1 - r.rank) * 4, 4, ncclFloat32, ncclSum, r.comm, r.stream);
    }), "ncclReduceScatter: sendbuff and recvbuff overlap, but not as it works in place");
    expect_all_die(run_comm(2, [](Rank& r) {
        float* x = r.make<float>(64);
        ncclAllGather(x + (1 - r.rank) * 4, x, 4, ncclFloat32, r.comm, r.stream);
    }), "ncclAllGather: sendbuff and recvbuff overlap, but not as it works in place");
}

TEST_F(CudaNcclRejects, UseAfterTheEnd) {
    misuse("ncclAllReduce: the communicator of rank 0 was destroyed", [](Rank& r, float* x) { ncclCommDestroy(r.comm), r.all_reduce(x, 4); });
    misuse("ncclCommDestroy: the communicator of rank 0 was aborted", [](Rank& r, float*) { ncclCommAbort(r.comm), ncclCommDestroy(r.comm); });
    misuse("ncclCommCount: 0x1234 is not a communicator", [](Rank&, float*) {
        int n;
        ncclCommCount(reinterpret_cast<ncclComm_t>(0x1234), &n);
    });
    misuse("the communicator of rank 0 is destroyed in a group that has an ncclAllReduce of it", [](Rank& r, float* x) {
        ncclGroupStart();
        r.all_reduce(x, 4);
        ncclCommDestroy(r.comm);
    });
    misuse("ncclAllReduce: the communicator of rank 0 is that of another process", [](Rank& r, float* x) {
        if (const int child = fork()) waitpid(child, nullptr, 0), abort();
        r.all_reduce(x, 4);
    });
}

TEST_F(CudaNcclRejects, Orders) {
    misuse("ncclGroupEnd without ncclGroupStart", [](Rank&, float*) { ncclGroupEnd(); });
    misuse("ncclGroupEnd: ncclAllReduce and ncclBroadcast of one group touch the same bytes, and one writes them", [](Rank& r, float* x) {
        ncclGroupStart();
        r.all_reduce(x, 4);
        ncclBroadcast(x + 3, x + 8, 4, ncclFloat32, 0, r.comm, r.stream);
        ncclGroupEnd();
    });
    misuse("ncclGroupEnd: ncclAllReduce and ncclBroadcast of one group are on two streams: not emulated", [](Rank& r, float* x) {
        ncclGroupStart();
        r.all_reduce(x, 4);
        ncclBroadcast(x + 4, x + 8, 4, ncclFloat32, 0, r.comm, Device::new_stream());
        ncclGroupEnd();
    });
    misuse("ncclAllReduce reads bytes that cudaMemcpyAsync to the device writes on another stream, and no event orders them", [](Rank& r, float* x) {
        ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, r.comm, Device::new_stream());
    });
    misuse("the turn of ncclBroadcast writes bytes that the turn of ncclAllReduce writes on another stream", [](Rank& r, float* x) {
        cudaStreamSynchronize(r.stream);
        r.all_reduce(x, 4);
        ncclBroadcast(x + 32, x + 32, 4, ncclFloat32, 0, r.comm, Device::new_stream());
    });
}

// ---- lost ranks -----------------------------------------------------------------------------------------------------------------

// In a rank: reductions of x finish with NaN, and all says that rank 1 is lost. run_ranks() ends who waits for the 60 s of the limit.
void expect_loss(Rank& r, float* x, size_t n, const char* how) {
    ncclResult_t error = ncclSuccess;
    for (float v : r.read(x, n)) require(std::isnan(v), "the result is NaN");
    require(ncclCommGetAsyncError(r.comm, &error) == ncclSuccess && error == ncclRemoteError, "the communicator has ncclRemoteError");
    require(!strcmp(ncclGetErrorString(error), "remote process exited or there was a network error"), "its name");
    const std::string why = ncclGetLastError(r.comm);
    require(why.starts_with("rank 1 (process ") && why.ends_with(how), why.c_str());
    require(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, r.comm, r.stream) == ncclRemoteError, "the next call returns it");
}

TEST(CudaNcclLoss, AKilledRankIsARemoteError) {
    in_stream_orders([] {
        const std::vector<Ended> ended = run_comm(3, [](Rank& r) {
            float* x = r.make(numbers(40000));
            r.all_reduce(x, 40000);
            cudaStreamSynchronize(r.stream);
            if (r.rank == 1) raise(SIGKILL);
            if (r.rank == 2) usleep(100'000);
            r.all_reduce(x, 40000);
            expect_loss(r, x, 40000, ") has ended");
        });
        expect_well({ended[0], ended[2]});
        EXPECT_EQ(ended[1].status, SIGKILL);
    });
}
TEST(CudaNcclLoss, AnAbortedCommunicatorIsARemoteError) {
    WithOptions restore;
    emu::options().streams = Streams::lazy;
    expect_well(run_comm(3, [](Rank& r) {
        float* x = r.make(numbers(10));
        r.all_reduce(x, 10);
        r.all_reduce(x, 10);
        if (r.rank == 1) {
            ncclCommAbort(r.comm);
            for (float v : r.read(x, 10)) require(std::isnan(v), "what an abort left undone is NaN");
            usleep(300'000);  // alive, and waited for by nobody
            _exit(0);
        }
        expect_loss(r, x, 10, ") has aborted its communicator");
    }));
}
// A rank that ends while others still join, and the maker of the id before all have.
TEST(CudaNcclLoss, WhileJoining) {
    const auto join = [](const ncclUniqueId& id, int rank, const char* why) {
        ncclComm_t comm;
        require(ncclCommInitRank(&comm, 3, id, rank) == ncclRemoteError && !comm, "ncclCommInitRank returns ncclRemoteError");
        require(std::string(ncclGetLastError(comm)).ends_with(why), ncclGetLastError(comm));
    };
    const ncclUniqueId id = new_id();
    const std::vector<Ended> ended = run_ranks(2, [&](int rank) {
        if (rank == 1) ualarm(500'000, 0);  // kills it where it waits for rank 2
        join(id, rank, ") has ended");
    });
    EXPECT_TRUE(ended[0].well()) << ended[0].said;
    EXPECT_EQ(ended[1].status, SIGALRM);

    Common<ncclUniqueId> made(1);
    Common<std::atomic<int>> state(1);
    expect_well(run_ranks(3, [&](int rank) {
        if (rank == 2) {
            ncclGetUniqueId(made.p);
            *state.p = 1;
            usleep(100'000);
            _exit(0);
        }
        while (!*state.p) usleep(1000);
        if (rank == 1) usleep(400'000);  // comes when the maker is a zombie
        join(*made.p, rank, ", which made the id, has ended");
    }));
    EXPECT_TRUE(run_ranks(1, [&](int rank) { join(*made.p, rank, ", which made the id, has ended"); })[0].well());
}

}  // namespace
}  // namespace bam

#endif  // else cuda_nccl_test.cpp says that it is missing
