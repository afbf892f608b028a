// One owner and two borrowers as threads, so that ThreadSanitizer sees all of them.
#include <gtest/gtest.h>

#include <thread>

#include "hands.h"
#include "shared_memory.h"
#include "windrow/clock.h"

namespace windrow::testing {
namespace {

TEST(TableThreads, NoChunkIsEverInTwoHands) {
  constexpr std::int64_t kChunks = 24;
  constexpr int kSteps = 100'000;
  SharedMemory memory(ChunkTable::bytes(kChunks));
  SharedMemory marks(kChunks * sizeof(std::uint64_t));
  const Marks mark(marks.data(), sizeof(std::uint64_t));
  ChunkTable::format(memory.data(), kChunks, 2);

  std::atomic<bool> done = false;
  std::atomic<int> failed = 0;
  const auto borrow = [&](std::int64_t epoch) {
    Borrower borrower(ChunkTable(memory.data(), kChunks, Side::kPeer), mark, epoch);
    try {
      while (!done.load()) {
        borrower.step();
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      failed.fetch_add(1);
    }
  };
  std::thread first(borrow, 1);
  std::thread second(borrow, 2);
  Owner owner(ChunkTable(memory.data(), kChunks, Side::kOwner), mark, 17);
  for (int i = 0; i < kSteps && failed.load() == 0; ++i) {
    owner.step(1 + i % 2);
    if (i % 1'000 == 0) {
      owner.check();
    }
  }
  done.store(true);
  first.join();
  second.join();
  for (const std::int64_t borrower : {1, 2}) {
    owner.bury(borrower);
  }
  owner.check_all_come_home();
}

// Owner and borrower reach for the same word all the time. Each transition grows its epoch by one,
// so one that overwrote the other's shows as an epoch that is too low.
TEST(TableThreads, ARevokeThatMeetsAGiveBackOverwritesNothing) {
  constexpr std::int64_t kBorrower = 3;
  constexpr std::uint32_t kMeetings = 300'000;
  SharedMemory memory(ChunkTable::bytes(1));
  ChunkTable::format(memory.data(), 1, 0);
  ChunkTable owner(memory.data(), 1, Side::kOwner);
  std::atomic<bool> done = false;
  std::atomic<std::uint32_t> given_back = 0;
  std::thread borrower([&] {
    ChunkTable table(memory.data(), 1, Side::kPeer);
    while (!done.load()) {
      const ChunkState state = table.chunk(0).word.state;
      if (state == ChunkState::kLent || state == ChunkState::kDraining) {
        table.give_back(0, kBorrower);
        ++given_back;
      }
    }
  });
  std::size_t owners = 0;
  // They meet only while both have a core: on a busy machine few do, and time ends it.
  const std::int64_t deadline = monotonic_ns() + 2'000'000'000;
  while (given_back.load() < kMeetings && monotonic_ns() < deadline) {
    owners += owner.lend(1, kBorrower).size();
    owners += owner.revoke(1).size();
  }
  done.store(true);
  borrower.join();
  EXPECT_EQ(owner.chunk(0).word.epoch, owners + given_back.load());
}

}  // namespace
}  // namespace windrow::testing
