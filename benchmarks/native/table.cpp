// What KV and lending cost: one chunk, on a table of 512 (64 GiB of an 8B model's KV).
#include <cstdlib>
#include <cstring>
#include <memory>

#include "samples.h"
#include "system_calls.h"
#include "windrow/chunk_table.h"
#include "windrow/device_allocator.h"
#include "windrow/host_driver.h"

namespace windrow::bench {
namespace {

constexpr std::int64_t kChunks = 512;
constexpr std::int64_t kReserve = 7;
constexpr std::int64_t kWorker = 7;
constexpr std::size_t kCalls = 2'000;

// 64 blocks of 2 MiB a chunk, none of which is ever mapped.
class NoMemory final : public ChunkMemory {
 public:
  [[nodiscard]] std::int64_t chunks() const override { return kChunks; }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return 64; }
  [[nodiscard]] std::size_t block_bytes() const override { return kPoolBlockBytes; }
  [[nodiscard]] Backing backing(std::int64_t /*chunk*/, std::int64_t /*block*/) const override {
    std::abort();
  }
};

struct SharedTable {
  void* memory = std::aligned_alloc(kCacheLine, (ChunkTable::bytes(kChunks) + 63) / 64 * 64);
  SharedTable() {
    std::memset(memory, 0, ChunkTable::bytes(kChunks));
    ChunkTable::format(memory, kChunks, kReserve);
  }
  ~SharedTable() { std::free(memory); }
};

}  // namespace

void measure_table(int repeats) {
  const SharedTable shared;
  ChunkTable decode(shared.memory, kChunks, Side::kOwner);
  ChunkTable worker(shared.memory, kChunks, Side::kPeer);
  DeviceAllocator allocator(host_driver(), host_streams(), std::make_shared<NoMemory>());

  Figure lending("lend a chunk of 64 blocks, both sides");
  Figure returning("return a chunk of 64 blocks, both sides");
  const auto lend = [&] {
    decode.lend(1, kWorker);
    for (const auto chunk : worker.held_in(ChunkState::kLent, kWorker)) {
      allocator.lend(chunk);
    }
  };
  const auto give_back = [&] {
    decode.revoke(1);
    for (const auto chunk : worker.held_in(ChunkState::kDraining, kWorker)) {
      allocator.drain(chunk);
    }
    for (const auto chunk : allocator.take_quiet()) {
      worker.give_back(chunk, kWorker);
    }
  };
  Figure taking("take a KV chunk from the reserve, p99");
  for (int repeat = -kWarmUps; repeat < repeats; ++repeat) {
    std::vector<double> lends;
    std::vector<double> returns;
    for (std::size_t i = 0; i < kCalls; ++i) {
      lends.push_back(time_each(1, lend)[0]);
      returns.push_back(time_each(1, give_back)[0]);
    }
    if (repeat >= 0) {
      lending.add(quantile(lends, 0.5));
      returning.add(quantile(returns, 0.5));
    }
  }
  std::vector<std::int64_t> kv;
  while (decode.counts()[0] > 0) {
    kv.push_back(decode.take_kv());
  }
  for (int repeat = -kWarmUps; repeat < repeats; ++repeat) {
    std::vector<double> takes;
    for (std::size_t i = 0; i < kCalls; ++i) {
      std::int64_t chunk = -1;
      takes.push_back(time_each(1, [&] { chunk = decode.take_kv(); })[0]);
      decode.return_kv(chunk);  // to the reserve again, which is short of it
    }
    if (repeat >= 0) {
      taking.add(quantile(takes, 0.99));
    }
  }
  for (const auto chunk : kv) {
    decode.return_kv(chunk);
  }
  taking.print();
  lending.print();
  returning.print();
  const auto calls = system_calls([&] {
    for (std::size_t i = 0; i < kCalls; ++i) {
      lend();
      give_back();
    }
  });
  if (calls) {
    Figure counted("system calls of 2,000 loans and returns");
    counted.add(static_cast<double>(*calls));
    counted.print();
  }
}

}  // namespace windrow::bench
