// The device allocator as it runs on a GPU: a handle for each block or for each chunk, CUDA's own
// streams and events.
// Over the stand-in for libcuda, which notes every rule that is broken.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "drivers.h"
#include "windrow/cuda_streams.h"
#include "windrow/device_allocator.h"
#include "windrow/error.h"

namespace windrow {
namespace {

using testing::get;
using testing::Standin;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Each block a memory of its own, as CUDA wants them.
class SeparateBlocks final : public ChunkMemory {
 public:
  SeparateBlocks(Driver& driver, std::int64_t chunks) : chunks_(chunks) {
    for (std::int64_t i = 0; i < chunks * blocks_per_chunk(); ++i) {
      blocks_.push_back(driver.create(block_bytes(), "allocator-test"));
    }
  }
  [[nodiscard]] std::int64_t chunks() const override { return chunks_; }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return 4; }
  [[nodiscard]] std::size_t block_bytes() const override { return 2 * kMiB; }
  [[nodiscard]] Backing backing(std::int64_t chunk, std::int64_t block) const override {
    return {blocks_[static_cast<std::size_t>(chunk * blocks_per_chunk() + block)].get(), 0};
  }

 private:
  std::int64_t chunks_;
  std::vector<std::unique_ptr<Memory>> blocks_;
};

// Each chunk one memory, as in the token-major layout.
class SeparateChunks final : public ChunkMemory {
 public:
  SeparateChunks(Driver& driver, std::int64_t chunks, std::size_t block_bytes)
      : block_bytes_(block_bytes) {
    for (std::int64_t i = 0; i < chunks; ++i) {
      chunks_.push_back(driver.create(4 * block_bytes, "allocator-test"));
    }
  }
  [[nodiscard]] std::int64_t chunks() const override { return std::ssize(chunks_); }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return 4; }
  [[nodiscard]] std::size_t block_bytes() const override { return block_bytes_; }
  [[nodiscard]] Backing backing(std::int64_t chunk, std::int64_t block) const override {
    return {chunks_[static_cast<std::size_t>(chunk)].get(),
            static_cast<std::size_t>(block) * block_bytes_};
  }

 private:
  std::size_t block_bytes_;
  std::vector<std::unique_ptr<Memory>> chunks_;
};

class CudaAllocator : public ::testing::Test {
 protected:
  [[nodiscard]] virtual std::shared_ptr<ChunkMemory> make_blocks() {
    return std::make_shared<SeparateBlocks>(driver_, 2);
  }

  void SetUp() override {
    held_before_ = Standin::held();
    blocks_ = make_blocks();
    allocator_ = std::make_unique<DeviceAllocator>(driver_, streams_, blocks_);
    const CudaContext::Current current(context());
    for (auto* stream : {&mine_, &other_}) {
      context().check(context().calls().cuStreamCreate(stream, 1), "creating a stream");
    }
    lend_all();
  }
  void TearDown() override {
    allocator_.reset();
    blocks_.reset();
    const CudaContext::Current current(context());
    for (const auto stream : {mine_, other_}) {
      context().check(context().calls().cuStreamDestroy(stream), "destroying a stream");
    }
    EXPECT_EQ(Standin::violations(), "");
    EXPECT_EQ(Standin::held(), held_before_);
  }

  void lend_all() {
    for (std::int64_t chunk = 0; chunk < blocks_->chunks(); ++chunk) {
      allocator_->lend(chunk);
    }
  }
  // Work that runs when somebody waits for it.
  void launch_fill(cuda::Stream stream, std::byte* at, unsigned char value, std::size_t bytes) {
    const CudaContext::Current current(context());
    context().check(context().calls().cuMemsetD8Async(reinterpret_cast<cuda::DevicePtr>(at), value,
                                                      bytes, stream),
                    "filling");
  }
  void synchronize(cuda::Stream stream) {
    const CudaContext::Current current(context());
    context().check(context().calls().cuStreamSynchronize(stream), "waiting");
  }
  [[nodiscard]] static StreamId id(cuda::Stream stream) {
    return reinterpret_cast<StreamId>(stream);
  }
  [[nodiscard]] const CudaContext& context() const { return *driver_.context(); }

