#pragma once

#include <cstdint>
#include <memory>

#include "windrow/driver.h"
#include "windrow/lease.h"

namespace windrow {

// Frozen weights that several processes read: written by their maker, then sealed; after that
// nobody, the maker included, can write through any mapping, old or new. A stray write kills the
// process that makes it. On a GPU whose driver takes no access away the maker's own mapping stays
// writable, with a line on stderr. One thread at a time.
class SharedWeights {
 public:
  SharedWeights(Driver& driver, std::int64_t bytes);

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] const std::shared_ptr<LeasedMapping>& mapping() const { return mapping_; }
  // Idempotent. Tensors made before stay valid and become read-only.
  void seal();

 private:
  std::unique_ptr<Memory> memory_;
  OwnedFd fd_;
  std::shared_ptr<LeasedMapping> mapping_;
  bool sealed_ = false;
};

// Maps weights that another process sealed, read-only. Throws Error where they are not sealed.
[[nodiscard]] std::shared_ptr<LeasedMapping> map_sealed(Driver& driver, OwnedFd fd,
                                                        std::size_t bytes);

}  // namespace windrow
