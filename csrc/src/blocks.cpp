#include "windrow/blocks.h"

#include <string>

#include "windrow/error.h"

namespace windrow {
namespace {

// Linux gives a process 65,530 mappings, and a worker needs others as well.
constexpr std::int64_t kMostPieces = 32'768;

}  // namespace

void require_mappable(const Driver& driver, const Geometry& geometry) {
  const std::int64_t pieces = geometry.arena_bytes() / geometry.moving_bytes();
  if (driver.maps_parts() && geometry.layout == KvLayout::kPerLayer && pieces > kMostPieces) {
    throw GeometryError(std::to_string(geometry.chunks) + " chunks of " +
                        std::to_string(2 * geometry.layers) + " blocks are " +
                        std::to_string(pieces) + " mappings in a worker, of which it may have " +
                        std::to_string(kMostPieces) + "; choose larger blocks or a smaller arena");
  }
}

std::size_t memories_of(const Driver& driver, const Geometry& geometry) {
  if (driver.maps_parts()) {
    return 1;
  }
  return static_cast<std::size_t>(geometry.arena_bytes() / geometry.moving_bytes());
}

std::unique_ptr<Blocks> Blocks::create(Driver& driver, const Geometry& geometry) {
  const std::size_t count = memories_of(driver, geometry);
  const auto bytes = static_cast<std::size_t>(geometry.arena_bytes()) / count;
  std::vector<std::unique_ptr<Memory>> memories;
  memories.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    memories.push_back(driver.create(bytes, "windrow-arena"));
  }
  const bool by_layer = geometry.layout == KvLayout::kPerLayer;
  return std::unique_ptr<Blocks>(new Blocks(driver, geometry,
                                            by_layer ? Order::kByLayer : Order::kByChunk,
                                            Mapped::kAll, std::move(memories)));
}

std::unique_ptr<Blocks> Blocks::import(Driver& driver, const Geometry& geometry,
                                       std::vector<OwnedFd> fds) {
  const std::size_t count = memories_of(driver, geometry);
  if (fds.size() != count) {
    throw AttachError("the arena has " + std::to_string(fds.size()) + " memories; on the " +
                      std::string(driver.name()) + " driver this geometry has " +
                      std::to_string(count) + ": use the owner's driver");
  }
  const auto bytes = static_cast<std::size_t>(geometry.arena_bytes()) / count;
  std::vector<std::unique_ptr<Memory>> memories;
  memories.reserve(count);
  for (OwnedFd& fd : fds) {
    memories.push_back(driver.import_fd(std::move(fd), bytes));
  }
  const Mapped mapped = driver.maps_parts() ? Mapped::kAll : Mapped::kOnDemand;
  return std::unique_ptr<Blocks>(
      new Blocks(driver, geometry, Order::kByChunk, mapped, std::move(memories)));
}

Blocks::Blocks(Driver& driver, const Geometry& geometry, Order order, Mapped mapped,
               std::vector<std::unique_ptr<Memory>> memories)
    : geometry_(geometry), order_(order), memories_(std::move(memories)) {
  auto range = driver.reserve(static_cast<std::size_t>(geometry_.arena_bytes()));
  if (mapped == Mapped::kOnDemand) {
    mapped_.resize(static_cast<std::size_t>(geometry_.chunks));
  } else {
    range->map_run(0, pieces(0, geometry_.chunks), Access::kReadWrite);
  }
  mapping_ = std::make_shared<LeasedMapping>(std::move(range));
}

void Blocks::map_chunks(std::int64_t first, std::int64_t last) {
  if (mapped_.empty()) {
    return;
  }
  const auto chunk_bytes = static_cast<std::size_t>(geometry_.chunk_bytes());
  for (std::int64_t chunk = first; chunk <= last; ++chunk) {
    const auto place = static_cast<std::size_t>(chunk);
    if (!mapped_[place]) {
      mapping_->reservation().map_run(place * chunk_bytes, pieces(chunk, 1), Access::kReadWrite);
      mapped_[place] = true;
    }
  }
}

// What backs the range from a chunk's beginning on. Where layers come before chunks, only all of
// them are a range. Pieces side by side in one memory are one.
std::vector<Piece> Blocks::pieces(std::int64_t first, std::int64_t chunks) const {
  const auto bytes = static_cast<std::size_t>(geometry_.moving_bytes());
  const std::int64_t per_chunk = geometry_.chunk_bytes() / geometry_.moving_bytes();
  std::vector<Piece> found;
  for (std::int64_t place = first * per_chunk; place < (first + chunks) * per_chunk; ++place) {
    const bool by_chunk = order_ == Order::kByChunk;
    const std::int64_t chunk = by_chunk ? place / per_chunk : place % geometry_.chunks;
    const std::int64_t block = by_chunk ? place % per_chunk : place / geometry_.chunks;
    const Backing at = backing(chunk, block);
    if (!found.empty() && found.back().memory == at.memory &&
        found.back().offset + found.back().bytes == at.offset) {
      found.back().bytes += bytes;
    } else {
      found.push_back({at.memory, at.offset, bytes});
    }
  }
  return found;
}

std::vector<OwnedFd> Blocks::export_fds() const {
  std::vector<OwnedFd> fds;
  fds.reserve(memories_.size());
  for (const auto& memory : memories_) {
    fds.push_back(memory->export_fd());
  }
  return fds;
}

std::int64_t Blocks::memory_bytes() const {
  return geometry_.arena_bytes() / static_cast<std::int64_t>(memories_.size());
}

std::int64_t Blocks::block_offset(std::int64_t chunk, std::int64_t block) const {
  const std::int64_t chunk_stride =
      order_ == Order::kByLayer ? geometry_.block_bytes : geometry_.chunk_bytes();
  return chunk * chunk_stride + block * block_stride();
}

std::int64_t Blocks::block_stride() const {
  return order_ == Order::kByLayer ? geometry_.chunks * geometry_.block_bytes
                                   : geometry_.block_bytes;
}

KvView Blocks::kv_view(std::int64_t layer, bool value) const {
  const std::int64_t entry = geometry_.entry_bytes();
  const std::int64_t column = 2 * layer + (value ? 1 : 0);
  if (geometry_.layout == KvLayout::kTokenMajor) {
    return {.offset = column * entry,
            .chunk_stride = geometry_.chunk_bytes(),
            .slot_stride = 2 * geometry_.layers * entry,
            .entry_bytes = entry};
  }
  return {.offset = block_offset(0, column),
          .chunk_stride = block_offset(1, 0),
          .slot_stride = entry,
          .entry_bytes = entry};
}

Backing Blocks::backing(std::int64_t chunk, std::int64_t block) const {
  // One memory is laid out as decode maps it: by layer, or else by chunk. Several are in chunks'
  // order.
  const bool by_layer = memories_.size() == 1 && geometry_.layout == KvLayout::kPerLayer;
  const std::int64_t at = by_layer
                              ? (block * geometry_.chunks + chunk) * geometry_.block_bytes
                              : chunk * geometry_.chunk_bytes() + block * geometry_.block_bytes;
  return {memories_[static_cast<std::size_t>(at / memory_bytes())].get(),
          static_cast<std::size_t>(at % memory_bytes())};
}

}  // namespace windrow