  CudaDriver& driver_ = dynamic_cast<CudaDriver&>(*testing::driver_of("standin"));
  CudaStreams streams_{driver_.context()};
  std::shared_ptr<ChunkMemory> blocks_;
  std::unique_ptr<DeviceAllocator> allocator_;
  cuda::Stream mine_ = nullptr;
  cuda::Stream other_ = nullptr;

 private:
  long long held_before_ = 0;
};

TEST_F(CudaAllocator, ALargeTensorIsOneRangeOverTheHandlesOfSeveralChunks) {
  const auto accesses = Standin::counts().accesses;
  std::byte* const tensor = allocator_->allocate(10 * kMiB, id(mine_));
  EXPECT_EQ(allocator_->mapping_calls().map, 5);
  EXPECT_EQ(allocator_->mapping_calls().access, 1);
  EXPECT_EQ(Standin::counts().accesses, accesses + 1);
  launch_fill(mine_, tensor, 7, 10 * kMiB);
  synchronize(mine_);
  EXPECT_EQ(get(driver_, tensor + 10 * kMiB - 1), std::byte{7});
  const Backing last = blocks_->backing(0, 0);
  const auto alias = map_whole(driver_, *last.memory, Access::kReadOnly);
  EXPECT_EQ(get(driver_, alias->data()), std::byte{7});
  allocator_->free(tensor);
}

TEST_F(CudaAllocator, AnotherStreamGetsMemoryWhenItsKernelsHaveEnded) {
  std::byte* const tensor = allocator_->allocate(16 * kMiB, id(mine_));
  launch_fill(mine_, tensor, 1, 16 * kMiB);
  allocator_->free(tensor);
  EXPECT_EQ(allocator_->allocate(16 * kMiB, id(mine_)), tensor) << "the same stream: at once";
  launch_fill(mine_, tensor, 2, 16 * kMiB);
  allocator_->free(tensor);
  std::byte* const theirs = allocator_->allocate(16 * kMiB, id(other_));
  EXPECT_EQ(get(driver_, theirs + 1), std::byte{2}) << "the kernel had not run";
  allocator_->free(theirs);
}

TEST_F(CudaAllocator, ARecordedStreamIsWaitedForToo) {
  for (const std::size_t bytes : {5000 * std::size_t{1}, 4 * kMiB}) {
    std::byte* const tensor = allocator_->allocate(bytes, id(mine_));
    allocator_->record_stream(tensor, id(other_));
    launch_fill(other_, tensor, 3, bytes);
    allocator_->free(tensor);
    std::byte* const next = allocator_->allocate(bytes, id(mine_));
    EXPECT_NE(next, tensor);
    allocator_->free(next);
    synchronize(other_);
  }
}

TEST_F(CudaAllocator, NothingIsUnmappedUnderAKernel) {
  std::byte* const tensor = allocator_->allocate(16 * kMiB, id(mine_));
  launch_fill(mine_, tensor, 5, 16 * kMiB);
  allocator_->free(tensor);
  allocator_->release_cached();  // waits, for the stand-in refuses to unmap under pending work
  EXPECT_EQ(allocator_->mapping_calls().unmap, 8);
}

TEST_F(CudaAllocator, AReservationEndsBehindTheKernelsThatUseIt) {
  const auto memory = driver_.create(4 * kMiB, "allocator-test");
  {
    const auto mapped = map_whole(driver_, *memory, Access::kReadWrite);
    launch_fill(mine_, mapped->data(), 9, 4 * kMiB);
  }
  const auto again = map_whole(driver_, *memory, Access::kReadOnly);
  EXPECT_EQ(get(driver_, again->data()), std::byte{9});
}

TEST_F(CudaAllocator, NothingIsUnmappedWhileAnyStreamThatTakesMemoryIsAtWork) {
  std::byte* const tensor = allocator_->allocate(4 * kMiB, id(mine_));
  std::byte* const theirs = allocator_->allocate(4 * kMiB, id(other_));
  launch_fill(other_, tensor, 5, 4 * kMiB);  // ordered behind `mine_` by an event, as torch does it
  allocator_->free(tensor);
  allocator_->release_cached();
  EXPECT_GE(allocator_->mapping_calls().unmap, 2);
  allocator_->free(theirs);
}

