#include "windrow/device_allocator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <stdexcept>

#include "scripted_streams.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"

namespace windrow {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr StreamId kMine = 1;
constexpr StreamId kOther = 2;

// A chunk is four blocks of 2 MiB.
Geometry geometry_of(std::int64_t chunks) {
  return {.layers = 2,
          .kv_heads = 2,
          .head_dim = 32,
          .dtype_bytes = 4,
          .block_bytes = 2 * kMiB,
          .chunks = chunks};
}

class DeviceAllocatorTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kChunks = 4;

  void lend(std::int64_t chunks) {
    for (std::int64_t chunk = kChunks - chunks; chunk < kChunks; ++chunk) {
      allocator_.lend(chunk);
    }
  }

  Geometry geometry_ = geometry_of(kChunks);
  std::shared_ptr<Memory> memory_ =
      host_driver().create(static_cast<std::size_t>(geometry_.arena_bytes()), "allocator-test");
  testing::ScriptedStreams streams_;
  DeviceAllocator allocator_{host_driver(), streams_,
                             std::make_shared<ChunkMajorMemory>(memory_, geometry_)};
};

TEST_F(DeviceAllocatorTest, WithoutChunksEveryRequestNamesTheBudget) {
  for (const std::size_t bytes : {std::size_t{1}, 3 * kMiB}) {
    try {
      static_cast<void>(allocator_.allocate(bytes, kMine));
      FAIL() << "no memory is left";
    } catch (const BudgetError& error) {
      EXPECT_NE(std::string(error.what()).find("0 chunks of 8.0 MiB"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(allocator_.stats().ooms, 2);
  EXPECT_EQ(allocator_.allocate(0, kMine), nullptr);
}

TEST_F(DeviceAllocatorTest, ALargeTensorLiesAtConsecutiveAddressesInBlocksOfSeveralChunks) {
  lend(3);
  std::byte* const first = allocator_.allocate(6 * kMiB, kMine);  // three of chunk 3's four blocks
  std::byte* const second =
      allocator_.allocate(13 * kMiB, kMine);  // seven: its last, and two chunks
  std::memset(first, 1, 6 * kMiB);
  std::memset(second, 2, 13 * kMiB);
  EXPECT_EQ(first[6 * kMiB - 1], std::byte{1});
  const auto arena = map_whole(host_driver(), *memory_, Access::kReadOnly);
  EXPECT_EQ(arena->data()[3 * geometry_.chunk_bytes()], std::byte{1});
  EXPECT_EQ(arena->data()[4 * geometry_.chunk_bytes() - 1], std::byte{2});
  EXPECT_EQ(arena->data()[2 * geometry_.chunk_bytes()], std::byte{2});
  EXPECT_EQ(allocator_.stats().allocated_bytes.large.current, 20 * static_cast<int>(kMiB));
  EXPECT_EQ(allocator_.stats().fragmentation_bytes(), static_cast<int>(kMiB));
  allocator_.check();
}

TEST_F(DeviceAllocatorTest, MemoryFreedOnAStreamIsReusedThereAtOnceAndElsewhereAfterItsWork) {
  lend(1);
  std::byte* const address = allocator_.allocate(8 * kMiB, kMine);
  streams_.launch(kMine);
  allocator_.free(address);
  EXPECT_EQ(allocator_.allocate(8 * kMiB, kMine), address);
  allocator_.free(address);
  EXPECT_EQ(streams_.waits(), 0);
  static_cast<void>(allocator_.allocate(2 * kMiB, kOther));
  EXPECT_EQ(streams_.waits(), 1) << "it must wait for the other stream's kernel";
}

TEST_F(DeviceAllocatorTest, SmallMemoryChangesStreamsInQuietBlocksOnly) {
  lend(1);
  std::byte* const mine = allocator_.allocate(4096, kMine);
  std::byte* const other = allocator_.allocate(4096, kOther);
  EXPECT_NE((mine - other) / static_cast<std::ptrdiff_t>(kPoolBlockBytes), 0);
  streams_.launch(kMine);
  allocator_.free(mine);
  EXPECT_EQ(allocator_.allocate(4096, kMine), mine);
  allocator_.free(mine);
  static_cast<void>(allocator_.allocate(4 * kMiB, kOther));
  EXPECT_EQ(streams_.waits(), 0);
  static_cast<void>(allocator_.allocate(2 * kMiB, kOther));  // the last: it was the pool's
  EXPECT_EQ(streams_.waits(), 1);
}

TEST_F(DeviceAllocatorTest, ARecordedStreamKeepsMemoryFromEveryoneUntilItIsDone) {
  lend(1);
  for (const std::size_t bytes : {std::size_t{5000}, 2 * kMiB}) {
    std::byte* const address = allocator_.allocate(bytes, kMine);
    allocator_.record_stream(address, kOther);
    streams_.launch(kOther);
    allocator_.free(address);
    std::byte* const next = allocator_.allocate(bytes, kMine);
    EXPECT_NE(next, address);
    EXPECT_EQ(allocator_.stats().active.all.current, 2);
    EXPECT_EQ(allocator_.stats().allocation.all.current, 1);
    EXPECT_THROW(allocator_.free(address), Error);
    streams_.finish(kOther);
    allocator_.free(next);
    static_cast<void>(allocator_.take_quiet());
    std::byte* const again = allocator_.allocate(bytes, kMine);
    EXPECT_EQ(allocator_.stats().active.all.current, 1);
    allocator_.free(again);
  }
  EXPECT_EQ(streams_.waits(), 0);
  EXPECT_THROW(allocator_.record_stream(memory_ ? reinterpret_cast<std::byte*>(1) : nullptr, 1),
               Error);
}

TEST_F(DeviceAllocatorTest, ADrainedChunkLeavesWhenItsLastBlockIsFreeAndQuiet) {
  lend(2);
  std::byte* const held = allocator_.allocate(16 * kMiB, kMine);
  allocator_.drain(2);
  EXPECT_TRUE(allocator_.take_quiet().empty());
  streams_.launch(kMine);
  allocator_.free(held);
  EXPECT_TRUE(allocator_.take_quiet().empty()) << "a kernel may still write into it";
  EXPECT_THROW(static_cast<void>(allocator_.allocate(9 * kMiB, kMine)), BudgetError);
  streams_.finish(kMine);
  EXPECT_EQ(allocator_.take_quiet(), std::vector<std::int64_t>{2});
  EXPECT_TRUE(allocator_.take_quiet().empty());
  EXPECT_NE(allocator_.allocate(8 * kMiB, kMine), nullptr);
}

TEST_F(DeviceAllocatorTest, ABudgetShrinksFromTheLowestChunksAndEmptyPoolBlocksGoWithIt) {
  lend(4);
  std::byte* const tiny = allocator_.allocate(1, kMine);
  allocator_.free(tiny);  // its block stays with the pool
  allocator_.shrink_to(1);
  EXPECT_EQ(allocator_.take_quiet(), (std::vector<std::int64_t>{0, 1, 2}));
  allocator_.shrink_to(0);
  EXPECT_EQ(allocator_.take_quiet(), std::vector<std::int64_t>{3});
  EXPECT_EQ(allocator_.stats().reserved_bytes.all.current, 0);
}

TEST_F(DeviceAllocatorTest, AChunkThatIsLentAgainNeedsNoMappingCall) {
  lend(2);
  std::byte* const before = allocator_.allocate(10 * kMiB, kMine);
  const std::int64_t mapped = allocator_.mapping_calls().map;
  allocator_.free(before);
  allocator_.shrink_to(0);
  EXPECT_EQ(allocator_.take_quiet().size(), 2U);
  lend(2);
  EXPECT_EQ(allocator_.allocate(10 * kMiB, kMine), before);
  EXPECT_EQ(allocator_.mapping_calls().map, mapped);
  EXPECT_EQ(allocator_.mapping_calls().saved, mapped);
  EXPECT_EQ(allocator_.mapping_calls().unmap, 0);
  allocator_.free(before);
  allocator_.release_cached();
  EXPECT_EQ(allocator_.mapping_calls().unmap, mapped);
}

TEST_F(DeviceAllocatorTest, ChunksOutsideOfTheBudgetAreRefused) {
  lend(1);
  EXPECT_THROW(allocator_.lend(3), Error);
  EXPECT_THROW(allocator_.lend(kChunks), std::out_of_range);
  EXPECT_THROW(allocator_.drain(0), Error);
  EXPECT_THROW(allocator_.drain(-1), std::out_of_range);
}

TEST_F(DeviceAllocatorTest, AddressesThatNobodyHoldsAreRefused) {
  lend(1);
  std::byte* const large = allocator_.allocate(4 * kMiB, kMine);
  EXPECT_THROW(allocator_.free(large + 2 * kMiB), Error);
  EXPECT_THROW(allocator_.free(nullptr), Error);
  allocator_.free(large);
  EXPECT_THROW(allocator_.free(large), Error);
  allocator_.check();
}

TEST_F(DeviceAllocatorTest, ADrainedChunkWaitsForEveryStreamThatMemoryWasUsedOn) {
  lend(2);
  std::byte* const on_mine = allocator_.allocate(8 * kMiB, kMine);
  std::byte* const on_other = allocator_.allocate(4 * kMiB, kOther);
  streams_.launch(kOther);  // uses what `mine` holds
  allocator_.free(on_mine);
  allocator_.drain(3);
  EXPECT_TRUE(allocator_.take_quiet().empty());
  streams_.launch(kOther);  // was queued after it was freed
  EXPECT_TRUE(allocator_.take_quiet().empty());
  streams_.finish_one(kOther);
  EXPECT_EQ(allocator_.take_quiet(), std::vector<std::int64_t>{3});
  allocator_.free(on_other);
}

TEST_F(DeviceAllocatorTest, ARecordedStreamThatTakesNoMemoryHoldsADrainedChunkToo) {
  lend(1);
  std::byte* const tensor = allocator_.allocate(4 * kMiB, kMine);
  std::byte* const recorded = allocator_.allocate(2 * kMiB, kMine);
  allocator_.record_stream(recorded, kOther);
  streams_.launch(kOther);  // uses both, and was announced for one
  allocator_.free(tensor);
  streams_.finish(kMine);
  allocator_.free(recorded);
  allocator_.drain(3);
  EXPECT_TRUE(allocator_.take_quiet().empty());
  streams_.finish(kOther);
  EXPECT_EQ(allocator_.take_quiet(), std::vector<std::int64_t>{3});
}

TEST_F(DeviceAllocatorTest, WhatIsFreedCostsNoCallOfTheDevice) {
  lend(1);
  for (int i = 0; i < 8; ++i) {
    std::byte* const address = allocator_.allocate(4 * kMiB, kMine);
    streams_.launch(kMine);
    allocator_.free(address);
  }
  EXPECT_EQ(streams_.records(), 0);
}

TEST_F(DeviceAllocatorTest, WhereTheDeviceGivesNoEventAnotherStreamGetsNothingAndNothingIsLost) {
  lend(1);
  for (const std::size_t bytes : {8 * kMiB, std::size_t{5000}}) {
    std::byte* const address = allocator_.allocate(bytes, kMine);
    streams_.launch(kMine);
    allocator_.free(address);
    streams_.fail_next_record();
    EXPECT_THROW(static_cast<void>(allocator_.allocate(8 * kMiB, kOther)), Error);
    std::byte* const theirs = allocator_.allocate(8 * kMiB, kOther);
    EXPECT_GE(streams_.waits(), 1);
    allocator_.free(theirs);
    EXPECT_EQ(allocator_.stats().allocation.all.current, 0);
    EXPECT_EQ(allocator_.stats().reserved_bytes.all.current, 0);
    allocator_.check();
  }
}

TEST_F(DeviceAllocatorTest, AnotherStreamJoinsWhatBothHaveFreedOnceTheFirstIsDone) {
  lend(1);
  std::byte* const mine = allocator_.allocate(4 * kMiB, kMine);
  std::byte* const other = allocator_.allocate(4 * kMiB, kOther);
  streams_.launch(kMine);
  allocator_.free(mine);
  allocator_.free(other);
  EXPECT_EQ(allocator_.allocate(4 * kMiB, kOther), other);
  allocator_.free(other);
  streams_.finish(kMine);
  static_cast<void>(allocator_.allocate(8 * kMiB, kOther));
  EXPECT_EQ(streams_.waits(), 0);
}

TEST_F(DeviceAllocatorTest, ARecordedStreamWithoutAnEventKeepsTheMemoryUntilAllStreamsAreDone) {
  lend(1);
  std::byte* const address = allocator_.allocate(4 * kMiB, kMine);
  allocator_.record_stream(address, kOther);
  streams_.launch(kOther);
  streams_.fail_next_record();
  allocator_.free(address);
  EXPECT_EQ(allocator_.stats().active.all.current, 1);
  EXPECT_NE(allocator_.allocate(4 * kMiB, kMine), address);
  streams_.finish(kOther);
  EXPECT_EQ(allocator_.allocate(4 * kMiB, kMine), address);
  EXPECT_EQ(streams_.waits(), 0);
  allocator_.check();
}

TEST_F(DeviceAllocatorTest, ADeviceThatAnswersNoQuestionKeepsItsMemoryAndSaysSo) {
  lend(1);
  std::byte* const address = allocator_.allocate(8 * kMiB, kMine);
  allocator_.free(address);
  allocator_.drain(3);
  streams_.fail_next_record();
  EXPECT_THROW(static_cast<void>(allocator_.take_quiet()), Error);
  EXPECT_EQ(allocator_.take_quiet(), std::vector<std::int64_t>{3});
}

TEST_F(DeviceAllocatorTest, BlocksSmallerThanAPoolBlockAreJoined) {
  const Geometry fine{.layers = 6,
                      .kv_heads = 4,
                      .head_dim = 32,
                      .dtype_bytes = 4,
                      .block_bytes = 128 * 1024,
                      .chunks = 4};
  std::shared_ptr<Memory> memory =
      host_driver().create(static_cast<std::size_t>(fine.arena_bytes()), "allocator-test");
  DeviceAllocator allocator(host_driver(), streams_,
                            std::make_shared<ChunkMajorMemory>(memory, fine));
  for (std::int64_t chunk = 0; chunk < 4; ++chunk) {
    allocator.lend(chunk);
  }
  std::byte* const small = allocator.allocate(kPoolBlockBytes - 1, kMine);
  std::byte* const large = allocator.allocate(kPoolBlockBytes + 1, kMine);
  std::memset(small, 1, kPoolBlockBytes - 1);
  std::memset(large, 2, kPoolBlockBytes + 1);
  EXPECT_EQ(small[kPoolBlockBytes - 2], std::byte{1});
  EXPECT_EQ(allocator.stats().reserved_bytes.large.current, 17 * 128 * 1024);
  allocator.check();

  const Geometry odd{.layers = 1,
                     .kv_heads = 1,
                     .head_dim = 32,
                     .dtype_bytes = 4,
                     .block_bytes = 3 * 4096,
                     .chunks = 4};
  EXPECT_THROW(
      DeviceAllocator(host_driver(), streams_, std::make_shared<ChunkMajorMemory>(memory, odd)),
      GeometryError);
}

// Every allocation is filled with its own byte; an allocation that overlaps it or maps another
// block there shows when it is freed.
TEST_F(DeviceAllocatorTest, AnySequenceOnSeveralStreamsKeepsTensorsApartAndEverythingReturns) {
  struct Tensor {
    std::size_t bytes;
    std::byte mark;
  };
  lend(4);
  std::minstd_rand random(11);
  std::map<std::byte*, Tensor> live;
  const auto free_one = [&](std::map<std::byte*, Tensor>::iterator chosen) {
    const auto [address, tensor] = *chosen;
    for (std::size_t i = 0; i < tensor.bytes; i += 1021) {
      ASSERT_EQ(address[i], tensor.mark);
    }
    if (random() % 8 == 0) {
      allocator_.record_stream(address, kOther);
    }
    allocator_.free(address);
    live.erase(chosen);
  };
  for (int step = 0; step < 3'000; ++step) {
    const StreamId stream = random() % 2 == 0 ? kMine : kOther;
    const unsigned dice = random() % 100;
    if (dice < 50) {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (4 + random() % 19));
      try {
        std::byte* const address = allocator_.allocate(bytes, stream);
        const auto mark = static_cast<std::byte>(1 + step % 255);
        std::memset(address, static_cast<int>(mark), bytes);
        ASSERT_TRUE(live.emplace(address, Tensor{bytes, mark}).second);
      } catch (const BudgetError&) {
        ASSERT_FALSE(live.empty());
      }
    } else if (dice < 90 && !live.empty()) {
      free_one(std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size())));
    } else if (dice < 94) {
      random() % 2 == 0 ? streams_.launch(stream) : streams_.finish(stream);
    } else if (dice < 97) {
      allocator_.shrink_to(static_cast<std::int64_t>(random() % 4));
    } else {
      for (const auto chunk : allocator_.take_quiet()) {
        allocator_.lend(chunk);
      }
    }
    if (step % 100 == 0) {
      allocator_.check();
    }
  }
  while (!live.empty()) {
    free_one(live.begin());
  }
  streams_.finish(kMine);
  streams_.finish(kOther);
  allocator_.shrink_to(0);
  static_cast<void>(allocator_.take_quiet());
  allocator_.check();
  EXPECT_EQ(allocator_.stats().reserved_bytes.all.current, 0);
  EXPECT_EQ(allocator_.stats().active.all.current, 0);
}

}  // namespace
}  // namespace windrow
