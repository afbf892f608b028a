#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "windrow/driver.h"
#include "windrow/mutex.h"

namespace windrow {

// A mapping that tensors point into, and the list of those that do. Tensors hold it by shared_ptr:
// it is unmapped when the last of them and its owner are gone, whatever the order. Any thread.
class LeasedMapping {
 public:
  explicit LeasedMapping(std::unique_ptr<Reservation> mapping) : mapping_(std::move(mapping)) {}

  [[nodiscard]] std::byte* data() const { return mapping_->data(); }
  [[nodiscard]] std::size_t bytes() const { return mapping_->bytes(); }
  [[nodiscard]] Reservation& reservation() { return *mapping_; }

  // How many tensors live and, for the first few, where: "3 tensors: 4096 bytes at offset 0, ...".
  // Empty when there are none.
  [[nodiscard]] std::string describe_live() const;

 private:
  friend class Lease;
  struct Extent {
    std::int64_t offset;
    std::int64_t bytes;
  };

  std::unique_ptr<Reservation> mapping_;
  mutable Mutex mutex_;
  std::list<Extent> live_ WINDROW_GUARDED_BY(mutex_);
};

// One tensor's claim on a mapping, from construction to destruction; both in any thread.
class Lease {
 public:
  // Throws std::out_of_range where the extent is not inside of the mapping or is empty.
  Lease(std::shared_ptr<LeasedMapping> mapping, std::int64_t offset, std::int64_t bytes);
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  [[nodiscard]] std::byte* data() const { return mapping_->data() + entry_->offset; }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(entry_->bytes); }

 private:
  std::shared_ptr<LeasedMapping> mapping_;
  std::list<LeasedMapping::Extent>::iterator entry_;
};

}  // namespace windrow