TEST_F(CudaAllocator, AddressesThatAKernelStillUsesAreNotTakenForAnotherTensor) {
  std::byte* const used = allocator_->allocate(4 * kMiB, id(mine_));
  launch_fill(other_, used, 5, 4 * kMiB);
  allocator_->free(used);
  // Tensors of other shapes and places, until every address has been used.
  std::minstd_rand random(3);
  std::vector<std::byte*> live;
  for (int i = 0; i < 1000 && allocator_->mapping_calls().unmap == 0; ++i) {
    const std::size_t bytes = (random() % 2 == 0 ? 1 : 3 + random() % 3) * 2 * kMiB;
    while (static_cast<std::size_t>(allocator_->stats().reserved_bytes.all.current) + bytes >
           16 * kMiB) {
      const auto at = live.begin() + static_cast<std::ptrdiff_t>(random() % live.size());
      allocator_->free(*at);
      live.erase(at);
    }
    live.push_back(allocator_->allocate(bytes, id(mine_)));
  }
  EXPECT_GT(allocator_->mapping_calls().unmap, 0);
  for (std::byte* const tensor : live) {
    allocator_->free(tensor);
  }
}

TEST_F(CudaAllocator, AChunkIsGivenBackAfterTheKernelsThatWriteIt) {
  std::byte* const tensor = allocator_->allocate(16 * kMiB, id(mine_));
  launch_fill(mine_, tensor, 5, 16 * kMiB);
  allocator_->free(tensor);
  allocator_->shrink_to(0);
  const auto decode = map_whole(driver_, *blocks_->backing(0, 0).memory, Access::kReadOnly);
  std::size_t gone = 0;
  for (int look = 0; look < 10 && gone < 2; ++look) {
    gone += allocator_->take_quiet().size();
  }
  EXPECT_EQ(gone, 2U);
  EXPECT_EQ(get(driver_, decode->data()), std::byte{5});
}

TEST_F(CudaAllocator, WhatWasFreedIsQuietAfterAWaitWhateverIsQueuedMeanwhile) {
  for (const bool is_recorded : {false, true}) {
    std::byte* const tensor = allocator_->allocate(8 * kMiB, id(mine_));
    std::byte* const stays = allocator_->allocate(4 * kMiB, id(mine_));
    launch_fill(other_, tensor, 5, 8 * kMiB);
    if (is_recorded) {
      allocator_->record_stream(tensor, id(other_));
    }
    allocator_->free(tensor);
    allocator_->drain(1);
    allocator_->wait_freed();
    launch_fill(other_, stays, 6, 4 * kMiB);
    EXPECT_EQ(allocator_->take_quiet().size(), 1U);
    allocator_->free(stays);
    allocator_->lend(1);
  }
}

// The worker's levels of SMs are streams: what was made on one is used on the next.
TEST_F(CudaAllocator, AChunkIsNotGivenBackWhileAnotherStreamUsesWhatWasFreed) {
  std::byte* const tensor = allocator_->allocate(8 * kMiB, id(mine_));
  launch_fill(other_, tensor, 5, 8 * kMiB);
  allocator_->free(tensor);
  allocator_->drain(1);
  EXPECT_TRUE(allocator_->take_quiet().empty()) << "the other stream's kernel has not run";
  synchronize(other_);
  EXPECT_EQ(allocator_->take_quiet().size(), 1U);
}

TEST_F(CudaAllocator, WhereNoEventOfTheContextIsToBeHadTheStreamsThatTookMemoryAreAsked) {
  const testing::StandinSetting refused("WINDROW_STANDIN_CONTEXT_EVENTS", "0");
  std::byte* const tensor = allocator_->allocate(8 * kMiB, id(mine_));
  std::byte* const theirs = allocator_->allocate(4 * kMiB, id(other_));
  launch_fill(other_, tensor, 5, 8 * kMiB);
  allocator_->free(tensor);
  allocator_->drain(1);
  EXPECT_TRUE(allocator_->take_quiet().empty());
  synchronize(other_);
  EXPECT_EQ(allocator_->take_quiet().size(), 1U);
  allocator_->free(theirs);
}

