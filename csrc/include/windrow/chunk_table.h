#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "windrow/seqlock.h"
#include "windrow/shared_word.h"
#include "windrow/transitions.h"

namespace windrow {

// One chunk's word, unpacked. `epoch` grows with every transition (and wraps), so a
// compare-and-swap never mistakes a chunk that came back to the same state for one that never left
// it.
struct ChunkWord {
  ChunkState state = ChunkState::kFree;
  std::uint32_t owner = 0;  // borrower's job epoch while LENT or DRAINING, else 0
  std::uint32_t epoch = 0;

  // Bits 0-3 state, 4-31 owner, 32-63 epoch.
  [[nodiscard]] std::uint64_t pack() const;
  [[nodiscard]] static ChunkWord unpack(std::uint64_t word);
  bool operator==(const ChunkWord&) const = default;
};
inline constexpr std::int64_t kMostOwner = (1 << 28) - 1;

struct ChunkInfo {
  ChunkWord word;
  std::int64_t since_ns = 0;
};

using Counts = std::array<std::int64_t, kChunkStates>;

// One process's view of the table of owners in shared memory; transitions.h says what may become
// of a chunk by whose hand. It does not own the memory.
//
// Thread: one at a time for each instance; instances of other processes work at the same time. No
// call blocks, makes a system call or, save those that return a vector, allocates.
// Errors: an illegal transition is an OwnershipError; ids outside the table throw
// std::out_of_range; negative amounts and owners that are not a job epoch, std::invalid_argument.
// What throws has changed nothing. Death: the peer may die at any instruction. What it borrowed
// stays LENT or DRAINING until the owner calls reclaim with its epoch, and the owner must know the
// process to be dead by then: a swap fences the table, not stray writes. `since_ns` is written
// after the swap, so display may show an old time for an instant, or until the next transition if
// its writer died between. Trust: the peer can write garbage here. No call of the owner crashes,
// hangs or names a chunk that is none because of it; check() finds it.
//
// Two peers may give back at once and overfill the reserve by one each; the owner's next
// set_reserve or lend moves the surplus to FREE.
class ChunkTable {
 public:
  // Bytes that a table of that many chunks takes.
  [[nodiscard]] static std::size_t bytes(std::int64_t chunks);
  // Makes an all-FREE table in zeroed memory and fills its reserve.
  static void format(void* memory, std::int64_t chunks, std::int64_t reserve);

  ChunkTable(void* memory, std::int64_t chunks, Side side);

  [[nodiscard]] std::int64_t chunks() const { return chunks_; }
  [[nodiscard]] Counts counts() const;
  [[nodiscard]] ChunkInfo chunk(std::int64_t chunk) const;
  [[nodiscard]] std::vector<std::uint8_t> states() const;

  // Owner. Throw OwnershipError on the peer's side.
  std::int64_t take_kv();  // -1: none
  void return_kv(std::int64_t chunk);
  std::int64_t set_reserve(std::int64_t chunks);
  std::vector<std::int64_t> lend(std::int64_t chunks, std::int64_t owner);
  std::vector<std::int64_t> revoke(std::int64_t chunks);
  std::int64_t reclaim(std::int64_t owner);
  // The same by id, for ranks that have agreed on which chunk moves. What is not FREE (or RESERVED,
  // for KV) throws OwnershipError.
  void take_kv_chunk(std::int64_t chunk);
  void lend_chunk(std::int64_t chunk, std::int64_t owner);
  bool revoke_chunk(std::int64_t chunk);  // false: it is not LENT, so nobody has to give it back

  // Peer.
  [[nodiscard]] std::vector<std::int64_t> held_in(ChunkState state, std::int64_t owner) const;
  void give_back(std::int64_t chunk, std::int64_t owner);

  // The one step that all others are made of: a compare-and-swap of the chunk's word from what was
  // seen. False: it has changed meanwhile. `owner` is the borrower of a chunk that becomes LENT.
  bool move(std::int64_t chunk, const ChunkWord& seen, ChunkState to, std::int64_t owner = 0);

  // Throws Error with the first broken invariant: a word that no transition can make.
  void check() const;

 private:
  // The head of the table; the words follow on their own cache lines, then the times.
  struct Head {
    alignas(kCacheLine) SharedWord<std::int64_t> reserve_target;
    alignas(kCacheLine) SharedWord<std::uint64_t> homed;  // counts those to FREE and RESERVED
  };
  static_assert(sizeof(Head) == 2 * kCacheLine && std::is_trivial_v<Head>);

  // Below `from` no chunk had the state when `homed` had the value `seen`.
  struct Hint {
    std::int64_t from = 0;
    std::uint64_t seen = 0;
  };

  [[nodiscard]] ChunkWord load(std::int64_t chunk) const;
  bool swap(std::int64_t chunk, const ChunkWord& seen, ChunkState to, std::uint32_t owner);
  [[nodiscard]] std::int64_t count(ChunkState state) const;
  [[nodiscard]] std::int64_t reserve_target() const;
  [[nodiscard]] ChunkState destination() const;
  std::int64_t take_first(ChunkState state, Hint& hint);
  void balance_reserve();
  void require_owner(const char* call) const;
  void require_id(std::int64_t chunk) const;

  Head* head_;
  SharedWord<std::uint64_t>* words_;
  SharedWord<std::int64_t>* since_ns_;
  std::int64_t chunks_;
  Side side_;
  Hint free_;  // owner only, as is the next
  Hint reserved_;
};

}  // namespace windrow
