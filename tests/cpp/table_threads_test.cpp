// One owner and two borrowers as threads, so that ThreadSanitizer sees all of them.
#include <gtest/gtest.h>

#include <thread>

#include "borrower.h"
#include "shared_memory.h"

namespace windrow::testing {
namespace {

TEST(TableThreads, NoChunkIsEverInTwoHands) {
  constexpr std::int64_t kChunks = 24;
  constexpr int kSteps = 100'000;
  SharedMemory memory(ChunkTable::bytes(kChunks));
  SharedMemory marks(kChunks * sizeof(std::uint64_t));
  auto* mark = marks.as<std::atomic<std::uint64_t>>();
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
  Owner owner(ChunkTable(memory.data(), kChunks, Side::kOwner), mark);
  for (int i = 0; i < kSteps && failed.load() == 0; ++i) {
    owner.step(1 + i % 2);
  }
  done.store(true);
  first.join();
  second.join();
  owner.table().check();
}

}  // namespace
}  // namespace windrow::testing
