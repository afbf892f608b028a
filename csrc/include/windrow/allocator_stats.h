#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace windrow {

// One figure over time, as torch.cuda.memory_stats has it.
struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;  // all increases
  std::int64_t freed = 0;      // all decreases

  void add(std::int64_t change) {
    current += change;
    peak = std::max(peak, current);
    (change > 0 ? allocated : freed) += std::abs(change);
  }
};

// A figure of the whole allocator and of its two pools.
struct PooledStat {
  Stat all;
  Stat large;
  Stat small;

  void add(bool is_small, std::int64_t change) {
    if (change != 0) {
      all.add(change);
      (is_small ? small : large).add(change);
    }
  }
};

// What an allocator counts: plain data, which its allocator changes under its lock and hands out as
// copies. Bytes: requested <= allocated <= active <= reserved, save that a large
// tensor is allocated in whole blocks.
struct AllocatorStats {
  PooledStat allocation;       // live allocations
  PooledStat requested_bytes;  // of them, as asked for
  PooledStat allocated_bytes;  // of them, as rounded
  PooledStat active;           // live, or freed while a recorded stream still uses them
  PooledStat active_bytes;
  PooledStat segment;         // aliases in use: large tensors, and blocks of small pools
  PooledStat reserved_bytes;  // of them
  std::int64_t alloc_retries = 0;
  std::int64_t ooms = 0;
  std::int64_t sync_all_streams = 0;

  // Held minus requested: what rounding and the pools' empty parts cost now.
  [[nodiscard]] std::int64_t fragmentation_bytes() const {
    return reserved_bytes.all.current - requested_bytes.all.current;
  }
};

using NamedFigures = std::vector<std::pair<std::string, std::int64_t>>;

// Under the names of torch.cuda.memory_stats. What torch calls inactive_split is the part of the
// pools' blocks that no allocation uses.
[[nodiscard]] NamedFigures named(const AllocatorStats& stats);

}  // namespace windrow
