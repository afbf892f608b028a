#pragma once

#include <memory>
#include <string>

#include "windrow/cuda_context.h"
#include "windrow/driver.h"
#include "windrow/mutex.h"

namespace windrow {

class GreenShares;

// Of a GPU, as 32 hexadecimal digits.
[[nodiscard]] std::string uuid_of(const Libcuda& library, cuda::Device device);

// A GPU through CUDA's virtual memory. Sizes are rounded up to the device's granularity (2 MiB). A
// memory is mapped whole, at offset 0, for CUDA knows no other mapping, and creating, exporting and
// importing it costs hundreds of microseconds: arenas do all of that at their start.
//
// What a seal is worth here: see Memory::seal_writes. A write through a read-only mapping is a
// fatal fault of the context that makes it, and under MPS of every client.
//
// Thread: any; each call makes the device's primary context current for its own duration.
class CudaDriver final : public Driver {
 public:
  // Throws DriverUnavailable.
  CudaDriver(const std::string& library, int ordinal);

  // "cuda" for the first GPU, else "cuda:N", as this process numbers them. A worker attaches with
  // that where it sees the same GPUs, else with its own name of the GPU.
  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] DeviceFacts facts() const override;
  [[nodiscard]] std::size_t granularity() const override { return granularity_; }
  [[nodiscard]] bool maps_parts() const override { return false; }
  [[nodiscard]] Driver& host() override;
  void require_sealed(int fd) const override;
  [[nodiscard]] std::unique_ptr<Reservation> reserve(std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Memory> create(std::size_t bytes, const char* label) override;
  [[nodiscard]] std::unique_ptr<Memory> import_fd(OwnedFd fd, std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Event> copy(std::byte* to, const std::byte* from,
                                            std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Partition> partition(std::span<const int> units) override;

  [[nodiscard]] const std::shared_ptr<const CudaContext>& context() const { return context_; }

 private:
  [[nodiscard]] std::size_t rounded(std::size_t bytes) const;
  void clear(const Memory& memory);

  std::shared_ptr<const CudaContext> context_;
  std::string name_;
  std::size_t granularity_ = 0;
  Mutex mutex_;
  std::shared_ptr<GreenShares> shares_ WINDROW_GUARDED_BY(mutex_);  // made by the first partition
};

}  // namespace windrow
