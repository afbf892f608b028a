#include "windrow/lease.h"

#include <stdexcept>

namespace windrow {
namespace {

constexpr int kMostNamed = 5;

}  // namespace

std::string LeasedMapping::describe_live() const {
  const MutexLock lock(mutex_);
  if (live_.empty()) {
    return {};
  }
  std::string text =
      std::to_string(live_.size()) + (live_.size() == 1 ? " tensor: " : " tensors: ");
  int named = 0;
  for (const Extent& extent : live_) {
    if (named == kMostNamed) {
      return text + ", ...";
    }
    text += (named++ == 0 ? "" : ", ") + std::to_string(extent.bytes) + " bytes at offset " +
            std::to_string(extent.offset);
  }
  return text;
}

Lease::Lease(std::shared_ptr<LeasedMapping> mapping, std::int64_t offset, std::int64_t bytes)
    : mapping_(std::move(mapping)) {
  const auto size = static_cast<std::int64_t>(mapping_->bytes());
  if (offset < 0 || bytes < 1 || offset > size || bytes > size - offset) {
    throw std::out_of_range(std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                            " are not inside of the mapping's " + std::to_string(size));
  }
  const MutexLock lock(mapping_->mutex_);
  entry_ = mapping_->live_.insert(mapping_->live_.end(), {offset, bytes});
}

Lease::~Lease() {
  const MutexLock lock(mapping_->mutex_);
  mapping_->live_.erase(entry_);
}

}  // namespace windrow
