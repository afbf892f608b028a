#include "windrow/torch_entry.h"

#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "scripted_streams.h"
#include "windrow/host_driver.h"

namespace windrow {
namespace {

constexpr int kDevice = 1;

class TorchEntry : public ::testing::Test {
 protected:
  TorchEntry() { serve_device(kDevice, allocator_); }
  ~TorchEntry() override { serve_device(kDevice, nullptr); }

  Geometry geometry_{.layers = 1,
                     .kv_heads = 2,
                     .head_dim = 32,
                     .dtype_bytes = 4,
                     .block_bytes = 2 << 20,
                     .chunks = 2};
  testing::ScriptedStreams streams_;
  std::shared_ptr<DeviceAllocator> allocator_ = std::make_shared<DeviceAllocator>(
      host_driver(), streams_,
      std::make_shared<ChunkMajorMemory>(
          host_driver().create(static_cast<std::size_t>(geometry_.arena_bytes()), "entry-test"),
          geometry_));
};

void* stream(StreamId id) {
  return reinterpret_cast<void*>(id);
}

TEST_F(TorchEntry, TorchsCallsReachTheAllocatorOfTheDevice) {
  allocator_->lend(0);
  // As torch keeps them.
  const std::function<void*(std::size_t, int, void*)> alloc = windrow_torch_alloc;
  const std::function<void(void*, std::size_t, int, void*)> release = windrow_free;
  const std::function<void(void*, void*)> record = windrow_record_stream;
  void* const address = alloc(4 << 20, kDevice, stream(1));
  ASSERT_NE(address, nullptr);
  record(address, stream(2));
  streams_.launch(2);
  release(address, 4 << 20, kDevice, stream(1));
  EXPECT_EQ(allocator_->stats().active.all.current, 1) << "stream 2 still uses it";
  streams_.finish(2);
  windrow_empty_cache();
  EXPECT_EQ(allocator_->stats().active.all.current, 0);
  EXPECT_STREQ(windrow_last_error(), "");
}

TEST_F(TorchEntry, TorchGetsAnExceptionAndNeverANullPointer) {
  const std::function<void*(std::size_t, int, void*)> alloc = windrow_torch_alloc;
  EXPECT_THROW(alloc(1, kDevice, nullptr), std::runtime_error);
  EXPECT_THROW(alloc(1, 0, nullptr), std::runtime_error);
  EXPECT_THROW(alloc(1, kMostDevices, nullptr), std::out_of_range);
}

TEST_F(TorchEntry, CCallersGetNoExceptionButAText) {
  EXPECT_EQ(windrow_alloc(1, kDevice, nullptr), nullptr);
  EXPECT_NE(std::string(windrow_last_error()).find("the budget of 0 chunks"), std::string::npos);
  EXPECT_EQ(windrow_alloc(-1, kDevice, nullptr), nullptr);
  EXPECT_EQ(windrow_alloc(1, -1, nullptr), nullptr);
  EXPECT_NE(std::string(windrow_last_error()).find("device -1"), std::string::npos);
  int local = 0;
  windrow_free(&local, 4, kDevice, nullptr);
  EXPECT_NE(std::string(windrow_last_error()).find("no live allocation"), std::string::npos);
  windrow_record_stream(&local, nullptr);
  EXPECT_NE(std::string(windrow_last_error()).find("no allocator holds"), std::string::npos);
  windrow_free(nullptr, 0, kDevice, nullptr);
  EXPECT_STREQ(windrow_last_error(), "");
}

TEST_F(TorchEntry, TorchsPoolOfACaptureReachesTheAllocatorOfTheDevice) {
  allocator_->lend(0);
  using Pool = std::pair<unsigned long long, unsigned long long>;
  // As torch calls them.
  const std::function<void(int, Pool, std::function<bool(void*)>)> begin = windrow_begin_pool;
  const std::function<void(int, Pool)> end = windrow_end_pool;
  const std::function<void(int, Pool)> release = windrow_release_pool;
  const Pool pool{0, 3};
  begin(kDevice, pool, [](void* asked) { return asked == stream(1); });
  EXPECT_EQ(windrow_alloc(4096, kDevice, stream(1)), nullptr) << "nothing is backed yet";
  EXPECT_NE(std::string(windrow_last_error()).find("memory of graphs"), std::string::npos);
  end(kDevice, pool);
  ASSERT_TRUE(allocator_->back_pool(pool, 2 << 20));
  begin(kDevice, pool, [](void* asked) { return asked == stream(1); });
  void* const address = windrow_alloc(4096, kDevice, stream(1));
  ASSERT_NE(address, nullptr);
  EXPECT_EQ(windrow_alloc(4096, kDevice, stream(2)), nullptr) << "it does not capture";
  end(kDevice, pool);
  windrow_record_stream(address, stream(2));
  EXPECT_STREQ(windrow_last_error(), "");
  windrow_free(address, 4096, kDevice, stream(1));
  release(kDevice, pool);
  release(kDevice, pool);
  EXPECT_STREQ(windrow_last_error(), "");
  end(kDevice, pool);
  EXPECT_NE(std::string(windrow_last_error()).find("no capture of that pool"), std::string::npos);
}

}  // namespace
}  // namespace windrow
