#include <algorithm>
#include <memory>
#include <unordered_map>

#include "windrow/small_pool.h"

namespace windrow {
namespace {

// Numbers instead of memory: the pool never looks at what it hands out.
class Addresses final : public BlockSource {
 public:
  // Any non-null multiple of a block's size will do.
  [[nodiscard]] static std::byte* base() { return reinterpret_cast<std::byte*>(kPoolBlockBytes); }

  [[nodiscard]] std::byte* take_block() override {
    ++taken_;
    most_ = std::max(most_, taken_ - returned_);
    return base() + (taken_ - 1) * kPoolBlockBytes;
  }
  void return_block(std::byte* /*block*/) noexcept override { ++returned_; }
  [[nodiscard]] std::size_t most() const { return most_; }

 private:
  std::size_t taken_ = 0;
  std::size_t returned_ = 0;
  std::size_t most_ = 0;
};

}  // namespace

std::size_t sized_for(std::span<const TraceStep> trace) {
  Addresses addresses;
  SmallPool pool(addresses, Addresses::base());
  std::unordered_map<std::int64_t, std::byte*> live;
  for (const TraceStep& step : trace) {
    if (step.bytes > 0 && step.bytes < static_cast<std::int64_t>(kPoolBlockBytes)) {
      live[step.id] = pool.allocate(static_cast<std::size_t>(step.bytes));
    } else if (const auto found = live.find(step.id); step.bytes == 0 && found != live.end()) {
      pool.free(found->second);
      live.erase(found);
    }
  }
  return (addresses.most() * 11 + 9) / 10;
}

}  // namespace windrow
