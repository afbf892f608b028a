#pragma once

#include <cstdint>

namespace windrow {

// How a chunk holds its tokens.
enum class KvLayout : std::int64_t {
  // `2 * layers` blocks: K and V of every layer, in that order (K of layer 0, V of layer 0, K of
  // layer 1, ...). What most attention kernels read.
  kPerLayer = 0,
  // Token after token, each with K and V of all layers in that order. A chunk is one piece, so that
  // a GPU creates, maps and hands over one memory for it instead of 2 * layers.
  kTokenMajor = 1,
};

// Sizes of an arena. A chunk has the size of `2 * layers` blocks in either layout. A plain value;
// it crosses the socket and is in the control region as it is, so it belongs to kLayoutVersion.
struct Geometry {
  std::int64_t layers = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t dtype_bytes = 0;
  std::int64_t block_bytes = 0;
  std::int64_t chunks = 0;
  KvLayout layout = KvLayout::kPerLayer;

  // Bytes of K (or V) of one token in one layer.
  [[nodiscard]] std::int64_t entry_bytes() const { return kv_heads * head_dim * dtype_bytes; }
  // Tokens that one chunk holds.
  [[nodiscard]] std::int64_t slots_per_chunk() const { return block_bytes / entry_bytes(); }
  [[nodiscard]] std::int64_t chunk_bytes() const { return 2 * layers * block_bytes; }
  [[nodiscard]] std::int64_t arena_bytes() const { return chunks * chunk_bytes(); }
  // The smallest piece that a device can hand over alone: a block, or a token-major chunk.
  [[nodiscard]] std::int64_t moving_bytes() const {
    return layout == KvLayout::kTokenMajor ? chunk_bytes() : block_bytes;
  }

  // Throws GeometryError where a size is not positive, the smallest moving piece is not a multiple
  // of `granularity`, a block does not hold a whole number of tokens, the products leave 63 bits,
  // or the layout is none.
  void validate(std::int64_t granularity) const;

  bool operator==(const Geometry&) const = default;
};
static_assert(sizeof(Geometry) == 56);

}  // namespace windrow
