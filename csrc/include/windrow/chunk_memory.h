#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "windrow/driver.h"
#include "windrow/geometry.h"

namespace windrow {

// Place of a block: what `Reservation::map` takes.
struct Backing {
  const Memory* memory;
  std::size_t offset;
};

// The physical memory of an arena's chunks, block by block; always the same for a block, so that a
// mapping of it stays right however often its chunk is lent. Thread: any.
class ChunkMemory {
 public:
  virtual ~ChunkMemory() = default;
  [[nodiscard]] virtual std::int64_t chunks() const = 0;
  [[nodiscard]] virtual std::int64_t blocks_per_chunk() const = 0;
  [[nodiscard]] virtual std::size_t block_bytes() const = 0;
  // Ids as in the arena: below chunks(), below blocks_per_chunk().
  [[nodiscard]] virtual Backing backing(std::int64_t chunk, std::int64_t block) const = 0;
  // Whether blocks are parts of one memory that is mapped whole or not at all (see PiecesOfChunks).
  [[nodiscard]] virtual bool one_memory_a_chunk() const { return false; }
};

// Calls of the driver, since the beginning. Runs of blocks that are side by side in one memory are
// one call.
struct MappingCalls {
  std::int64_t map = 0;
  std::int64_t access = 0;  // one for each alias that was mapped (cuMemSetAccess; none on the host)
  std::int64_t unmap = 0;
  std::int64_t saved = 0;  // map calls that an idle alias made unnecessary
};

// One memory for all chunks, one after the other: the host driver's arena.
class ChunkMajorMemory final : public ChunkMemory {
 public:
  ChunkMajorMemory(std::shared_ptr<const Memory> memory, const Geometry& geometry)
      : memory_(std::move(memory)), geometry_(geometry) {}

  [[nodiscard]] std::int64_t chunks() const override { return geometry_.chunks; }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return 2 * geometry_.layers; }
  [[nodiscard]] std::size_t block_bytes() const override {
    return static_cast<std::size_t>(geometry_.block_bytes);
  }
  [[nodiscard]] Backing backing(std::int64_t chunk, std::int64_t block) const override {
    return {memory_.get(), static_cast<std::size_t>(chunk * geometry_.chunk_bytes() +
                                                    block * geometry_.block_bytes)};
  }

 private:
  std::shared_ptr<const Memory> memory_;
  Geometry geometry_;
};

}  // namespace windrow
