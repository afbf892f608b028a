// The requests of a recorded LoRA iteration, with their lifetimes. Small ones: our pool, the whole
// device allocator (lock and statistics), and malloc, in turn. Large ones: the blocks that they
// take, where a little and where much is lent.
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>

#include "samples.h"
#include "windrow/device_allocator.h"
#include "windrow/host_driver.h"

namespace windrow::bench {
namespace {

constexpr int kReplays = 20;

struct Trace {
  std::vector<TraceStep> steps;  // of one size: small, or large
  std::size_t allocations = 0;
  std::size_t ids = 0;
};

Trace read(const std::string& file, bool is_small) {
  std::ifstream lines(file);
  Trace trace;
  std::vector<bool> counts;
  for (std::string line; std::getline(lines, line);) {
    const std::int64_t value = std::stoll(line);
    if (line[0] == '+') {
      counts.push_back(is_small == (value < static_cast<std::int64_t>(kPoolBlockBytes)));
      if (counts.back()) {
        trace.steps.push_back({std::ssize(counts) - 1, value});
        ++trace.allocations;
      }
    } else if (counts.at(static_cast<std::size_t>(-value))) {
      trace.steps.push_back({-value, 0});
    }
  }
  trace.ids = counts.size();
  if (trace.allocations == 0) {
    throw std::runtime_error("nothing of that size in " + file);
  }
  return trace;
}

// Nanoseconds of an allocation together with its end.
template <class Allocate, class Free>
double replay(const Trace& trace, std::vector<void*>& places, Allocate allocate, Free release) {
  const std::int64_t began = monotonic_ns();
  for (const TraceStep& step : trace.steps) {
    void*& place = places[static_cast<std::size_t>(step.id)];
    if (step.bytes > 0) {
      place = allocate(static_cast<std::size_t>(step.bytes));
    } else {
      release(place);
      place = nullptr;
    }
  }
  const auto took = static_cast<double>(monotonic_ns() - began);
  for (void*& place : places) {
    if (place != nullptr) {
      release(place);
      place = nullptr;
    }
  }
  return took / static_cast<double>(trace.allocations);
}

// Addresses without memory.
class Numbers final : public BlockSource {
 public:
  [[nodiscard]] static std::byte* base() { return reinterpret_cast<std::byte*>(kPoolBlockBytes); }
  [[nodiscard]] std::byte* take_block() override {
    if (returned_.empty()) {
      return base() + taken_++ * kPoolBlockBytes;
    }
    std::byte* const block = returned_.back();
    returned_.pop_back();
    return block;
  }
  void return_block(std::byte* block) noexcept override { returned_.push_back(block); }

 private:
  std::size_t taken_ = 0;
  std::vector<std::byte*> returned_;
};

// Finds and returns the blocks of large tensors, side by side, of so much that is lent.
class Lent {
 public:
  Lent(std::int64_t chunks, std::size_t ids)
      : budget_(chunks, kBlocksPerChunk, epochs_), held_(ids) {
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      budget_.lend(chunk);
    }
  }

  // Nanoseconds of a tensor, taken and put.
  [[nodiscard]] double replay(const Trace& trace) {
    const std::int64_t began = monotonic_ns();
    for (const TraceStep& step : trace.steps) {
      auto& blocks = held_[static_cast<std::size_t>(step.id)];
      if (step.bytes > 0) {
        const auto size = static_cast<std::int64_t>(kPoolBlockBytes);
        blocks = budget_.take_side_by_side((step.bytes + size - 1) / size, 0);
        if (blocks.empty()) {
          throw std::runtime_error("the iteration needs more than is lent");
        }
      } else {
        budget_.put(blocks, {0, epochs_.now()});
        blocks.clear();
      }
    }
    const auto took = static_cast<double>(monotonic_ns() - began);
    for (auto& blocks : held_) {
      if (!blocks.empty()) {
        budget_.put(blocks, {0, epochs_.now()});
        blocks.clear();
      }
    }
    return took / static_cast<double>(trace.allocations);
  }

 private:
  static constexpr std::int64_t kBlocksPerChunk = 64;

  StreamEpochs epochs_{host_streams()};
  ChunkBudget budget_;
  std::vector<std::vector<BlockId>> held_;
};

std::byte* bytes(void* place) {
  return static_cast<std::byte*>(place);
}

}  // namespace

void measure_pool(const std::string& trace_file, int repeats) {
  const Trace trace = read(trace_file, true);
  std::vector<void*> places(trace.ids);
  const std::size_t blocks = sized_for(trace.steps);

  Numbers numbers;
  SmallPool pool(numbers, Numbers::base());
  pool.keep(blocks);

  const Geometry geometry{.layers = 32,
                          .kv_heads = 8,
                          .head_dim = 128,
                          .dtype_bytes = 2,
                          .block_bytes = kPoolBlockBytes,
                          .chunks = static_cast<std::int64_t>(blocks / 64 + 1)};
  DeviceAllocator allocator(
      host_driver(), host_streams(),
      std::make_shared<ChunkMajorMemory>(
          host_driver().create(static_cast<std::size_t>(geometry.arena_bytes()), "bench"),
          geometry));
  for (std::int64_t chunk = 0; chunk < geometry.chunks; ++chunk) {
    allocator.lend(chunk);
  }
  allocator.keep_small(blocks, 0);

  Figure ours("small pool, allocate and free");
  Figure whole("device allocator, allocate and free");
  Figure theirs("malloc and free");
  for (int repeat = -kWarmUps; repeat < repeats; ++repeat) {
    std::vector<double> pool_times;
    std::vector<double> allocator_times;
    std::vector<double> malloc_times;
    for (int i = 0; i < kReplays; ++i) {
      pool_times.push_back(replay(
          trace, places, [&](std::size_t n) { return pool.allocate(n); },
          [&](void* place) { pool.free(bytes(place)); }));
      allocator_times.push_back(replay(
          trace, places, [&](std::size_t n) { return allocator.allocate(n, 0); },
          [&](void* place) { allocator.free(bytes(place)); }));
      malloc_times.push_back(replay(
          trace, places, [](std::size_t n) { return std::malloc(n); },
          [](void* place) { std::free(place); }));
    }
    if (repeat >= 0) {
      ours.add(quantile(pool_times, 0.5));
      whole.add(quantile(allocator_times, 0.5));
      theirs.add(quantile(malloc_times, 0.5));
    }
  }
  ours.print();
  whole.print();
  theirs.print();
}

void measure_large_tensors(const std::string& trace_file, int repeats) {
  const Trace trace = read(trace_file, false);
  // Chunks of 128 MiB, as a Llama 3 8B has them: 6 and 48 GiB.
  Lent little(48, trace.ids);
  Lent much(384, trace.ids);
  Figure of_little("blocks of a large tensor, 6 GiB lent");
  Figure of_much("blocks of a large tensor, 48 GiB lent");
  for (int repeat = -kWarmUps; repeat < repeats; ++repeat) {
    const double in_little = little.replay(trace);
    const double in_much = much.replay(trace);
    if (repeat >= 0) {
      of_little.add(in_little);
      of_much.add(in_much);
    }
  }
  of_little.print();
  of_much.print();
}

}  // namespace windrow::bench
