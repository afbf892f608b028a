// The device allocator as it runs on a GPU: a handle for each block, CUDA's own streams and events.
// Over the stand-in for libcuda, which notes every rule that is broken.
#include <gtest/gtest.h>

#include "drivers.h"
#include "windrow/cuda_streams.h"
#include "windrow/device_allocator.h"

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

class CudaAllocator : public ::testing::Test {
 protected:
  static constexpr std::int64_t kChunks = 2;

  void SetUp() override {
    held_before_ = Standin::held();
    blocks_ = std::make_shared<SeparateBlocks>(driver_, kChunks);
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
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
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
  std::shared_ptr<SeparateBlocks> blocks_;
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

}  // namespace
}  // namespace windrow
