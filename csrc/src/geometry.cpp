#include "windrow/geometry.h"

#include <string>

#include "windrow/error.h"

namespace windrow {
namespace {

// More chunks than any device has blocks for: keeps the table small and ids within 32 bits.
constexpr std::int64_t kMostChunks = 1 << 20;

void require_positive(const char* name, std::int64_t value) {
  if (value <= 0) {
    throw GeometryError(std::string(name) + " is " + std::to_string(value) +
                        "; it must be positive");
  }
}

std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw GeometryError(
        "the arena does not fit in 63 bits; ask for fewer chunks or smaller blocks");
  }
  return result;
}

void require_granularity(const Geometry& geometry, std::int64_t granularity) {
  if (geometry.layout != KvLayout::kPerLayer && geometry.layout != KvLayout::kTokenMajor) {
    throw GeometryError("layout " + std::to_string(static_cast<std::int64_t>(geometry.layout)) +
                        " is none; use per-layer or token-major");
  }
  if (geometry.moving_bytes() % granularity != 0) {
    const bool whole = geometry.layout == KvLayout::kTokenMajor;
    throw GeometryError((whole ? "a chunk has " : "block_bytes is ") +
                        std::to_string(geometry.moving_bytes()) + "; it must be a multiple of " +
                        std::to_string(granularity));
  }
}

}  // namespace

void Geometry::validate(std::int64_t granularity) const {
  require_positive("layers", layers);
  require_positive("kv_heads", kv_heads);
  require_positive("head_dim", head_dim);
  require_positive("dtype_bytes", dtype_bytes);
  require_positive("block_bytes", block_bytes);
  require_positive("chunks", chunks);
  if (chunks > kMostChunks) {
    throw GeometryError("chunks is " + std::to_string(chunks) + "; the table holds at most " +
                        std::to_string(kMostChunks));
  }
  product(product(product(2, layers), block_bytes), chunks);
  require_granularity(*this, granularity);
  const std::int64_t entry = product(product(kv_heads, head_dim), dtype_bytes);
  if (block_bytes % entry != 0) {
    throw GeometryError("a block of " + std::to_string(block_bytes) +
                        " bytes does not hold a whole number of tokens of " +
                        std::to_string(entry) + " bytes; choose a multiple of both");
  }
}

}  // namespace windrow
