#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace windrow {

// Which parts of a range of addresses are free, by offset; first fit, neighbours merge.
// Thread: one at a time.
class AddressRanges {
 public:
  explicit AddressRanges(std::size_t bytes) : free_{{0, bytes}} {}

  [[nodiscard]] std::optional<std::size_t> take(std::size_t bytes) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [offset, size] = *range;
      if (size >= bytes) {
        free_.erase(range);
        if (size > bytes) {
          free_.emplace(offset + bytes, size - bytes);
        }
        return offset;
      }
    }
    return std::nullopt;
  }

  // Of what take() returned, whole.
  void put(std::size_t offset, std::size_t bytes) {
    const auto after = free_.lower_bound(offset);
    if (after != free_.end() && after->first == offset + bytes) {
      bytes += after->second;
      free_.erase(after);
    }
    const auto next = free_.lower_bound(offset);
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_.emplace(offset, bytes);
  }

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes
};

}  // namespace windrow
