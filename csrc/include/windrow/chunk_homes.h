#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "windrow/chunk_budget.h"
#include "windrow/chunk_memory.h"
#include "windrow/driver.h"
#include "windrow/stream_epochs.h"

namespace windrow {

// A chunk that is one memory as pieces that tensors can take: 2 MiB each (kPoolBlockBytes), of
// which the driver maps none alone.
class PiecesOfChunks final : public ChunkMemory {
 public:
  // Throws GeometryError for chunks that are not a multiple of 2 MiB.
  explicit PiecesOfChunks(std::shared_ptr<const ChunkMemory> chunks);

  [[nodiscard]] std::int64_t chunks() const override { return chunks_->chunks(); }
  [[nodiscard]] std::int64_t blocks_per_chunk() const override { return per_chunk_; }
  [[nodiscard]] std::size_t block_bytes() const override;
  [[nodiscard]] Backing backing(std::int64_t chunk, std::int64_t block) const override;
  [[nodiscard]] bool one_memory_a_chunk() const override { return true; }

 private:
  std::shared_ptr<const ChunkMemory> chunks_;
  std::int64_t per_chunk_;
};

// Maps each chunk whole, at a place of its own at the start of a range, when it is first used: so
// pieces with consecutive ids have consecutive addresses, and handing them out costs no call.
// Thread: one at a time.
class ChunkHomes {
 public:
  // The first `bytes()` of `range` are theirs. All outlive it.
  ChunkHomes(Reservation& range, const ChunkMemory& memory, StreamEpochs& epochs);
  ChunkHomes(const ChunkHomes&) = delete;
  ChunkHomes& operator=(const ChunkHomes&) = delete;

  [[nodiscard]] std::size_t bytes() const { return homes_.size() * chunk_bytes_; }
  // Address of those pieces, whose ids are consecutive; their chunks are held until let_go(). Adds
  // to `calls` what it took. Throws Error; nothing is held then.
  [[nodiscard]] std::byte* hold(std::span<const BlockId> pieces, MappingCalls& calls);
  void let_go(std::span<const BlockId> pieces);
  // Unmaps chunks that nobody holds and nothing uses any more.
  void clear(MappingCalls& calls);

 private:
  struct Home {
    bool mapped = false;
    std::int64_t holders = 0;
    StreamEpochs::Epoch let_go = 0;  // in which it last was
  };

  [[nodiscard]] std::span<Home> homes_of(std::span<const BlockId> pieces);
  void map(std::size_t chunk);

  Reservation* range_;
  const ChunkMemory* memory_;
  StreamEpochs* epochs_;
  std::size_t chunk_bytes_;
  std::vector<Home> homes_;  // by chunk
};

}  // namespace windrow
