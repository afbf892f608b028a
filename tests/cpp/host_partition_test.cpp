// Threads of this process on shares of its cores: which are moved, and what a failed move leaves.
#include "windrow/host_partition.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>
#include <stdexcept>
#include <thread>

#include "windrow/error.h"
#include "windrow/host_driver.h"

namespace windrow {
namespace {

using Side = Partition::Side;
using Cores = std::vector<int>;

// No machine of ours has it: a thread cannot be moved there.
constexpr int kNoCore = CPU_SETSIZE - 1;

// A thread that waits until this object goes. It begins where the thread that makes it is.
class WaitingThread {
 public:
  explicit WaitingThread(const char* name = "compute") {
    thread_ = std::thread([this, name] {
      ::pthread_setname_np(::pthread_self(), name);
      started_.set_value(static_cast<int>(::syscall(SYS_gettid)));
      done_.get_future().wait();
    });
    id_ = started_.get_future().get();
  }
  WaitingThread(const WaitingThread&) = delete;
  WaitingThread& operator=(const WaitingThread&) = delete;
  ~WaitingThread() {
    done_.set_value();
    thread_.join();
  }
  [[nodiscard]] int id() const { return id_; }

 private:
  std::promise<int> started_;
  std::promise<void> done_;
  std::thread thread_;
  int id_ = 0;
};

// Those of a thread; 0 is the calling one.
Cores cores_of(int thread) {
  cpu_set_t mask;
  EXPECT_EQ(::sched_getaffinity(thread, sizeof(mask), &mask), 0);
  Cores cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) {
      cores.push_back(core);
    }
  }
  return cores;
}

class HostPartitionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cores_ = cores_of(0);
    if (cores_.size() < 2) {
      GTEST_SKIP() << "one core cannot be shared";
    }
  }
  void TearDown() override {
    if (cores_.size() >= 2) {
      HostPartition(cores_).leave();
    }
  }
  [[nodiscard]] const Cores& all() const { return cores_; }
  [[nodiscard]] Cores first() const { return {cores_.front()}; }
  [[nodiscard]] Cores last() const { return {cores_.back()}; }

 private:
  Cores cores_;
};

TEST_F(HostPartitionTest, EveryThreadMovesAndLaterOnesStartThere) {
  const WaitingThread before;
  const auto partition = host_driver().partition({});
  EXPECT_EQ(partition->enter(Side::kDecode, 1), 0U);
  const WaitingThread after;
  EXPECT_EQ(cores_of(0), first());
  EXPECT_EQ(cores_of(before.id()), first());
  EXPECT_EQ(cores_of(after.id()), first());
}

TEST_F(HostPartitionTest, TheCoresAreThoseThatWereNamedWhateverTheMaskIs) {
  static_cast<void>(HostPartition(all()).enter(Side::kDecode, 1));
  const auto partition = host_driver().partition(all());
  EXPECT_EQ(partition->total_units(), static_cast<int>(all().size()));
  static_cast<void>(partition->enter(Side::kFinetune, 1));
  EXPECT_EQ(cores_of(0), last());
}

TEST_F(HostPartitionTest, AThreadThatStartsDuringAMoveMovesToo) {
  std::unique_ptr<WaitingThread> started;
  HostPartition partition(all(), [&] {
    auto threads = threads_of_this_process();
    if (!started) {  // by a thread that was not moved yet
      started = std::make_unique<WaitingThread>();
    }
    return threads;
  });
  static_cast<void>(partition.enter(Side::kDecode, 1));
  EXPECT_EQ(cores_of(started->id()), first());
}

TEST_F(HostPartitionTest, AThreadThatHasEndedIsNoError) {
  int ended = 0;
  {
    const WaitingThread thread;
    ended = thread.id();
  }
  HostPartition partition(all(), [&] {
    auto threads = threads_of_this_process();
    threads.insert(threads.begin(), ended);
    return threads;
  });
  partition.keep_in_background(ended);
  static_cast<void>(partition.enter(Side::kDecode, 1));
  EXPECT_EQ(cores_of(0), first());
}