TEST_F(CudaAllocator, AChunkIsNotGivenBackUnderAKernelOfAGreenContext) {
  const auto partition = driver_.partition({});
  const auto level =
      reinterpret_cast<cuda::Stream>(partition->enter(Partition::Side::kFinetune, 2));
  std::byte* const tensor = allocator_->allocate(8 * kMiB, id(mine_));
  launch_fill(level, tensor, 5, 8 * kMiB);
  allocator_->free(tensor);
  allocator_->drain(1);
  EXPECT_TRUE(allocator_->take_quiet().empty());
  synchronize(level);
  EXPECT_EQ(allocator_->take_quiet().size(), 1U);
}

TEST_F(CudaAllocator, WhatIsQueuedAfterAChunkWasFreedDoesNotHoldIt) {
  std::byte* const tensor = allocator_->allocate(8 * kMiB, id(mine_));
  std::byte* const stays = allocator_->allocate(8 * kMiB, id(mine_));
  allocator_->free(tensor);
  allocator_->drain(1);
  EXPECT_EQ(allocator_->take_quiet().size(), 1U);
  launch_fill(mine_, stays, 5, 8 * kMiB);
  allocator_->drain(0);
  EXPECT_TRUE(allocator_->take_quiet().empty());
  allocator_->free(stays);
}

TEST_F(CudaAllocator, AnotherLibrarysContextOnTheThreadIsNotUsed) {
  const auto foreign = Standin::foreign_context();
  context().check(context().calls().cuCtxPushCurrent(foreign), "pushing");
  std::byte* const tensor = allocator_->allocate(16 * kMiB, id(mine_));
  allocator_->record_stream(tensor, id(other_));
  allocator_->free(tensor);
  allocator_->shrink_to(0);
  static_cast<void>(allocator_->take_quiet());
  allocator_->release_cached();
  cuda::Context popped = nullptr;
  context().check(context().calls().cuCtxPopCurrent(&popped), "popping");
  EXPECT_EQ(popped, foreign);
}

TEST_F(CudaAllocator, AChunkThatIsLentAgainIsNotMappedAgain) {
  std::byte* const tensor = allocator_->allocate(16 * kMiB, id(mine_));
  allocator_->free(tensor);
  synchronize(mine_);
  allocator_->shrink_to(0);
  EXPECT_EQ(allocator_->take_quiet().size(), 2U);
  const auto calls = Standin::counts().mappings;
  lend_all();
  EXPECT_EQ(allocator_->allocate(16 * kMiB, id(mine_)), tensor);
  EXPECT_EQ(Standin::counts().mappings, calls);
  EXPECT_EQ(allocator_->mapping_calls().saved, 8);
}

class TokenMajorAllocator : public CudaAllocator {
 protected:
  [[nodiscard]] std::shared_ptr<ChunkMemory> make_blocks() override {
    return std::make_shared<SeparateChunks>(driver_, 3, 2 * kMiB);
  }
};

TEST_F(TokenMajorAllocator, AChunkIsMappedOnceAndItsPiecesAreHandedOutWithoutACall) {
  std::byte* const first = allocator_->allocate(2 * kMiB, id(mine_));
  EXPECT_EQ(allocator_->mapping_calls().map, 1);
  std::byte* const second = allocator_->allocate(4 * kMiB, id(mine_));
  std::byte* const small = allocator_->allocate(5000, id(mine_));
  EXPECT_EQ(allocator_->mapping_calls().map, 1);
  EXPECT_EQ(allocator_->mapping_calls().access, 1);
  launch_fill(mine_, first, 1, 2 * kMiB);
  launch_fill(mine_, second, 2, 4 * kMiB);
  launch_fill(mine_, small, 3, 5000);
  synchronize(mine_);
  EXPECT_EQ(get(driver_, first + 2 * kMiB - 1), std::byte{1});
  EXPECT_EQ(get(driver_, second), std::byte{2});
  EXPECT_EQ(get(driver_, second + 4 * kMiB - 1), std::byte{2});
  EXPECT_EQ(get(driver_, small + 4999), std::byte{3});
  allocator_->check();
}

