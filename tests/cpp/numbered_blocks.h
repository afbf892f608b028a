#pragma once

#include <cstddef>
#include <set>

#include "windrow/small_pool.h"

namespace windrow::testing {

// A source of blocks that are numbers only: a pool never looks at memory, and code that does
// faults. The lowest free number first.
class NumberedBlocks final : public BlockSource {
 public:
  explicit NumberedBlocks(std::size_t blocks) {
    for (std::size_t i = 0; i < blocks; ++i) {
      free_.insert(base() + i * kPoolBlockBytes);
    }
  }
  [[nodiscard]] static std::byte* base() { return reinterpret_cast<std::byte*>(kPoolBlockBytes); }

  [[nodiscard]] std::byte* take_block() override {
    if (free_.empty()) {
      return nullptr;
    }
    ++taken_;
    return free_.extract(free_.begin()).value();
  }
  void return_block(std::byte* block) noexcept override {
    --taken_;
    free_.insert(block);
  }
  [[nodiscard]] std::size_t taken() const { return taken_; }

 private:
  std::set<std::byte*> free_;
  std::size_t taken_ = 0;
};

}  // namespace windrow::testing
