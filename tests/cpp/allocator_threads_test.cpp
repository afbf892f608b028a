// torch frees on the threads of its backward pass: the allocator serves them all at once.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <random>
#include <semaphore>
#include <thread>

#include "windrow/device_allocator.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"

namespace windrow {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::int64_t kChunks = 6;
constexpr int kRounds = 1'500;

class AllocatorThreads : public ::testing::Test {
 protected:
  AllocatorThreads() {
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      allocator_.lend(chunk);
    }
  }

  Geometry geometry_{.layers = 2,
                     .kv_heads = 2,
                     .head_dim = 32,
                     .dtype_bytes = 4,
                     .block_bytes = 2 * kMiB,
                     .chunks = kChunks};
  std::shared_ptr<Memory> memory_ =
      host_driver().create(static_cast<std::size_t>(geometry_.arena_bytes()), "allocator-test");
  DeviceAllocator allocator_{host_driver(), host_streams(),
                             std::make_shared<ChunkMajorMemory>(memory_, geometry_)};
};

// Writes its mark at both ends of what it gets and finds it there when it frees it.
void use(DeviceAllocator& allocator, unsigned char mark, std::atomic<int>& spoilt) {
  std::mt19937 random(mark);
  struct Held {
    std::byte* at;
    std::size_t bytes;
  };
  std::vector<Held> held;
  const auto free_last = [&] {
    const auto [at, bytes] = held.back();
    held.pop_back();
    if (at[0] != std::byte{mark} || at[bytes - 1] != std::byte{mark}) {
      ++spoilt;
    }
    allocator.free(at);
  };
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t bytes = random() % 8 == 0 ? 2 * kMiB + random() % kMiB : 1 + random() % 9000;
    try {
      std::byte* const at = allocator.allocate(bytes, mark % 2);
      at[0] = at[bytes - 1] = std::byte{mark};
      held.push_back({at, bytes});
      allocator.record_stream(at, mark % 3);
    } catch (const BudgetError&) {  // the budget shrinks meanwhile
    }
    while (held.size() > random() % 6) {
      free_last();
    }
  }
  while (!held.empty()) {
    free_last();
  }
}

TEST_F(AllocatorThreads, ThreadsThatAllocateAndFreeWhileChunksComeAndGoShareNoByte) {
  std::atomic<int> spoilt = 0;
  std::atomic<bool> over = false;
  std::thread budget([&] {
    while (!over) {
      allocator_.shrink_to(kChunks / 2);
      for (const std::int64_t chunk : allocator_.take_quiet()) {
        allocator_.lend(chunk);
      }
      static_cast<void>(allocator_.stats());
      static_cast<void>(allocator_.describe_budget());
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> users;
  for (unsigned char mark = 1; mark <= 3; ++mark) {
    users.emplace_back([&, mark] { use(allocator_, mark, spoilt); });
  }
  for (auto& user : users) {
    user.join();
  }
  over = true;
  budget.join();
  EXPECT_EQ(spoilt, 0);
  EXPECT_GT(allocator_.stats().allocation.all.allocated, kRounds) << "most requests were honoured";
  EXPECT_EQ(allocator_.stats().allocation.all.current, 0);
  allocator_.check();
}

// Streams whose work ends when the test opens the gate, and that tell when somebody waits for it.
class GatedStreams final : public Streams {
 public:
  [[nodiscard]] std::unique_ptr<Event> record(StreamId /*stream*/) override {
    return std::make_unique<Gated>(*this);
  }
  void await_a_waiter() { waiters_.acquire(); }
  void open() {
    is_open_ = true;
    is_open_.notify_all();
  }

 private:
  class Gated final : public Event {
   public:
    explicit Gated(GatedStreams& streams) : streams_(&streams) {}
    [[nodiscard]] bool done() const override { return streams_->is_open_; }
    void wait() const override {
      streams_->waiters_.release();
      streams_->is_open_.wait(false);
    }

   private:
    GatedStreams* streams_;
  };

  std::atomic<bool> is_open_ = false;
  std::counting_semaphore<> waiters_{0};
};

TEST(AllocatorLock, NobodyHoldsItWhileItWaitsForTheDevice) {
  const Geometry geometry{.layers = 2,
                          .kv_heads = 2,
                          .head_dim = 32,
                          .dtype_bytes = 4,
                          .block_bytes = 2 * kMiB,
                          .chunks = 2};
  const std::shared_ptr<Memory> memory =
      host_driver().create(static_cast<std::size_t>(geometry.arena_bytes()), "allocator-test");
  for (const bool allocates : {true, false}) {
    GatedStreams streams;
    DeviceAllocator allocator(host_driver(), streams,
                              std::make_shared<ChunkMajorMemory>(memory, geometry));
    allocator.lend(0);
    allocator.lend(1);
    std::byte* const stays = allocator.allocate(4096, 1);
    allocator.free(allocator.allocate(14 * kMiB, 1));
    std::thread waiter([&] {
      if (allocates) {
        allocator.free(allocator.allocate(14 * kMiB, 2));  // the other stream is at work there
      } else {
        allocator.release_cached();
      }
    });
    streams.await_a_waiter();
    auto others = std::async(std::launch::async, [&] {
      allocator.free(allocator.allocate(4096, 1));
      allocator.free(stays);
      static_cast<void>(allocator.take_quiet());
      return allocator.stats().allocation.all.current;
    });
    const bool passed = others.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    streams.open();
    waiter.join();
    EXPECT_TRUE(passed) << "other threads were held up";
    EXPECT_EQ(others.get(), 0);
  }
}

}  // namespace
}  // namespace windrow