TEST_F(TokenMajorAllocator, ATensorLargerThanAChunkLiesInNeighboursAtTheirHomes) {
  std::byte* const tensor = allocator_->allocate(18 * kMiB, id(mine_));
  EXPECT_EQ(allocator_->mapping_calls().map, 3);
  launch_fill(mine_, tensor, 9, 18 * kMiB);
  synchronize(mine_);
  const auto decode = map_whole(driver_, *blocks_->backing(2, 0).memory, Access::kReadOnly);
  EXPECT_EQ(get(driver_, decode->data() + 8 * kMiB - 1), std::byte{9}) << "the highest are taken";
  allocator_->free(tensor);
}

TEST_F(TokenMajorAllocator, ChunksThatAreNoNeighboursAreMappedSideBySide) {
  allocator_->drain(1);
  EXPECT_EQ(allocator_->take_quiet().size(), 1U);
  std::byte* const tensor = allocator_->allocate(10 * kMiB, id(mine_));
  EXPECT_EQ(allocator_->mapping_calls().map, 2);
  EXPECT_EQ(allocator_->mapping_calls().access, 1);
  std::byte* const rest = allocator_->allocate(6 * kMiB, id(mine_));  // of the chunk cut into
  launch_fill(mine_, tensor, 4, 10 * kMiB);
  launch_fill(mine_, rest, 5, 6 * kMiB);
  synchronize(mine_);
  for (const std::size_t at : {std::size_t{0}, 8 * kMiB, 10 * kMiB - 1}) {
    EXPECT_EQ(get(driver_, tensor + at), std::byte{4});
  }
  EXPECT_EQ(get(driver_, rest), std::byte{5});
  allocator_->check();
  allocator_->free(tensor);
  EXPECT_EQ(allocator_->allocate(10 * kMiB, id(mine_)), tensor) << "it stayed mapped";
}

TEST_F(TokenMajorAllocator, ARequestThatNoRunHoldsIsRefusedWithTheLongestOne) {
  std::vector<std::byte*> tensors;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(allocator_->allocate(2 * kMiB, id(mine_)));
  }
  std::ranges::sort(tensors);
  for (std::size_t i = 0; i < tensors.size(); i += 2) {
    allocator_->free(tensors[i]);
  }
  try {
    static_cast<void>(allocator_->allocate(4 * kMiB, id(mine_)));
    FAIL() << "no two neighbours are free";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("at most 2.0 MiB of the rest are side by side"),
              std::string::npos)
        << error.what();
  }
  allocator_->check();
}

TEST_F(TokenMajorAllocator, NothingIsUnmappedUnderAKernelOrUnderATensor) {
  std::byte* const stays = allocator_->allocate(2 * kMiB, id(mine_));
  std::byte* const goes = allocator_->allocate(8 * kMiB, id(mine_));
  launch_fill(mine_, stays, 6, 2 * kMiB);
  launch_fill(mine_, goes, 7, 8 * kMiB);
  allocator_->free(goes);
  allocator_->release_cached();
  EXPECT_EQ(get(driver_, stays), std::byte{6});
  EXPECT_GE(allocator_->mapping_calls().unmap, 1);
  allocator_->free(stays);
  allocator_->release_cached();
  EXPECT_EQ(allocator_->mapping_calls().unmap, allocator_->mapping_calls().map);
}

TEST_F(TokenMajorAllocator, AChunkGoesBackAfterItsKernelsAndStaysMappedForTheNextTime) {
  std::byte* const tensor = allocator_->allocate(24 * kMiB, id(mine_));
  launch_fill(mine_, tensor, 5, 24 * kMiB);
  allocator_->free(tensor);
  allocator_->shrink_to(0);
  std::size_t gone = 0;
  for (int look = 0; look < 10 && gone < 3; ++look) {
    gone += allocator_->take_quiet().size();
  }
  EXPECT_EQ(gone, 3U);
  const auto calls = Standin::counts().mappings;
  lend_all();
  EXPECT_EQ(allocator_->allocate(24 * kMiB, id(mine_)), tensor);
  EXPECT_EQ(Standin::counts().mappings, calls);
}

