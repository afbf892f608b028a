#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "windrow/address_ranges.h"
#include "windrow/chunk_budget.h"
#include "windrow/chunk_memory.h"
#include "windrow/driver.h"

namespace windrow {

// As torch names the pool of a capture (c10's MempoolId_t).
using GraphPoolId = std::pair<unsigned long long, unsigned long long>;

// Memory of CUDA graphs: addresses that stay, and lent blocks behind them that come and go.
//
// What a capture allocates gets addresses of its pool, each a range of its own, and a capture takes
// no call of the driver. Nobody else gets those addresses as long as graphs of the pool live; what
// is freed in a pool serves later captures of the same pool alone, whose graphs are launched in the
// order of their captures.
//
// Graphs of two pools never run at the same time (shares of SMs, lengths of rows: a worker has one
// group on its way), so all pools are mapped over the same blocks: graphs for four shares take the
// memory of one. When blocks are given back, their mappings go as soon as nothing runs; later
// others are mapped at the same addresses, and every graph is good again.
//
// Thread: one at a time. Errors: Error where the driver refuses; then nothing has changed.
class GraphPools {
 public:
  // All outlive it. Reserves nothing yet.
  GraphPools(Driver& driver, std::shared_ptr<const ChunkMemory> memory, StreamEpochs& epochs);

  // A capture begins, or one more graph of the pool lives; its first call reserves addresses.
  void open(GraphPoolId pool);
  // One graph fewer. The addresses of a pool without graphs go with clear(), once all in it is
  // freed.
  void release(GraphPoolId pool);
  // So many bytes of the pool, aligned to 512. Throws BudgetError where no memory is behind them.
  [[nodiscard]] std::byte* take(GraphPoolId pool, std::size_t bytes);
  // Whether the address is one of a pool's, used or not.
  [[nodiscard]] bool contains(const void* address) const;
  // Throws Error where no live allocation begins there; returns its bytes.
  std::size_t give(const std::byte* address);
  [[nodiscard]] std::size_t requested(const std::byte* address) const;

  // Puts memory behind the first `bytes` of a pool, of what `budget` gives. False: that is too
  // little, or old mappings are still in use; nothing has changed then.
  [[nodiscard]] bool back(GraphPoolId pool, std::size_t bytes, ChunkBudget& budget);
  // Gives every block back. No graph may be launched until back() says true again.
  void unback(ChunkBudget& budget);
  // Unmaps what was given back and nothing uses any more. Never waits.
  void settle();
  // The same, and ends pools that have no graph.
  void clear();

  // Bytes from the beginning of the pool that its graphs may use, the most so far; 0 where it is
  // none.
  [[nodiscard]] std::size_t bytes_of(GraphPoolId pool) const;
  // Blocks that are held now.
  [[nodiscard]] const std::vector<BlockId>& blocks() const { return blocks_; }
  [[nodiscard]] const MappingCalls& calls() const { return calls_; }

 private:
  struct Pool {
    Pool(std::unique_ptr<Reservation> its_range)
        : range(std::move(its_range)), free(range->bytes()) {}

    std::unique_ptr<Reservation> range;
    AddressRanges free;
    std::map<std::size_t, std::size_t> live;  // offset -> bytes as asked for
    std::size_t most = 0;                     // bytes from the beginning, the most so far
    std::vector<std::size_t> mapped;          // of each piece from the beginning, its bytes
    std::size_t mapped_bytes = 0;
    std::uint64_t generation = 0;  // of the blocks that are mapped
    int graphs = 0;
  };

  [[nodiscard]] Pool& require(GraphPoolId pool);
  [[nodiscard]] Pool* around(const void* address);
  [[nodiscard]] std::size_t piece_bytes() const { return piece_blocks_ * memory_->block_bytes(); }
  [[nodiscard]] std::vector<BlockId> more(std::size_t pieces, ChunkBudget& budget) const;
  void unmap(Pool& pool);
  void map_rest(Pool& pool);

  Driver* driver_;
  std::shared_ptr<const ChunkMemory> memory_;
  StreamEpochs* epochs_;
  std::size_t piece_blocks_;  // that are mapped by one call
  std::map<GraphPoolId, Pool> pools_;
  std::vector<BlockId> blocks_;
  std::uint64_t generation_ = 1;        // of `blocks_`: another one after unback()
  StreamEpochs::Epoch given_back_ = 0;  // in which the last unback() was
  MappingCalls calls_;
};

}  // namespace windrow
