#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include "windrow/cuda_context.h"
#include "windrow/driver.h"

namespace windrow {

[[nodiscard]] cuda::AllocationProperties allocation_properties(const CudaContext& context);

// One handle of physical memory. Memories and mappings share it, so that its number names nothing
// else as long as either is there.
class CudaHandle {
 public:
  CudaHandle(std::shared_ptr<const CudaContext> context, cuda::MemoryHandle handle)
      : context_(std::move(context)), handle_(handle) {}
  CudaHandle(const CudaHandle&) = delete;
  CudaHandle& operator=(const CudaHandle&) = delete;
  ~CudaHandle();

  [[nodiscard]] const CudaContext& context() const { return *context_; }
  [[nodiscard]] cuda::MemoryHandle get() const { return handle_; }

 private:
  std::shared_ptr<const CudaContext> context_;
  cuda::MemoryHandle handle_;
};

// Physical memory of `granules` bytes, of which the user asked for `bytes`.
class CudaMemory final : public Memory {
 public:
  CudaMemory(std::shared_ptr<const CudaHandle> handle, std::size_t bytes, std::size_t granules)
      : handle_(std::move(handle)), bytes_(bytes), granules_(granules) {}

  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  [[nodiscard]] OwnedFd export_fd() const override;
  void seal_writes() override { sealed_ = true; }

  [[nodiscard]] bool sealed() const { return sealed_; }
  [[nodiscard]] const std::shared_ptr<const CudaHandle>& handle() const { return handle_; }
  [[nodiscard]] std::size_t granules() const { return granules_; }

 private:
  std::shared_ptr<const CudaHandle> handle_;
  std::size_t bytes_;
  std::size_t granules_;
  bool sealed_ = false;
};

class CudaReservation final : public Reservation {
 public:
  CudaReservation(std::shared_ptr<const CudaContext> context, std::size_t bytes,
                  std::size_t granules);
  CudaReservation(const CudaReservation&) = delete;
  CudaReservation& operator=(const CudaReservation&) = delete;
  ~CudaReservation() override;

  [[nodiscard]] std::byte* data() const override { return reinterpret_cast<std::byte*>(base_); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  void map(std::size_t offset, const Memory& memory, std::size_t memory_offset, std::size_t bytes,
           Access access) override;
  void map_run(std::size_t offset, std::span<const Piece> pieces, Access access) override;
  void unmap(std::size_t offset, std::size_t bytes) override;
  [[nodiscard]] MemorySpace space() const override;

 private:
  struct Mapping {
    std::size_t bytes;  // as asked for
    std::size_t granules;
    std::shared_ptr<const CudaHandle> handle;
  };

  // Throws Error where CUDA does not map it so.
  [[nodiscard]] static const CudaMemory& require_whole(const Piece& piece, Access access);
  std::size_t map_piece(std::size_t offset, const Piece& piece);
  void take_back(std::size_t begin, std::size_t end);
  void require_free(std::size_t offset, std::size_t granules) const;
  void change_access(std::size_t offset, std::size_t granules, Access access);
  [[nodiscard]] cuda::Result try_set_access(std::size_t offset, std::size_t granules,
                                            Access access);
  void set_access(std::size_t offset, std::size_t granules, Access access);
  void tell_writable(std::size_t granules, cuda::Result refusal) const;
  // Unmapping does not wait for anything, and memory that a copy still reads would be a fault.
  void finish_copies() const;
  void wait_for_work() const;

  std::shared_ptr<const CudaContext> context_;
  std::size_t bytes_;
  std::size_t granules_;
  cuda::DevicePtr base_ = 0;
  std::map<std::size_t, Mapping> mappings_;  // by offset
};

}  // namespace windrow