TEST_F(TokenMajorAllocator, AnySequenceKeepsTensorsApartAndEverythingReturns) {
  std::minstd_rand random(5);
  std::map<std::byte*, std::pair<std::size_t, unsigned char>> live;
  const auto free_one = [&] {
    const auto [address, tensor] = *std::next(live.begin(), std::ssize(live) / 2);
    for (std::size_t i = 0; i < tensor.first; i += 4093) {
      ASSERT_EQ(std::to_integer<unsigned char>(address[i]), tensor.second);
    }
    allocator_->free(address);
    live.erase(address);
  };
  int served = 0;
  for (int step = 0; step < 400; ++step) {
    const unsigned dice = random() % 100;
    if (dice < 55) {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (10 + random() % 15));
      try {
        std::byte* const address = allocator_->allocate(bytes, id(mine_));
        const auto mark = static_cast<unsigned char>(1 + step % 255);
        std::memset(address, mark, bytes);  // the stand-in's memory is the processor's
        ASSERT_TRUE(live.emplace(address, std::pair(bytes, mark)).second);
        ++served;
      } catch (const BudgetError&) {
        // The budget is small and shrinks; the next one may be smaller.
      }
    } else if (dice < 90 && !live.empty()) {
      free_one();
    } else if (dice < 95) {
      allocator_->shrink_to(static_cast<std::int64_t>(random() % 3));
    } else {
      for (const auto chunk : allocator_->take_quiet()) {
        allocator_->lend(chunk);
      }
    }
    if (step % 20 == 0) {
      allocator_->check();
    }
  }
  EXPECT_GT(served, 100);
  while (!live.empty()) {
    free_one();
  }
  allocator_->shrink_to(0);
  static_cast<void>(allocator_->take_quiet());
  allocator_->check();
  EXPECT_EQ(allocator_->stats().reserved_bytes.all.current, 0);
}

TEST_F(TokenMajorAllocator, ChunksThatHoldNoWholePieceAreRefused) {
  const auto odd = std::make_shared<SeparateChunks>(driver_, 1, 3 * kMiB / 4);
  EXPECT_THROW(DeviceAllocator(driver_, streams_, odd), GeometryError);
}

