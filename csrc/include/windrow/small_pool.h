#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace windrow {

inline constexpr std::size_t kLeafBytes = 2048;
inline constexpr std::size_t kOrders = 11;  // 2 KiB << 0 ... 2 KiB << 10
inline constexpr std::size_t kPoolBlockBytes = kLeafBytes << (kOrders - 1);  // 2 MiB
inline constexpr std::size_t kLeaves = kPoolBlockBytes / kLeafBytes;         // of one block

// Where a pool's blocks come from and go back to.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // kPoolBlockBytes at a multiple of that many bytes from the pool's base, or nullptr when there is
  // no more.
  [[nodiscard]] virtual std::byte* take_block() = 0;
  virtual void return_block(std::byte* block) noexcept = 0;
};

// What a pool holds now, in bytes. held >= rounded >= requested.
struct PoolBytes {
  std::int64_t held = 0;       // whole blocks
  std::int64_t rounded = 0;    // of live allocations, as the buddy rounds them
  std::int64_t requested = 0;  // of live allocations, as they were asked for
};

// One step of an allocation trace: `bytes` > 0 makes allocation number `id`, 0 ends it.
struct TraceStep {
  std::int64_t id = 0;
  std::int64_t bytes = 0;
};

// A buddy allocator for everything below 2 MiB: leaves of 2 KiB, powers of two up to a whole block
// (Harli's small pool). It never touches the memory that it hands out, which may be a device's: all
// of its books are beside it, 9 bytes a leaf.
//
// A freed piece first goes on a short list of its size, uncoalesced, from which the next request of
// that size is served (the common case of a training step: the same sizes again and again). Lists
// are merged into larger pieces when a request finds nothing else, and by trim().
//
// Thread: one at a time. Errors: as each call says; a call that throws has changed nothing.
class SmallPool {
 public:
  // Blocks of `source` are at or above `base`; both outlive the pool, which returns every block on
  // destruction.
  SmallPool(BlockSource& source, std::byte* base) : source_(&source), base_(base) {}
  SmallPool(const SmallPool&) = delete;
  SmallPool& operator=(const SmallPool&) = delete;
  ~SmallPool();

  // 1 to kPoolBlockBytes bytes, aligned to their size rounded up to a power of two, or nullptr when
  // the source has no block. Throws std::invalid_argument for any other size.
  [[nodiscard]] std::byte* allocate(std::size_t bytes);
  // Returns how many bytes had been asked for. Throws Error where nothing that lives begins there:
  // a foreign address or a double free.
  std::size_t free(std::byte* address);
  // As `free` returns it.
  [[nodiscard]] std::size_t requested(const std::byte* address) const;

  // Holds at least so many blocks from now on, so that a profiled iteration never waits for one.
  // Returns how many it holds; fewer when the source has no more.
  std::size_t keep(std::size_t blocks);
  // Merges everything and returns every empty block, those of keep() included.
  void trim();

  [[nodiscard]] PoolBytes bytes() const;
  // Throws Error with the first broken invariant. Walks everything: for tests.
  void check() const;

 private:
  using Node = std::uint32_t;  // block number * kLeaves + leaf
  static constexpr Node kNone = ~Node{0};
  // What a leaf's tag says, together with the order in the low bits. Only the first leaf of a piece
  // has one; the others are kInside.
  enum Tag : std::uint8_t { kInside = 0, kFree = 0x10, kCached = 0x20, kLive = 0x40 };

  struct Block {
    std::byte* address = nullptr;  // nullptr: number not in use
    std::array<std::uint8_t, kLeaves> tag{};
    // Neighbours on the list of free pieces; of a live piece, `next` is what was requested.
    std::array<std::uint32_t, kLeaves> next{};
    std::array<std::uint32_t, kLeaves> previous{};
  };
  // Freed pieces of one order that wait uncoalesced.
  struct Cache {
    static constexpr std::size_t kMost = 64;
    std::array<Node, kMost> nodes{};
    std::size_t count = 0;
  };

  [[nodiscard]] Block& block(Node node) { return *blocks_[node / kLeaves]; }
  [[nodiscard]] std::uint8_t& tag(Node node) { return block(node).tag[node % kLeaves]; }
  [[nodiscard]] std::uint32_t& next(Node node) { return block(node).next[node % kLeaves]; }
  [[nodiscard]] std::byte* address(Node node) {
    return block(node).address + node % kLeaves * kLeafBytes;
  }
  [[nodiscard]] Node live_node(const std::byte* address) const;
  [[nodiscard]] Node piece(std::size_t order);
  [[nodiscard]] Node split_smallest(std::size_t order);
  void merge(Node node, std::size_t order);
  void flush();
  void push(Node node, std::size_t order);
  void unlink(Node node, std::size_t order);
  [[nodiscard]] bool grow();
  void give_up(Node node);
  void release_empty(std::size_t keep);

  BlockSource* source_;
  std::byte* base_;
  std::vector<std::unique_ptr<Block>> blocks_;  // by number
  std::vector<std::uint32_t> unused_;           // numbers without a block
  std::vector<std::uint32_t> number_of_slot_;   // by (address - base) / kPoolBlockBytes
  std::array<Node, kOrders> heads_ = {kNone, kNone, kNone, kNone, kNone, kNone,
                                      kNone, kNone, kNone, kNone, kNone};
  std::uint32_t filled_ = 0;  // bit o: heads_[o] is not empty
  std::array<Cache, kOrders> caches_;
  std::size_t held_ = 0;   // blocks
  std::size_t empty_ = 0;  // blocks on the list of the top order
  std::size_t keep_ = 1;   // one stays, so that a block is not taken and returned in turn
  std::int64_t rounded_ = 0;
  std::int64_t requested_ = 0;
};

// How many blocks a pool needs for that iteration: what the trace holds at its peak, replayed
// through a pool, and a tenth more. Steps of kPoolBlockBytes and more are not the
// pool's and are left out.
[[nodiscard]] std::size_t sized_for(std::span<const TraceStep> trace);

}  // namespace windrow
