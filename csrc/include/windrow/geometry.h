#pragma once

#include <cstdint>

namespace windrow {

// Sizes of an arena. A chunk is `2 * layers` blocks: K and V of every layer, in that order
// (K of layer 0, V of layer 0, K of layer 1, ...). A plain value; it crosses the socket and lies in
// the control region as it is, so its layout belongs to kLayoutVersion.
struct Geometry {
  std::int64_t layers = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t dtype_bytes = 0;
  std::int64_t block_bytes = 0;
  std::int64_t chunks = 0;

  // Bytes of K (or V) of one token in one layer.
  [[nodiscard]] std::int64_t entry_bytes() const { return kv_heads * head_dim * dtype_bytes; }
  // Tokens that one chunk holds.
  [[nodiscard]] std::int64_t slots_per_chunk() const { return block_bytes / entry_bytes(); }
  [[nodiscard]] std::int64_t chunk_bytes() const { return 2 * layers * block_bytes; }
  [[nodiscard]] std::int64_t arena_bytes() const { return chunks * chunk_bytes(); }

  // Throws GeometryError where a size is not positive, a block is no multiple of `granularity` or
  // does not hold a whole number of tokens, or the products leave 63 bits.
  void validate(std::int64_t granularity) const;

  bool operator==(const Geometry&) const = default;
};
static_assert(sizeof(Geometry) == 48);

}  // namespace windrow