// Pools of graphs, on both layouts: a capture between begin_pool and end_pool.
class GraphPoolAllocator : public CudaAllocator, public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr GraphPoolId kPool{0, 1};
  static constexpr GraphPoolId kOtherPool{0, 2};

  [[nodiscard]] std::shared_ptr<ChunkMemory> make_blocks() override {
    if (GetParam()) {
      return std::make_shared<SeparateChunks>(driver_, 3, 2 * kMiB);
    }
    return std::make_shared<SeparateBlocks>(driver_, 3);
  }
  void begin(GraphPoolId pool = kPool) {
    allocator_->begin_pool(pool, [this](StreamId stream) { return stream == id(mine_); });
    const CudaContext::Current current(context());
    ASSERT_EQ(Standin::begin_capture(mine_, 1), cuda::kSuccess);
  }
  // The graph of what was captured, which must not have been lost.
  [[nodiscard]] void* end(GraphPoolId pool = kPool) {
    const CudaContext::Current current(context());
    void* graph = nullptr;
    EXPECT_EQ(Standin::end_capture(mine_, &graph), cuda::kSuccess);
    allocator_->end_pool(pool);
    return graph;
  }
  void launch(void* graph) {
    const CudaContext::Current current(context());
    ASSERT_EQ(Standin::launch_graph(graph, mine_), cuda::kSuccess);
  }
  // torch backs the pool before a capture; the pool has to be known for that.
  void open_backed(std::size_t bytes, GraphPoolId pool = kPool) {
    allocator_->begin_pool(pool, [](StreamId) { return false; });
    allocator_->end_pool(pool);
    ASSERT_TRUE(allocator_->back_pool(pool, bytes));
  }
  void forget(std::initializer_list<void*> graphs) {
    for (void* const graph : graphs) {
      EXPECT_EQ(Standin::destroy_graph(graph), cuda::kSuccess);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Layouts, GraphPoolAllocator, ::testing::Values(false, true),
                         [](const auto& is) { return is.param ? "TokenMajor" : "PerLayer"; });

TEST_P(GraphPoolAllocator, WhatACaptureFreesIsGivenToLaterOnesOfItsPoolAndToNobodyElse) {
  open_backed(8 * kMiB);
  begin();
  std::byte* const first = allocator_->allocate(3 * kMiB, id(mine_));
  launch_fill(mine_, first, 1, 3 * kMiB);
  allocator_->free(first);
  std::byte* const second = allocator_->allocate(3 * kMiB, id(mine_));
  launch_fill(mine_, second, 2, 3 * kMiB);
  void* const graph = end();
  EXPECT_EQ(second, first) << "within the pool it is free at once";
  // Everything that is left, on every stream.
  std::vector<std::byte*> others;
  try {
    for (;;) {
      others.push_back(allocator_->allocate(2 * kMiB, id(others.size() % 2 == 0 ? mine_ : other_)));
      launch_fill(mine_, others.back(), 9, 2 * kMiB);
    }
  } catch (const BudgetError&) {
    EXPECT_EQ(others.size(), 8U) << "of twelve blocks four are the pool's";
  }
  allocator_->free(second);
  EXPECT_THROW(static_cast<void>(allocator_->allocate(2 * kMiB, id(mine_))), BudgetError)
      << "the graph still writes what was freed";
  synchronize(mine_);
  launch(graph);
  synchronize(mine_);
  EXPECT_EQ(get(driver_, second), std::byte{2});
  for (std::byte* const other : others) {
    EXPECT_EQ(get(driver_, other), std::byte{9});
    allocator_->free(other);
  }
  allocator_->check();
  forget({graph});
}

TEST_P(GraphPoolAllocator, NothingIsAskedOfTheDriverWhileAStreamCaptures) {
  std::byte* const before = allocator_->allocate(4 * kMiB, id(mine_));
  std::byte* const used = allocator_->allocate(4 * kMiB, id(mine_));
  allocator_->record_stream(used, id(other_));
  launch_fill(other_, used, 3, 4 * kMiB);
  allocator_->free(used);  // behind an event that allocate() asks for
  open_backed(4 * kMiB);
  begin();
  const auto calls = Standin::counts().calls;
  std::byte* const inside = allocator_->allocate(kMiB, id(mine_));
  allocator_->record_stream(inside, id(other_));
  allocator_->record_stream(before, id(other_));
  allocator_->free(before);
  allocator_->drain(0);
  EXPECT_TRUE(allocator_->take_quiet().empty());
  allocator_->free(inside);
  EXPECT_THROW(static_cast<void>(allocator_->allocate(kMiB, id(other_))), Error);
  EXPECT_THROW(allocator_->wait_freed(), Error);
  EXPECT_THROW(allocator_->release_cached(), Error);
  EXPECT_THROW(static_cast<void>(allocator_->back_pool(kPool, 6 * kMiB)), Error);
  EXPECT_EQ(Standin::counts().calls, calls);
  void* const graph = end();
  ASSERT_NE(graph, nullptr) << "the capture is lost";
  allocator_->wait_freed();
  forget({graph});
}

TEST_P(GraphPoolAllocator, OtherThreadsWaitForTheEndOfACapture) {
  open_backed(2 * kMiB);
  begin();
  std::byte* theirs = nullptr;
  std::thread thread([&] { theirs = allocator_->allocate(2 * kMiB, id(other_)); });
  std::byte* const inside = allocator_->allocate(kMiB, id(mine_));
  void* const graph = end();
  thread.join();
  ASSERT_NE(graph, nullptr) << "the capture is lost";
  EXPECT_NE(theirs, nullptr);
  allocator_->free(theirs);
  allocator_->free(inside);
  forget({graph});
}

TEST_P(GraphPoolAllocator, MemoryIsGivenBackAndOtherMemoryIsMappedAtTheSameAddresses) {
  open_backed(8 * kMiB);
  begin();
  std::byte* const tensor = allocator_->allocate(8 * kMiB, id(mine_));
  launch_fill(mine_, tensor, 5, 8 * kMiB);
  void* const graph = end();
  launch(graph);
  allocator_->unback_pools();
  EXPECT_EQ(allocator_->backed_bytes(), 0U);
  // All of the chunks go back, behind the graph that still writes them; then others come.
  allocator_->shrink_to(0);
  std::vector<std::int64_t> quiet;
  for (int look = 0; look < 10 && quiet.size() < 3; ++look) {
    const auto more = allocator_->take_quiet();
    quiet.insert(quiet.end(), more.begin(), more.end());
  }
  ASSERT_EQ(quiet.size(), 3U);
  const auto decode = map_whole(driver_, *blocks_->backing(2, 0).memory, Access::kReadOnly);
  EXPECT_EQ(get(driver_, decode->data()), std::byte{5}) << "the graph had not run";
  EXPECT_FALSE(allocator_->back_pool(kPool, 8 * kMiB)) << "nothing is lent";
  {
    const CudaContext::Current current(context());
    EXPECT_NE(Standin::launch_graph(graph, mine_), cuda::kSuccess) << "nothing is mapped";
  }
  EXPECT_NE(Standin::violations().find("not mapped"), std::string::npos);
  allocator_->lend(0);
  ASSERT_TRUE(allocator_->back_pool(kPool, allocator_->pool_bytes(kPool)));
  launch(graph);
  synchronize(mine_);
  const auto lent = map_whole(driver_, *blocks_->backing(0, 0).memory, Access::kReadOnly);
  EXPECT_EQ(get(driver_, lent->data()), std::byte{5});
  EXPECT_EQ(get(driver_, tensor + 8 * kMiB - 1), std::byte{5});
  allocator_->check();
  allocator_->free(tensor);
  forget({graph});
}

TEST_P(GraphPoolAllocator, PoolsAreMappedOverTheSameMemory) {
  open_backed(4 * kMiB);
  const std::size_t held = allocator_->backed_bytes();
  open_backed(4 * kMiB, kOtherPool);
  EXPECT_EQ(allocator_->backed_bytes(), held);
  begin();
  std::byte* const one = allocator_->allocate(kMiB, id(mine_));
  launch_fill(mine_, one, 1, kMiB);
  void* const first = end();
  begin(kOtherPool);
  std::byte* const two = allocator_->allocate(kMiB, id(mine_));
  launch_fill(mine_, two, 2, kMiB);
  void* const second = end(kOtherPool);
  EXPECT_NE(one, two);
  launch(first);
  synchronize(mine_);
  EXPECT_EQ(get(driver_, two), std::byte{1});
  launch(second);
  synchronize(mine_);
  EXPECT_EQ(get(driver_, one), std::byte{2});
  allocator_->free(one);
  allocator_->free(two);
  forget({first, second});
}

TEST_P(GraphPoolAllocator, ACaptureThatNeedsMoreThanIsBackedIsToldAndNothingIsLost) {
  open_backed(2 * kMiB);
  begin();
  const std::size_t backed = allocator_->backed_bytes();
  try {
    static_cast<void>(allocator_->allocate(backed + 1, id(mine_)));
    FAIL() << "there is no memory behind it";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("memory of graphs"), std::string::npos);
  }
  std::byte* const fits = allocator_->allocate(backed, id(mine_));
  void* const graph = end();
  ASSERT_NE(graph, nullptr);
  ASSERT_TRUE(allocator_->back_pool(kPool, backed + 1));
  allocator_->free(fits);
  EXPECT_THROW(allocator_->free(fits), Error);
  forget({graph});
}

TEST_P(GraphPoolAllocator, APoolWithoutGraphsAndTensorsGivesItsAddressesUp) {
  const auto reservations = Standin::counts().reservations;
  open_backed(2 * kMiB);
  EXPECT_EQ(Standin::counts().reservations, reservations + 1);
  allocator_->release_pool(kPool);
  allocator_->unback_pools();
  allocator_->release_cached();
  EXPECT_EQ(Standin::counts().reservations, reservations);
  EXPECT_EQ(allocator_->pool_bytes(kPool), 0U);
}

}  // namespace
}  // namespace windrow
