#include "windrow/graph_pools.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "windrow/error.h"

namespace windrow {
namespace {

constexpr std::size_t kAlignment = 512;  // of torch's allocators
// Graphs ran on several streams: no stream may reuse their blocks before all have ended.
constexpr StreamId kNoStream = std::numeric_limits<StreamId>::max();

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

GraphPools::GraphPools(Driver& driver, std::shared_ptr<const ChunkMemory> memory,
                       StreamEpochs& epochs)
    : driver_(&driver),
      memory_(std::move(memory)),
      epochs_(&epochs),
      piece_blocks_(memory_->one_memory_a_chunk()
                        ? static_cast<std::size_t>(memory_->blocks_per_chunk())
                        : 1) {}

void GraphPools::open(GraphPoolId pool) {
  auto found = pools_.find(pool);
  if (found == pools_.end()) {
    const auto blocks = static_cast<std::size_t>(memory_->chunks() * memory_->blocks_per_chunk());
    found = pools_.emplace(pool, driver_->reserve(blocks * memory_->block_bytes())).first;
  }
  ++found->second.graphs;
}

void GraphPools::release(GraphPoolId pool) {
  --require(pool).graphs;
}

std::byte* GraphPools::take(GraphPoolId pool, std::size_t bytes) {
  Pool& from = require(pool);
  const std::size_t size = aligned(bytes);
  const std::size_t backed = from.generation == generation_ ? from.mapped_bytes : 0;
  const auto offset = from.free.take(size);
  if (offset && *offset + size > backed) {
    from.free.put(*offset, size);
  }
  if (!offset || *offset + size > backed) {
    throw BudgetError("out of memory: " + std::to_string(bytes) +
                      " bytes do not fit into the memory of graphs, of which " +
                      std::to_string(backed) + " bytes are backed");
  }
  from.most = std::max(from.most, *offset + size);
  from.live.emplace(*offset, bytes);
  return from.range->data() + *offset;
}

bool GraphPools::contains(const void* address) const {
  return std::ranges::any_of(pools_, [&](const auto& entry) {
    const Reservation& range = *entry.second.range;
    return std::less_equal<>{}(range.data(), address) &&
           std::less<>{}(address, range.data() + range.bytes());
  });
}

std::size_t GraphPools::requested(const std::byte* address) const {
  for (const auto& [id, pool] : pools_) {
    const auto offset = static_cast<std::size_t>(address - pool.range->data());
    if (const auto found = pool.live.find(offset); found != pool.live.end()) {
      return found->second;
    }
  }
  throw Error("no live allocation begins at that address; was it freed twice?");
}

std::size_t GraphPools::give(const std::byte* address) {
  Pool* const pool = around(address);
  const std::size_t bytes = requested(address);
  const auto offset = static_cast<std::size_t>(address - pool->range->data());
  pool->live.erase(offset);
  pool->free.put(offset, aligned(bytes));
  return bytes;
}

bool GraphPools::back(GraphPoolId pool, std::size_t bytes, ChunkBudget& budget) {
  Pool& of = require(pool);
  if (of.generation != generation_) {
    settle();
    if (!of.mapped.empty()) {
      return false;  // what was given back is still in use
    }
    of.generation = generation_;
  }
  const std::size_t pieces =
      (std::min(bytes, of.range->bytes()) + piece_bytes() - 1) / piece_bytes();
  const std::size_t held = blocks_.size() / piece_blocks_;
  static_cast<void>(epochs_->ended(epochs_->now() - 1));  // of what was waited for before
  if (pieces > held) {
    const std::vector<BlockId> taken = more(pieces - held, budget);
    if (taken.empty()) {
      return false;
    }
    blocks_.insert(blocks_.end(), taken.begin(), taken.end());
  }
  if (bytes > of.mapped_bytes) {
    map_rest(of);
  }
  return true;
}

void GraphPools::unback(ChunkBudget& budget) {
  if (blocks_.empty()) {
    return;
  }
  given_back_ = epochs_->now();
  budget.put(blocks_, {kNoStream, given_back_});
  blocks_.clear();
  ++generation_;
}

void GraphPools::settle() {
  const bool is_old = std::ranges::any_of(pools_, [&](const auto& entry) {
    return entry.second.generation != generation_ && !entry.second.mapped.empty();
  });
  // Unmapping under a running kernel is a fault.
  if (!is_old || !epochs_->ended(given_back_)) {
    return;
  }
  for (auto& [id, pool] : pools_) {
    if (pool.generation != generation_) {
      unmap(pool);
    }
  }
}

void GraphPools::clear() {
  settle();
  std::erase_if(pools_, [](const auto& entry) {
    return entry.second.graphs <= 0 && entry.second.live.empty() && entry.second.mapped.empty();
  });
}

std::size_t GraphPools::bytes_of(GraphPoolId pool) const {
  const auto found = pools_.find(pool);
  return found == pools_.end() ? 0 : found->second.most;
}

GraphPools::Pool& GraphPools::require(GraphPoolId pool) {
  const auto found = pools_.find(pool);
  if (found == pools_.end()) {
    throw Error("no capture has used that pool of graphs");
  }
  return found->second;
}

GraphPools::Pool* GraphPools::around(const void* address) {
  for (auto& [id, pool] : pools_) {
    if (std::less_equal<>{}(pool.range->data(), address) &&
        std::less<>{}(address, pool.range->data() + pool.range->bytes())) {
      return &pool;
    }
  }
  throw Error("no live allocation begins at that address; was it freed twice?");
}

// So many pieces, which are whole chunks where the driver maps those only: from the highest, which
// decode asks for last. All or none.
std::vector<BlockId> GraphPools::more(std::size_t pieces, ChunkBudget& budget) const {
  if (piece_blocks_ == 1) {
    return budget.take(static_cast<std::int64_t>(pieces), kNoStream);
  }
  std::vector<BlockId> taken;
  std::vector<BlockId> chunk(piece_blocks_);
  for (std::int64_t id = memory_->chunks() - 1; id >= 0 && taken.size() < pieces * piece_blocks_;
       --id) {
    std::iota(chunk.begin(), chunk.end(), id * memory_->blocks_per_chunk());
    if (budget.take_these(chunk, kNoStream)) {
      taken.insert(taken.end(), chunk.begin(), chunk.end());
    }
  }
  if (taken.size() < pieces * piece_blocks_ && !taken.empty()) {
    budget.put(taken, {kNoStream, 0});
    taken.clear();
  }
  return taken;
}

void GraphPools::unmap(Pool& pool) {
  while (!pool.mapped.empty()) {
    const std::size_t bytes = pool.mapped.back();
    // Forgotten when it is unmapped: should that fail, it is tried again.
    pool.range->unmap(pool.mapped_bytes - bytes, bytes);
    pool.mapped.pop_back();
    pool.mapped_bytes -= bytes;
    ++calls_.unmap;
  }
}

void GraphPools::map_rest(Pool& pool) {
  std::vector<Piece> pieces;
  for (std::size_t at = pool.mapped.size() * piece_blocks_; at < blocks_.size();
       at += piece_blocks_) {
    const BlockId block = blocks_[at];
    const Backing from =
        memory_->backing(block / memory_->blocks_per_chunk(), block % memory_->blocks_per_chunk());
    pieces.push_back({from.memory, from.offset, piece_bytes()});
  }
  pool.range->map_run(pool.mapped_bytes, pieces, Access::kReadWrite);
  for (const Piece& piece : pieces) {
    pool.mapped.push_back(piece.bytes);
    pool.mapped_bytes += piece.bytes;
    ++calls_.map;
  }
  ++calls_.access;
}

}  // namespace windrow
