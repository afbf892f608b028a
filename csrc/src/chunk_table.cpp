#include "windrow/chunk_table.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "windrow/clock.h"
#include "windrow/error.h"

namespace windrow {
namespace {

std::size_t words_bytes(std::int64_t chunks) {
  const std::size_t bytes = static_cast<std::size_t>(chunks) * sizeof(std::uint64_t);
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

std::uint32_t require_borrower(std::int64_t owner) {
  if (owner < 1 || owner > kMostOwner) {
    throw std::invalid_argument("owner is " + std::to_string(owner) +
                                "; a borrower is its job epoch, 1 to " +
                                std::to_string(kMostOwner));
  }
  return static_cast<std::uint32_t>(owner);
}

void require_amount(std::int64_t chunks) {
  if (chunks < 0) {
    throw std::invalid_argument("the number of chunks is " + std::to_string(chunks) +
                                "; it cannot be negative");
  }
}

bool is_borrowed(ChunkState state) {
  return state == ChunkState::kLent || state == ChunkState::kDraining;
}

std::string describe(std::int64_t chunk, const ChunkWord& word) {
  std::string text = "chunk " + std::to_string(chunk) + " is " + std::string(name_of(word.state));
  if (word.owner != 0) {
    text += " to " + std::to_string(word.owner);
  }
  return text;
}

}  // namespace

std::uint64_t ChunkWord::pack() const {
  return static_cast<std::uint64_t>(state) | static_cast<std::uint64_t>(owner) << 4 |
         static_cast<std::uint64_t>(epoch) << 32;
}

ChunkWord ChunkWord::unpack(std::uint64_t word) {
  return {.state = static_cast<ChunkState>(word & 0xF),
          .owner = static_cast<std::uint32_t>(word >> 4 & kMostOwner),
          .epoch = static_cast<std::uint32_t>(word >> 32)};
}

std::size_t ChunkTable::bytes(std::int64_t chunks) {
  return sizeof(Head) + words_bytes(chunks) +
         static_cast<std::size_t>(chunks) * sizeof(std::int64_t);
}

void ChunkTable::format(void* memory, std::int64_t chunks, std::int64_t reserve) {
  ChunkTable table(memory, chunks, Side::kOwner);
  const std::int64_t now = monotonic_ns();
  for (std::int64_t i = 0; i < chunks; ++i) {
    table.since_ns_[i].store(now, std::memory_order_relaxed);
  }
  table.set_reserve(reserve);
}

ChunkTable::ChunkTable(void* memory, std::int64_t chunks, Side side)
    : head_(static_cast<Head*>(memory)), chunks_(chunks), side_(side) {
  auto* base = static_cast<std::byte*>(memory);
  words_ = reinterpret_cast<SharedWord<std::uint64_t>*>(base + sizeof(Head));
  since_ns_ =
      reinterpret_cast<SharedWord<std::int64_t>*>(base + sizeof(Head) + words_bytes(chunks));
}

Counts ChunkTable::counts() const {
  Counts counts{};
  for (std::int64_t i = 0; i < chunks_; ++i) {
    const auto state = static_cast<std::size_t>(load(i).state);
    if (state < counts.size()) {
      ++counts[state];
    }
  }
  return counts;
}

ChunkInfo ChunkTable::chunk(std::int64_t chunk) const {
  require_id(chunk);
  return {load(chunk), since_ns_[chunk].load(std::memory_order_relaxed)};
}

std::vector<std::uint8_t> ChunkTable::states() const {
  std::vector<std::uint8_t> states(static_cast<std::size_t>(chunks_));
  for (std::int64_t i = 0; i < chunks_; ++i) {
    states[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(load(i).state);
  }
  return states;
}

std::int64_t ChunkTable::take_kv() {
  require_owner("take_kv");
  std::int64_t chunk = take_first(ChunkState::kFree, free_);
  if (chunk < 0) {
    chunk = take_first(ChunkState::kReserved, reserved_);
  }
  if (chunk < 0) {
    // A peer may have died between its swap and its count: look at all of them before saying none.
    free_ = reserved_ = {};
    chunk = take_first(ChunkState::kFree, free_);
  }
  return chunk < 0 ? take_first(ChunkState::kReserved, reserved_) : chunk;
}

void ChunkTable::return_kv(std::int64_t chunk) {
  require_owner("return_kv");
  require_id(chunk);
  const ChunkWord seen = load(chunk);
  if (seen.state != ChunkState::kKv) {
    throw OwnershipError(describe(chunk, seen) + ", not KV; was it returned twice?");
  }
  if (!swap(chunk, seen, destination(), 0)) {
    throw OwnershipError(describe(chunk, load(chunk)) + " and was KV a moment ago; two threads?");
  }
}

std::int64_t ChunkTable::set_reserve(std::int64_t chunks) {
  require_owner("set_reserve");
  require_amount(chunks);
  if (chunks > chunks_) {
    throw std::invalid_argument("a reserve of " + std::to_string(chunks) +
                                " is more than the arena's " + std::to_string(chunks_) + " chunks");
  }
  head_->reserve_target.store(chunks, std::memory_order_release);
  balance_reserve();
  return count(ChunkState::kReserved);
}

std::vector<std::int64_t> ChunkTable::lend(std::int64_t chunks, std::int64_t owner) {
  require_owner("lend");
  require_amount(chunks);
  const std::uint32_t borrower = require_borrower(owner);
  balance_reserve();
  std::vector<std::int64_t> lent;
  for (std::int64_t i = chunks_ - 1; i >= 0 && std::ssize(lent) < chunks; --i) {
    const ChunkWord seen = load(i);
    if (seen.state == ChunkState::kFree && swap(i, seen, ChunkState::kLent, borrower)) {
      lent.push_back(i);
    }
  }
  return lent;
}

std::vector<std::int64_t> ChunkTable::revoke(std::int64_t chunks) {
  require_owner("revoke");
  require_amount(chunks);
  std::vector<std::int64_t> revoked;
  for (std::int64_t i = 0; i < chunks_ && std::ssize(revoked) < chunks; ++i) {
    const ChunkWord seen = load(i);
    // A swap that fails was overtaken by the peer's give_back: the chunk is home already.
    if (seen.state == ChunkState::kLent && swap(i, seen, ChunkState::kDraining, seen.owner)) {
      revoked.push_back(i);
    }
  }
  return revoked;
}

std::int64_t ChunkTable::reclaim(std::int64_t owner) {
  require_owner("reclaim");
  const std::uint32_t borrower = require_borrower(owner);
  std::int64_t reclaimed = 0;
  for (std::int64_t i = 0; i < chunks_; ++i) {
    const ChunkWord seen = load(i);
    if (is_borrowed(seen.state) && seen.owner == borrower && swap(i, seen, destination(), 0)) {
      ++reclaimed;
    }
  }
  return reclaimed;
}

void ChunkTable::take_kv_chunk(std::int64_t chunk) {
  require_owner("take_kv_chunk");
  require_id(chunk);
  const ChunkWord seen = load(chunk);
  if (!swap(chunk, seen, ChunkState::kKv, 0)) {
    throw OwnershipError(describe(chunk, load(chunk)) + " and was free a moment ago; two threads?");
  }
}

void ChunkTable::lend_chunk(std::int64_t chunk, std::int64_t owner) {
  require_owner("lend_chunk");
  require_id(chunk);
  const std::uint32_t borrower = require_borrower(owner);
  const ChunkWord seen = load(chunk);
  if (!swap(chunk, seen, ChunkState::kLent, borrower)) {
    throw OwnershipError(describe(chunk, load(chunk)) + " and was FREE a moment ago; two threads?");
  }
}

bool ChunkTable::revoke_chunk(std::int64_t chunk) {
  require_owner("revoke_chunk");
  require_id(chunk);
  const ChunkWord seen = load(chunk);
  // A swap that fails was overtaken by the peer's give_back: the chunk is home already.
  return seen.state == ChunkState::kLent && swap(chunk, seen, ChunkState::kDraining, seen.owner);
}

std::vector<std::int64_t> ChunkTable::held_in(ChunkState state, std::int64_t owner) const {
  const std::uint32_t borrower = require_borrower(owner);
  std::vector<std::int64_t> held;
  for (std::int64_t i = 0; i < chunks_; ++i) {
    const ChunkWord seen = load(i);
    if (seen.state == state && seen.owner == borrower) {
      held.push_back(i);
    }
  }
  return held;
}

void ChunkTable::give_back(std::int64_t chunk, std::int64_t owner) {
  require_id(chunk);
  const std::uint32_t borrower = require_borrower(owner);
  for (;;) {
    const ChunkWord seen = load(chunk);
    if (!is_borrowed(seen.state) || seen.owner != borrower) {
      throw OwnershipError(describe(chunk, seen) + ", not lent to " + std::to_string(owner) +
                           "; was it given back twice, or reclaimed?");
    }
    // Fails only when decode revokes (LENT -> DRAINING) or reclaims it meanwhile: look again.
    if (swap(chunk, seen, destination(), 0)) {
      return;
    }
  }
}

bool ChunkTable::move(std::int64_t chunk, const ChunkWord& seen, ChunkState to,
                      std::int64_t owner) {
  require_id(chunk);
  const bool keeps_owner = to == ChunkState::kDraining;
  const bool lends = to == ChunkState::kLent;
  return swap(chunk, seen, to, lends ? require_borrower(owner) : keeps_owner ? seen.owner : 0);
}

void ChunkTable::check() const {
  const std::int64_t target = head_->reserve_target.load(std::memory_order_acquire);
  if (target < 0 || target > chunks_) {
    throw Error("the chunk table is broken: its reserve shall hold " + std::to_string(target));
  }
  for (std::int64_t i = 0; i < chunks_; ++i) {
    const ChunkWord word = load(i);
    if (static_cast<std::size_t>(word.state) >= kChunkStates) {
      throw Error("the chunk table is broken: chunk " + std::to_string(i) + " has state " +
                  std::to_string(static_cast<int>(word.state)));
    }
    if (is_borrowed(word.state) != (word.owner != 0)) {
      throw Error("the chunk table is broken: " + describe(i, word) + ", owner " +
                  std::to_string(word.owner));
    }
    if (since_ns_[i].load(std::memory_order_relaxed) > monotonic_ns()) {
      throw Error("the chunk table is broken: chunk " + std::to_string(i) +
                  " changed in the future");
    }
  }
}

ChunkWord ChunkTable::load(std::int64_t chunk) const {
  return ChunkWord::unpack(words_[chunk].load(std::memory_order_acquire));
}

bool ChunkTable::swap(std::int64_t chunk, const ChunkWord& seen, ChunkState to,
                      std::uint32_t owner) {
  if (!is_legal(seen.state, to, side_)) {
    throw OwnershipError(describe(chunk, seen) + " and cannot become " + std::string(name_of(to)) +
                         " by this side's hand");
  }
  const ChunkWord next{.state = to, .owner = owner, .epoch = seen.epoch + 1};
  std::uint64_t expected = seen.pack();
  // Release hands over what the last user wrote into the chunk; acquire lets the next one see it.
  if (!words_[chunk].compare_exchange(expected, next.pack(), std::memory_order_acq_rel)) {
    return false;
  }
  since_ns_[chunk].store(monotonic_ns(), std::memory_order_relaxed);
  if (to == ChunkState::kFree || to == ChunkState::kReserved) {
    head_->homed.fetch_add(1, std::memory_order_release);
  }
  return true;
}

std::int64_t ChunkTable::count(ChunkState state) const {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < chunks_; ++i) {
    found += load(i).state == state ? 1 : 0;
  }
  return found;
}

// Clamped: the peer could have written anything.
std::int64_t ChunkTable::reserve_target() const {
  return std::clamp<std::int64_t>(head_->reserve_target.load(std::memory_order_acquire), 0,
                                  chunks_);
}

// Where a chunk goes that comes home.
ChunkState ChunkTable::destination() const {
  return count(ChunkState::kReserved) < reserve_target() ? ChunkState::kReserved
                                                         : ChunkState::kFree;
}

// The lowest chunk of that state becomes KV; -1: none.
std::int64_t ChunkTable::take_first(ChunkState state, Hint& hint) {
  const std::uint64_t homed = head_->homed.load(std::memory_order_acquire);
  if (homed != hint.seen) {
    hint = {.from = 0, .seen = homed};
  }
  for (std::int64_t i = hint.from; i < chunks_; ++i) {
    const ChunkWord seen = load(i);
    // FREE and RESERVED leave only by the owner's hand, and the owner is one thread; a swap that
    // fails all the same met garbage of the peer's.
    if (seen.state == state && swap(i, seen, ChunkState::kKv, 0)) {
      hint.from = i + 1;
      return i;
    }
  }
  hint.from = chunks_;
  return -1;
}

// Moves chunks between FREE and RESERVED until the reserve has its size or FREE is empty. From the
// highest ids: KV fills the low ones first, so the reserve stays out of its way the longest.
void ChunkTable::balance_reserve() {
  std::int64_t missing = reserve_target() - count(ChunkState::kReserved);
  const ChunkState from = missing > 0 ? ChunkState::kFree : ChunkState::kReserved;
  const ChunkState to = missing > 0 ? ChunkState::kReserved : ChunkState::kFree;
  for (std::int64_t i = chunks_ - 1; i >= 0 && missing != 0; --i) {
    const ChunkWord seen = load(i);
    if (seen.state == from && swap(i, seen, to, 0)) {
      missing += missing > 0 ? -1 : 1;
    }
  }
}

void ChunkTable::require_owner(const char* call) const {
  if (side_ != Side::kOwner) {
    throw OwnershipError(std::string(call) + " is decode's call; this process only borrows");
  }
}

void ChunkTable::require_id(std::int64_t chunk) const {
  if (chunk < 0 || chunk >= chunks_) {
    throw std::out_of_range("chunk " + std::to_string(chunk) + " is none of the arena's " +
                            std::to_string(chunks_));
  }
}

}  // namespace windrow
