#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "windrow/chunk_memory.h"
#include "windrow/driver.h"
#include "windrow/geometry.h"
#include "windrow/lease.h"

namespace windrow {

// K (or V) of one layer in a mapping: token slot s of chunk c is at
// offset + c * chunk_stride + s * slot_stride and has entry_bytes. All in bytes; the same four
// numbers say it for both layouts on every driver.
struct KvView {
  std::int64_t offset;
  std::int64_t chunk_stride;
  std::int64_t slot_stride;
  std::int64_t entry_bytes;

  bool operator==(const KvView&) const = default;
};

// All blocks of an arena: their memories, and one range of addresses for them all.
//
// What is mapped there: everything, at the start and for good; save in a worker whose device has a
// memory for each piece that moves alone. It maps a chunk when it is lent and first used, so that
// KV which was never lent has no address in that process. A chunk that went home stays mapped, as
// idle aliases do: the worker's kernels may still run over it, and it will be lent again.
//
// In which order: a worker maps chunk by chunk, so that a chunk is one range. So does decode with
// the token-major layout; with the per-layer one it maps each layer's K and V on its own, as
// engines want them: chunk after chunk of the same layer.
//
// How many memories: one in all where a driver maps parts of a memory, in decode's order, so that
// decode has one mapping and the worker, with the per-layer layout, one for each block; else as
// many as move alone: a block (per-layer layout) or a chunk (token-major).
//
// map_chunks() by one thread at a time; the rest by any.
class Blocks final : public ChunkMemory {
 public:
  // New memory; throws Error.
  [[nodiscard]] static std::unique_ptr<Blocks> create(Driver& driver, const Geometry& geometry);
  // Memory that the arena's owner exported, in its order. Throws AttachError when the number of
  // descriptors is another.
  [[nodiscard]] static std::unique_ptr<Blocks> import(Driver& driver, const Geometry& geometry,
                                                      std::vector<OwnedFd> fds);

  [[nodiscard]] const std::shared_ptr<LeasedMapping>& mapping() const { return mapping_; }
  // Sees to it that those chunks are mapped. Throws Error; none of a failed chunk is mapped then.
  void map_chunks(std::int64_t first, std::int64_t last);
  // Whether each chunk is mapped on its own, when it is lent.
  [[nodiscard]] bool maps_on_demand() const { return !mapped_.empty(); }
  // A descriptor of each memory. Throws Error.
  [[nodiscard]] std::vector<OwnedFd> export_fds() const;
  // Where a block begins in the mapping; the blocks of a chunk are `block_stride` apart. In the
  // token-major layout a chunk has no blocks, and block 0 is all of it.
  [[nodiscard]] std::int64_t block_offset(std::int64_t chunk, std::int64_t block) const;
  [[nodiscard]] std::int64_t block_stride() const;
  // K where `value` is false.
  [[nodiscard]] KvView kv_view(std::int64_t layer, bool value) const;

  // Physical memory behind each block, for a second mapping.
  [[nodiscard]] std::int64_t chunks() const override { return geometry_.chunks; }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return 2 * geometry_.layers; }
  [[nodiscard]] std::size_t block_bytes() const override {
    return static_cast<std::size_t>(geometry_.block_bytes);
  }
  [[nodiscard]] Backing backing(std::int64_t chunk, std::int64_t block) const override;

 private:
  enum class Order { kByChunk, kByLayer };
  enum class Mapped { kAll, kOnDemand };
  Blocks(Driver& driver, const Geometry& geometry, Order order, Mapped mapped,
         std::vector<std::unique_ptr<Memory>> memories);
  [[nodiscard]] std::vector<Piece> pieces(std::int64_t first, std::int64_t chunks) const;
  [[nodiscard]] std::int64_t memory_bytes() const;

  Geometry geometry_;
  Order order_;
  std::vector<std::unique_ptr<Memory>> memories_;
  std::shared_ptr<LeasedMapping> mapping_;
  std::vector<bool> mapped_;  // by chunk; empty: all are, since the start
};

// Throws GeometryError where a worker would need more mappings than a process may have.
void require_mappable(const Driver& driver, const Geometry& geometry);

// How many memories an arena of that geometry has on that driver.
[[nodiscard]] std::size_t memories_of(const Driver& driver, const Geometry& geometry);

}  // namespace windrow
