#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace windrow {

enum class ChunkState : std::uint8_t {
  kFree = 0,
  kKv = 1,
  kLent = 2,
  kReserved = 3,
  kDraining = 4
};
inline constexpr std::size_t kChunkStates = 5;
inline constexpr std::array<std::string_view, kChunkStates> kStateNames = {"FREE", "KV", "LENT",
                                                                           "RESERVED", "DRAINING"};

[[nodiscard]] constexpr std::string_view name_of(ChunkState state) {
  const auto index = static_cast<std::size_t>(state);
  return index < kStateNames.size() ? kStateNames[index] : "UNKNOWN";
}

// Who acts: the owner is decode, the peer is the worker that borrows.
enum class Side : std::uint8_t { kOwner, kPeer };

// One line of the written table: who may make it by which call, and what it leaves behind when the
// peer dies in it, at whatever instruction. When the owner dies, in any of them, decode is gone and
// the arena with it: a borrower keeps valid memory until it unmaps, and sees its connection close.
struct Transition {
  ChunkState from;
  ChunkState to;
  bool by_peer;  // the owner may make each of them
  std::string_view calls;
  std::string_view when;
  std::string_view if_peer_dies;
};

inline constexpr std::string_view kNotThePeers = "nothing: it is not its chunk";
inline constexpr std::string_view kStaysLent = "LENT until reclaim";
inline constexpr std::string_view kStaysDraining = "DRAINING until reclaim";
inline constexpr std::string_view kLentOrHome = "home, or LENT until reclaim";
inline constexpr std::string_view kDrainingOrHome = "home, or DRAINING until reclaim";

// All that is legal. Anything else is an OwnershipError and leaves the table as it is. Each
// transition is one compare-and-swap of one word, so a chunk is in the state before it or in the
// one after it and in no other. docs/memory.md shows these lines; a test holds the two equal.
inline constexpr std::array<Transition, 12> kTransitions = {{
    {ChunkState::kFree, ChunkState::kKv, false, "take_kv", "decode stores tokens here",
     kNotThePeers},
    {ChunkState::kReserved, ChunkState::kKv, false, "take_kv", "nothing is FREE", kNotThePeers},
    {ChunkState::kKv, ChunkState::kReserved, false, "return_kv", "the reserve is short",
     kNotThePeers},
    {ChunkState::kKv, ChunkState::kFree, false, "return_kv", "the reserve is full", kNotThePeers},
    {ChunkState::kFree, ChunkState::kReserved, false, "set_reserve, lend",
     "the reserve fills before anything is lent", kNotThePeers},
    {ChunkState::kReserved, ChunkState::kFree, false, "set_reserve, lend",
     "the reserve is larger than asked", kNotThePeers},
    {ChunkState::kFree, ChunkState::kLent, false, "lend", "the worker may use it", kStaysLent},
    {ChunkState::kLent, ChunkState::kDraining, false, "revoke", "the worker shall give it back",
     kStaysDraining},
    {ChunkState::kLent, ChunkState::kReserved, true, "give_back, reclaim", "the reserve is short",
     kLentOrHome},
    {ChunkState::kLent, ChunkState::kFree, true, "give_back, reclaim", "the reserve is full",
     kLentOrHome},
    {ChunkState::kDraining, ChunkState::kReserved, true, "give_back, reclaim",
     "the reserve is short", kDrainingOrHome},
    {ChunkState::kDraining, ChunkState::kFree, true, "give_back, reclaim", "the reserve is full",
     kDrainingOrHome},
}};

namespace detail {

// [by peer][from][to]
using Legal = std::array<std::array<std::array<bool, kChunkStates>, kChunkStates>, 2>;

constexpr Legal legal_moves() {
  Legal legal{};
  for (const Transition& t : kTransitions) {
    const auto from = static_cast<std::size_t>(t.from);
    const auto to = static_cast<std::size_t>(t.to);
    legal[0][from][to] = true;
    legal[1][from][to] = t.by_peer;
  }
  return legal;
}

inline constexpr Legal kLegal = legal_moves();

}  // namespace detail

// False also for an invalid state: a garbled word never moves.
[[nodiscard]] constexpr bool is_legal(ChunkState from, ChunkState to, Side side) {
  const auto a = static_cast<std::size_t>(from);
  const auto b = static_cast<std::size_t>(to);
  return a < kChunkStates && b < kChunkStates && detail::kLegal[side == Side::kPeer ? 1 : 0][a][b];
}

}  // namespace windrow
