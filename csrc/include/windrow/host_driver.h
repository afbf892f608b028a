#pragma once

#include "windrow/driver.h"

namespace windrow {

// Shared memory of any Linux machine as a device: memory is one memfd (sealed against growing and
// shrinking), an export is its descriptor, compute units are the cores of this process's affinity
// mask. One memfd and one mapping for a whole arena: one for each block would pass the usual limit
// of 1,024 descriptors, and taking 64 touched mappings down costs 5 ms.
//
// Copies run in the caller; their events are done at once. Thread, ownership and errors: as Driver.
class HostDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "host"; }
  [[nodiscard]] DeviceFacts facts() const override;
  [[nodiscard]] std::size_t granularity() const override;
  void require_sealed(int fd) const override;
  [[nodiscard]] std::unique_ptr<Reservation> reserve(std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Memory> create(std::size_t bytes, const char* label) override;
  [[nodiscard]] std::unique_ptr<Memory> import_fd(OwnedFd fd, std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Event> copy(std::byte* to, const std::byte* from,
                                            std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Partition> partition(std::span<const int> units) override;
};

// The driver of this process; lives until the process ends.
[[nodiscard]] Driver& host_driver();

}  // namespace windrow
