#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "windrow/seqlock.h"

namespace windrow {

enum class ChunkState : std::uint8_t {
  kFree = 0,
  kKv = 1,
  kLent = 2,
  kReserved = 3,
  kDraining = 4
};
inline constexpr std::size_t kChunkStates = 5;
[[nodiscard]] std::string_view name_of(ChunkState state);

// Who acts: the owner is decode, the peer is the worker that borrows.
enum class Side : std::uint8_t { kOwner, kPeer };

// The written table of legal transitions.
//
//   from      to        who          call               meaning
//   FREE      KV        owner        take_kv            decode stores tokens here
//   RESERVED  KV        owner        take_kv            ... when nothing is FREE
//   KV        RESERVED  owner        return_kv          while the reserve is short
//   KV        FREE      owner        return_kv
//   FREE      RESERVED  owner        set_reserve, lend  the reserve fills before anything is lent
//   RESERVED  FREE      owner        set_reserve        the reserve is larger than asked
//   FREE      LENT      owner        lend               the worker may use it
//   LENT      DRAINING  owner        revoke             the worker shall give it back
//   LENT      RESERVED  peer, owner  give_back, reclaim while the reserve is short
//   LENT      FREE      peer, owner  give_back, reclaim
//   DRAINING  RESERVED  peer, owner  give_back, reclaim while the reserve is short
//   DRAINING  FREE      peer, owner  give_back, reclaim
//
// All else is an OwnershipError and changes nothing. Each transition is one compare-and-swap of
// one word, so there is no moment in which a death leaves the table wrong:
//   - owner dies: decode is gone and its arena with it; a borrower keeps a valid mapping until it
//     unmaps, and sees the heartbeat stop and the socket close.
//   - peer dies holding LENT or DRAINING chunks: they stay so until the owner calls reclaim with
//     the dead borrower's epoch. It must know the process to be dead: a swap fences the table, not
//     stray writes.
//   - peer dies between its swap and the note that something became FREE: take_kv looks over the
//     whole table before it says "none", so the note is a hint only.
//   - `since_ns` is written after the swap: display may show an old time for an instant, or for
//   ever
//     if its writer died there.
// Two processes may give back at once and overfill the reserve by one each; the owner's next
// set_reserve or lend moves the surplus to FREE.
[[nodiscard]] constexpr bool is_legal(ChunkState from, ChunkState to, Side side) {
  using enum ChunkState;
  const bool returned = to == kFree || to == kReserved;
  if (from == kLent || from == kDraining) {
    return returned || (from == kLent && to == kDraining && side == Side::kOwner);
  }
  if (side == Side::kPeer) {
    return false;
  }
  switch (from) {
    case kFree:
      return to == kKv || to == kReserved || to == kLent;
    case kReserved:
      return to == kKv || to == kFree;
    case kKv:
      return returned;
    default:
      return false;
  }
}

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

// One process's view of the table in shared memory. It does not own the memory. One thread at a
// time for each instance; instances of other processes work at the same time. No call blocks, makes
// a system call or, save those that return a vector, allocates. Ids outside the table throw
// std::out_of_range; negative amounts and owners that are no job epoch, std::invalid_argument.
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

  // Peer.
  [[nodiscard]] std::vector<std::int64_t> held_in(ChunkState state, std::int64_t owner) const;
  void give_back(std::int64_t chunk, std::int64_t owner);

  // Throws Error with the first broken invariant: a word that no transition can make.
  void check() const;

 private:
  // The head of the table; the words follow on their own cache lines, then the times.
  struct Head {
    alignas(kCacheLine) std::atomic<std::int64_t> reserve_target;
    alignas(kCacheLine) std::atomic<std::uint64_t> freed;  // counts transitions to FREE
  };
  static_assert(sizeof(Head) == 2 * kCacheLine);

  [[nodiscard]] ChunkWord load(std::int64_t chunk) const;
  bool swap(std::int64_t chunk, const ChunkWord& seen, ChunkState to, std::uint32_t owner);
  void put_back(std::int64_t chunk, ChunkWord seen);
  [[nodiscard]] std::int64_t count(ChunkState state) const;
  [[nodiscard]] ChunkState destination() const;
  [[nodiscard]] std::int64_t find_first(ChunkState state, std::int64_t from) const;
  std::int64_t take_first(ChunkState state, std::int64_t from);
  void balance_reserve();
  void require_owner(const char* call) const;
  void require_id(std::int64_t chunk) const;

  Head* head_;
  std::atomic<std::uint64_t>* words_;
  std::atomic<std::int64_t>* since_ns_;
  std::int64_t chunks_;
  Side side_;
  // Owner only: below this id nothing was FREE when `freed` had this value.
  std::int64_t lowest_free_hint_ = 0;
  std::uint64_t freed_seen_ = 0;
};

}  // namespace windrow
