#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "windrow/address_ranges.h"
#include "windrow/chunk_budget.h"
#include "windrow/chunk_homes.h"
#include "windrow/chunk_memory.h"
#include "windrow/driver.h"

namespace windrow {

// Blocks at consecutive addresses: one alias of each, beside decode's own mapping.
struct Alias {
  std::byte* address = nullptr;
  std::vector<BlockId> blocks;
  StreamEpochs::Epoch idle_since = 0;  // unmapped only when that has ended
};

// Maps blocks to consecutive addresses, and keeps what it has mapped.
//
// On a GPU mapping a block costs about 40 us and unmapping it 26 (kvcached, on an A100), so an
// alias that is not used any more stays mapped, also while its chunks are given back: the worker
// must not touch them then, but when the same blocks are to be had again, the alias serves without
// a call. Aliases that idle longest are unmapped when their number or the addresses run out.
//
// Where a chunk is one memory, consecutive blocks are in its home (ChunkHomes) and cost no call
// beside the one that mapped the chunk; whole chunks that are not neighbours are mapped side by
// side. Thread: one at a time.
class AliasCache {
 public:
  // Reserves addresses, several times those of all chunks. `epochs` outlives it. Throws Error.
  AliasCache(Driver& driver, std::shared_ptr<const ChunkMemory> memory, StreamEpochs& epochs);
  AliasCache(const AliasCache&) = delete;
  AliasCache& operator=(const AliasCache&) = delete;
  // Unmaps everything: nothing runs any more that uses it.
  ~AliasCache() = default;

  [[nodiscard]] std::byte* base() const { return range_->data(); }
  [[nodiscard]] bool contains(const void* address) const {
    return std::less_equal<>{}(base(), address) && std::less<>{}(address, base() + range_->bytes());
  }

  // An idle alias of so many blocks all of which `budget` gives for use on `stream` (and takes), or
  // nullptr. Newest first; looks at a few only.
  [[nodiscard]] std::unique_ptr<Alias> reuse(std::size_t blocks, ChunkBudget& budget,
                                             StreamId stream);
  // nullptr where addresses are to be had only when what runs now has ended. Throws Error; nothing
  // is mapped then. Where a chunk is one memory, the blocks are consecutive, or chunk after chunk
  // from its first block on (ChunkBudget::take_side_by_side).
  [[nodiscard]] std::unique_ptr<Alias> map(std::vector<BlockId> blocks);
  // It is freed in this epoch.
  void idle(std::unique_ptr<Alias> alias);
  // Unmaps every idle alias, and every home that nobody holds, that nothing uses any more. Throws
  // Error.
  void clear();

  [[nodiscard]] const MappingCalls& calls() const { return calls_; }

 private:
  using Idle = std::list<std::unique_ptr<Alias>>;

  [[nodiscard]] std::size_t address_bytes(const std::vector<BlockId>& blocks) const;
  [[nodiscard]] bool at_home(const std::vector<BlockId>& blocks) const;
  [[nodiscard]] std::optional<std::size_t> find_addresses(std::size_t bytes);
  [[nodiscard]] Backing backing(BlockId block) const;
  // How many of the blocks from `begin` on are side by side in one memory.
  [[nodiscard]] std::size_t run_length(const std::vector<BlockId>& blocks, std::size_t begin) const;
  [[nodiscard]] std::vector<Piece> pieces_of(const std::vector<BlockId>& blocks) const;
  // False where it may still be in use, or there is none.
  [[nodiscard]] bool drop_oldest();

  Driver* driver_;
  std::shared_ptr<const ChunkMemory> memory_;
  StreamEpochs* epochs_;
  std::unique_ptr<Reservation> range_;
  std::optional<ChunkHomes> homes_;  // where a chunk is one memory; at the start of the range
  AddressRanges addresses_;
  Idle idle_;                                                   // oldest first
  std::map<std::size_t, std::vector<Idle::iterator>> by_size_;  // blocks -> oldest first
  std::size_t idle_blocks_ = 0;
  MappingCalls calls_;
};

}  // namespace windrow
