#include "windrow/chunk_homes.h"

#include <string>

#include "windrow/error.h"
#include "windrow/small_pool.h"

namespace windrow {
namespace {

std::size_t memory_bytes(const ChunkMemory& chunks) {
  return chunks.backing(0, 0).memory->bytes();
}

}  // namespace

PiecesOfChunks::PiecesOfChunks(std::shared_ptr<const ChunkMemory> chunks)
    : chunks_(std::move(chunks)),
      per_chunk_(static_cast<std::int64_t>(memory_bytes(*chunks_) / kPoolBlockBytes)) {
  if (memory_bytes(*chunks_) % kPoolBlockBytes != 0) {
    throw GeometryError(
        "a chunk of " + std::to_string(memory_bytes(*chunks_)) +
        " bytes is not a multiple of the 2 MiB that tensors take; choose block_bytes "
        "so that 2 * layers * block_bytes is one");
  }
}

std::size_t PiecesOfChunks::block_bytes() const {
  return kPoolBlockBytes;
}

Backing PiecesOfChunks::backing(std::int64_t chunk, std::int64_t block) const {
  return {chunks_->backing(chunk, 0).memory, static_cast<std::size_t>(block) * kPoolBlockBytes};
}

ChunkHomes::ChunkHomes(Reservation& range, const ChunkMemory& memory, StreamEpochs& epochs)
    : range_(&range),
      memory_(&memory),
      epochs_(&epochs),
      chunk_bytes_(static_cast<std::size_t>(memory.blocks_per_chunk()) * memory.block_bytes()),
      homes_(static_cast<std::size_t>(memory.chunks())) {}

std::byte* ChunkHomes::hold(std::span<const BlockId> pieces, MappingCalls& calls) {
  for (const Home& home : homes_of(pieces)) {
    if (!home.mapped) {
      map(static_cast<std::size_t>(&home - homes_.data()));
      ++calls.map;
      ++calls.access;
    }
  }
  for (Home& home : homes_of(pieces)) {
    ++home.holders;
  }
  return range_->data() + static_cast<std::size_t>(pieces.front()) * memory_->block_bytes();
}

void ChunkHomes::let_go(std::span<const BlockId> pieces) {
  for (Home& home : homes_of(pieces)) {
    --home.holders;
    home.let_go = epochs_->now();
  }
}

void ChunkHomes::clear(MappingCalls& calls) {
  for (std::size_t chunk = 0; chunk < homes_.size(); ++chunk) {
    Home& home = homes_[chunk];
    // Unmapping under a running kernel is a fault.
    if (home.mapped && home.holders == 0 && epochs_->ended(home.let_go)) {
      range_->unmap(chunk * chunk_bytes_, chunk_bytes_);
      home.mapped = false;
      ++calls.unmap;
    }
  }
}

std::span<ChunkHomes::Home> ChunkHomes::homes_of(std::span<const BlockId> pieces) {
  const auto first = static_cast<std::size_t>(pieces.front() / memory_->blocks_per_chunk());
  const auto last = static_cast<std::size_t>(pieces.back() / memory_->blocks_per_chunk());
  return std::span(homes_).subspan(first, last - first + 1);
}

void ChunkHomes::map(std::size_t chunk) {
  const Backing whole = memory_->backing(static_cast<std::int64_t>(chunk), 0);
  range_->map(chunk * chunk_bytes_, *whole.memory, 0, chunk_bytes_, Access::kReadWrite);
  homes_[chunk].mapped = true;
}

}  // namespace windrow