TEST_F(HostPartitionTest, TheBackgroundStaysOnTheLastCoreUntilTheProcessLeaves) {
  const WaitingThread named;
  const WaitingThread grpc("grpc_global_tim");
  HostPartition partition(all());
  partition.keep_in_background(named.id());
  EXPECT_EQ(cores_of(named.id()), last());
  static_cast<void>(partition.enter(Side::kDecode, 1));
  EXPECT_EQ(cores_of(named.id()), last());
  EXPECT_EQ(cores_of(grpc.id()), last());
  partition.leave();
  EXPECT_EQ(cores_of(named.id()), all());
  EXPECT_EQ(cores_of(grpc.id()), all());
}

TEST_F(HostPartitionTest, AnExcludedThreadIsNeverMoved) {
  const WaitingThread excluded("grpc_x");
  HostPartition partition(all());
  partition.exclude(excluded.id());
  static_cast<void>(partition.enter(Side::kFinetune, 1));
  EXPECT_EQ(cores_of(excluded.id()), all());
  partition.leave();
  EXPECT_EQ(cores_of(excluded.id()), all());
}

TEST_F(HostPartitionTest, AMoveThatFailsLeavesEveryThreadWhereItWas) {
  const WaitingThread compute;
  const WaitingThread background("grpc_x");
  // Compute could go to the first core; the background cannot go to the last.
  HostPartition partition(Cores{all().front(), kNoCore});
  try {
    static_cast<void>(partition.enter(Side::kDecode, 1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("moving thread " + std::to_string(background.id())),
              std::string::npos);
  }
  for (const int thread : {0, compute.id(), background.id()}) {
    EXPECT_EQ(cores_of(thread), all());
  }
  EXPECT_THROW(partition.keep_in_background(compute.id()), Error);
  EXPECT_EQ(cores_of(compute.id()), all());
}

TEST_F(HostPartitionTest, AThreadThatStartsDuringAMoveThatFailsIsNotLeftThere) {
  std::unique_ptr<WaitingThread> background;
  std::unique_ptr<WaitingThread> child;
  int listings = 0;
  HostPartition partition(Cores{all().front(), kNoCore}, [&] {
    auto threads = threads_of_this_process();
    if (++listings == 1) {
      background = std::make_unique<WaitingThread>("grpc_x");
    } else if (listings == 2) {  // this thread was moved: so begins the other
      child = std::make_unique<WaitingThread>();
      EXPECT_EQ(cores_of(child->id()), first());
    }
    return threads;
  });
  EXPECT_THROW(static_cast<void>(partition.enter(Side::kDecode, 1)), Error);
  EXPECT_EQ(cores_of(0), all());
  EXPECT_EQ(cores_of(child->id()), all());
}

TEST_F(HostPartitionTest, ThreadsThatCannotBeListedAreAnErrorThatMovesNothing) {
  int listings = 0;
  HostPartition partition(all(), [&] {
    if (++listings == 2) {
      throw Error("no more descriptors");
    }
    return threads_of_this_process();
  });
  EXPECT_THROW(static_cast<void>(partition.enter(Side::kDecode, 1)), Error);
  EXPECT_EQ(cores_of(0), all());
}

TEST_F(HostPartitionTest, ACoreThatCannotBeUsedIsNotMeasured) {
  HostPartition partition(Cores{all().front(), kNoCore});
  EXPECT_EQ(partition.units(Side::kDecode, 2), 2);
  EXPECT_EQ(partition.measure(Side::kDecode, 2),
            std::vector<unsigned>{static_cast<unsigned>(all().front())});
  EXPECT_EQ(cores_of(0), all());
}

TEST(HostPartitionCores, OneCoreIsNotShared) {
  EXPECT_THROW(HostPartition(Cores{0, 0}), DriverUnavailable);
}

TEST(HostPartitionCores, NumbersThatNoMaskHoldsAreRefused) {
  EXPECT_THROW(HostPartition(Cores{0, CPU_SETSIZE}), std::invalid_argument);
  EXPECT_THROW(HostPartition(Cores{-1, 0}), std::invalid_argument);
}

}  // namespace
}  // namespace windrow
