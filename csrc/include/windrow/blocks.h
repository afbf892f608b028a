#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "windrow/chunk_memory.h"
#include "windrow/driver.h"
#include "windrow/geometry.h"
#include "windrow/lease.h"

namespace windrow {

// K (or V) of one layer in a mapping: token slot s of chunk c lies at
// offset + c * chunk_stride + s * slot_stride and has entry_bytes. All in bytes; the same four
// numbers say it for both layouts on every driver.
struct KvView {
  std::int64_t offset;
  std::int64_t chunk_stride;
  std::int64_t slot_stride;
  std::int64_t entry_bytes;

  bool operator==(const KvView&) const = default;
};

// All blocks of an arena: their memories, and one mapping of them all, made at the start and for
// good.
//
// How many memories: one in all where a driver maps parts of a memory; else as many as move alone:
// a block (per-layer layout) or a chunk (token-major). In which order they are mapped: chunk by
// chunk, so that a chunk is one range; save that decode, where it has a memory for each block, maps
// each layer's K and V on its own, as engines want them: chunk after chunk of the same layer.
//
// Immutable after construction; any thread.
class Blocks final : public ChunkMemory {
 public:
  // New memory; throws Error.
  [[nodiscard]] static std::unique_ptr<Blocks> create(Driver& driver, const Geometry& geometry);
  // Memory that the arena's owner exported, in its order. Throws AttachError when the number of
  // descriptors is another.
  [[nodiscard]] static std::unique_ptr<Blocks> import(Driver& driver, const Geometry& geometry,
                                                      std::vector<OwnedFd> fds);

  [[nodiscard]] const std::shared_ptr<LeasedMapping>& mapping() const { return mapping_; }
  // A descriptor of each memory. Throws Error.
  [[nodiscard]] std::vector<OwnedFd> export_fds() const;
  // Where a block begins in the mapping; the blocks of a chunk are `block_stride` apart. In the
  // token-major layout a chunk has no blocks, and block 0 is all of it.
  [[nodiscard]] std::int64_t block_offset(std::int64_t chunk, std::int64_t block) const;
  [[nodiscard]] std::int64_t block_stride() const;
  // K where `value` is false.
  [[nodiscard]] KvView kv_view(std::int64_t layer, bool value) const;

  // Physical memory behind each block, for whoever maps it a second time.
  [[nodiscard]] std::int64_t chunks() const override { return geometry_.chunks; }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return 2 * geometry_.layers; }
  [[nodiscard]] std::size_t block_bytes() const override {
    return static_cast<std::size_t>(geometry_.block_bytes);
  }
  [[nodiscard]] Backing backing(std::int64_t chunk, std::int64_t block) const override;

 private:
  enum class Order { kByChunk, kByLayer };
  Blocks(Driver& driver, const Geometry& geometry, Order order,
         std::vector<std::unique_ptr<Memory>> memories);
  void map_all(Driver& driver);
  [[nodiscard]] std::int64_t memory_bytes() const;
  [[nodiscard]] std::int64_t place_of(std::size_t memory) const;

  Geometry geometry_;
  Order order_;
  std::vector<std::unique_ptr<Memory>> memories_;
  std::shared_ptr<LeasedMapping> mapping_;
};

// How many memories an arena of that geometry has on that driver.
[[nodiscard]] std::size_t memories_of(const Driver& driver, const Geometry& geometry);

}  // namespace windrow
