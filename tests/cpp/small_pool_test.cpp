#include "windrow/small_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <stdexcept>

#include "numbered_blocks.h"
#include "windrow/error.h"

namespace windrow {
namespace {

using testing::NumberedBlocks;

std::size_t offset(const std::byte* address) {
  return static_cast<std::size_t>(address - NumberedBlocks::base());
}

TEST(SmallPool, RoundsUpToPowersOfTwoFromTwoKibAndAlignsToThem) {
  NumberedBlocks source(8);
  SmallPool pool(source, NumberedBlocks::base());
  for (const auto& [asked, rounded] :
       std::map<std::size_t, std::int64_t>{{1, 2048},
                                           {2048, 2048},
                                           {2049, 4096},
                                           {70'000, 131'072},
                                           {kPoolBlockBytes / 2 + 1, kPoolBlockBytes}}) {
    std::byte* const address = pool.allocate(asked);
    EXPECT_EQ(offset(address) % static_cast<std::size_t>(rounded), 0U);
    EXPECT_EQ(pool.bytes().rounded, rounded);
    EXPECT_EQ(pool.bytes().requested, static_cast<std::int64_t>(asked));
    EXPECT_EQ(pool.free(address), asked);
  }
  EXPECT_EQ(pool.bytes().rounded, 0);
}

TEST(SmallPool, AWholeBlockSplitsIntoItsLeavesAndMergesAgain) {
  NumberedBlocks source(1);
  SmallPool pool(source, NumberedBlocks::base());
  std::vector<std::byte*> leaves;
  for (std::size_t i = 0; i < kLeaves; ++i) {
    leaves.push_back(pool.allocate(1));
    ASSERT_NE(leaves.back(), nullptr);
  }
  EXPECT_EQ(pool.allocate(1), nullptr);
  for (std::byte* leaf : leaves) {
    pool.free(leaf);
  }
  EXPECT_NE(pool.allocate(kPoolBlockBytes), nullptr);
  pool.check();
}

TEST(SmallPool, KeepsOneEmptyBlockAndReturnsTheOthers) {
  NumberedBlocks source(4);
  SmallPool pool(source, NumberedBlocks::base());
  std::vector<std::byte*> whole;
  for (int i = 0; i < 3; ++i) {
    whole.push_back(pool.allocate(kPoolBlockBytes));
  }
  for (std::byte* block : whole) {
    pool.free(block);
  }
  EXPECT_EQ(source.taken(), 1U);
  pool.trim();
  EXPECT_EQ(source.taken(), 0U);
}

TEST(SmallPool, HoldsTheBlocksOfAProfiledIterationUntilItIsTrimmed) {
  NumberedBlocks source(4);
  SmallPool pool(source, NumberedBlocks::base());
  EXPECT_EQ(pool.keep(3), 3U);
  pool.free(pool.allocate(kPoolBlockBytes));
  EXPECT_EQ(source.taken(), 3U);
  EXPECT_EQ(pool.keep(9), 4U);
  pool.trim();
  EXPECT_EQ(source.taken(), 0U);
}

TEST(SmallPool, RefusesWhatItDidNotGiveOut) {
  NumberedBlocks source(2);
  SmallPool pool(source, NumberedBlocks::base());
  std::byte* const address = pool.allocate(5000);
  EXPECT_THROW(pool.free(address + kLeafBytes), Error);
  EXPECT_THROW(pool.free(address + 1), Error);
  EXPECT_THROW(pool.free(NumberedBlocks::base() + kPoolBlockBytes), Error);
  EXPECT_THROW(pool.free(nullptr), Error);
  pool.free(address);
  EXPECT_THROW(pool.free(address), Error);
  EXPECT_THROW(static_cast<void>(pool.allocate(0)), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(pool.allocate(kPoolBlockBytes + 1)), std::invalid_argument);
  pool.check();
}

TEST(SmallPool, ReturnsItsBlocksWhenItEndsWithLiveAllocations) {
  NumberedBlocks source(2);
  {
    SmallPool pool(source, NumberedBlocks::base());
    static_cast<void>(pool.allocate(1));
  }
  EXPECT_EQ(source.taken(), 0U);
}

TEST(SmallPool, AnySequenceKeepsPiecesApartAndEverythingReturns) {
  NumberedBlocks source(24);
  SmallPool pool(source, NumberedBlocks::base());
  std::minstd_rand random(7);
  std::map<std::byte*, std::size_t> live;  // address -> requested
  for (int step = 0; step < 20'000; ++step) {
    if (live.empty() || random() % 100 < 52) {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (1 + random() % 21));
      std::byte* const address = pool.allocate(bytes);
      if (address == nullptr) {
        continue;
      }
      const auto after = live.lower_bound(address);
      ASSERT_TRUE(after == live.end() || address + bytes <= after->first);
      ASSERT_TRUE(after == live.begin() ||
                  std::prev(after)->first + std::prev(after)->second <= address);
      live.emplace(address, bytes);
    } else {
      const auto chosen =
          std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      ASSERT_EQ(pool.free(chosen->first), chosen->second);
      live.erase(chosen);
    }
    if (step % 500 == 0) {
      pool.check();
    }
  }
  for (const auto& [address, bytes] : live) {
    pool.free(address);
  }
  pool.trim();
  pool.check();
  EXPECT_EQ(source.taken(), 0U);
}

TEST(SizedFor, IsThePeakOfTheIterationAndATenthMore) {
  std::vector<TraceStep> trace;
  for (std::int64_t i = 0; i < 20; ++i) {
    trace.push_back({i, kPoolBlockBytes - 1});
  }
  for (std::int64_t i = 0; i < 20; ++i) {
    trace.push_back({i, 0});
  }
  trace.push_back({20, 100});
  trace.push_back({21, kPoolBlockBytes});  // not the pool's
  trace.push_back({21, 0});
  EXPECT_EQ(sized_for(trace), 22U);
  EXPECT_EQ(sized_for({}), 0U);
}

}  // namespace
}  // namespace windrow
