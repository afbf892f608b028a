// One owner and two borrowers as processes; borrowers are killed anywhere and replaced.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "borrower.h"
#include "shared_memory.h"

namespace windrow::testing {
namespace {

constexpr std::int64_t kChunks = 32;
constexpr int kSteps = 200'000;
constexpr int kKillEvery = 2'000;

class TableProcesses : public ::testing::Test {
 protected:
  TableProcesses() { ChunkTable::format(memory_.data(), kChunks, 3); }

  [[nodiscard]] Marks marks() const { return marks_.as<std::atomic<std::uint64_t>>(); }
  [[nodiscard]] ChunkTable table(Side side) const { return {memory_.data(), kChunks, side}; }

  pid_t start_borrower(std::int64_t epoch) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        for (Borrower borrower(table(Side::kPeer), marks(), epoch);;) {
          borrower.step();
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "borrower %d: %s\n", static_cast<int>(epoch), error.what());
        ::_exit(1);
      }
    }
    return pid;
  }

  // True when it died by our hand and not by its own error.
  static bool kill_and_reap(pid_t pid) {
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  }

  SharedMemory memory_{ChunkTable::bytes(kChunks)};
  SharedMemory marks_{kChunks * sizeof(std::uint64_t)};
};

TEST_F(TableProcesses, NoChunkIsLostOrInTwoHandsWhenBorrowersAreKilledAnywhere) {
  Owner owner(table(Side::kOwner), marks());
  struct Child {
    pid_t pid;
    std::int64_t epoch;
  };
  std::int64_t epoch = 0;
  std::array<Child, 2> children{};
  for (Child& child : children) {
    child = {start_borrower(++epoch), epoch};
  }
  for (int i = 1; i <= kSteps; ++i) {
    owner.step(children[static_cast<std::size_t>(i % 2)].epoch);
    if (i % kKillEvery == 0) {
      Child& victim = children[owner.random() % 2];
      ASSERT_TRUE(kill_and_reap(victim.pid)) << "borrower " << victim.epoch << " failed";
      owner.bury(victim.epoch);
      victim = {start_borrower(++epoch), epoch};
    }
  }
  for (const Child& child : children) {
    EXPECT_TRUE(kill_and_reap(child.pid)) << "borrower " << child.epoch << " failed";
    owner.bury(child.epoch);
  }
  owner.table().check();
  const Counts counts = owner.table().counts();
  const auto kv = static_cast<std::int64_t>(owner.kv().size());
  EXPECT_EQ(counts[static_cast<std::size_t>(ChunkState::kKv)], kv);
  EXPECT_EQ(counts[static_cast<std::size_t>(ChunkState::kFree)] +
                counts[static_cast<std::size_t>(ChunkState::kReserved)],
            kChunks - kv);
}

}  // namespace
}  // namespace windrow::testing
