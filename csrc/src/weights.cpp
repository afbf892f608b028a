#include "windrow/weights.h"

#include <stdexcept>
#include <string>

#include "windrow/error.h"

namespace windrow {
namespace {

std::size_t require_size(std::int64_t bytes) {
  if (bytes < 1) {
    throw std::invalid_argument("weights of " + std::to_string(bytes) + " bytes");
  }
  return static_cast<std::size_t>(bytes);
}

}  // namespace

SharedWeights::SharedWeights(Driver& driver, std::int64_t bytes)
    : memory_(driver.create(require_size(bytes), "windrow-weights")),
      fd_(memory_->export_fd()),
      mapping_(std::make_shared<LeasedMapping>(map_whole(driver, *memory_, Access::kReadWrite))) {}

void SharedWeights::seal() {
  if (sealed_) {
    return;
  }
  memory_->seal_writes();
  mapping_->reservation().map(0, *memory_, 0, memory_->bytes(), Access::kReadOnly);
  sealed_ = true;
}

std::shared_ptr<LeasedMapping> map_sealed(Driver& driver, OwnedFd fd, std::size_t bytes) {
  driver.require_sealed(fd.get());
  const auto memory = driver.import_fd(std::move(fd), bytes);
  return std::make_shared<LeasedMapping>(map_whole(driver, *memory, Access::kReadOnly));
}

}  // namespace windrow
