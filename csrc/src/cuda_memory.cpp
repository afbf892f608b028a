#include "cuda_memory.h"

#include <fcntl.h>

#include <string>

namespace windrow {

cuda::AllocationProperties allocation_properties(const CudaContext& context) {
  cuda::AllocationProperties properties{};
  properties.type = cuda::kAllocationPinned;
  properties.handle_types = cuda::kHandlePosixDescriptor;
  properties.location = {.type = cuda::kLocationDevice, .id = context.device()};
  return properties;
}

CudaHandle::~CudaHandle() {
  const CudaContext::Current current(*context_);
  context_->library().check_quietly(context_->calls().cuMemRelease(handle_), "cuMemRelease");
}

OwnedFd CudaMemory::export_fd() const {
  const CudaContext& context = handle_->context();
  const CudaContext::Current current(context);
  int fd = -1;
  context.check(context.calls().cuMemExportToShareableHandle(&fd, handle_->get(),
                                                             cuda::kHandlePosixDescriptor, 0),
                "exporting " + std::to_string(bytes_) + " bytes of device memory");
  OwnedFd exported(fd);
  // CUDA does not say whether a child process would inherit it.
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    throw errno_error("keeping exported memory from child processes");
  }
  return exported;
}

CudaReservation::CudaReservation(std::shared_ptr<const CudaContext> context, std::size_t bytes,
                                 std::size_t granules)
    : context_(std::move(context)), bytes_(bytes), granules_(granules) {
  const CudaContext::Current current(*context_);
  context_->check(context_->calls().cuMemAddressReserve(&base_, granules_, 0, 0, 0),
                  "reserving " + std::to_string(bytes) + " bytes of device addresses");
}

CudaReservation::~CudaReservation() {
  const CudaContext::Current current(*context_);
  const Libcuda& library = context_->library();
  library.check_quietly(context_->calls().cuStreamSynchronize(context_->copies()),
                        "waiting for copies");
  for (const auto& [offset, mapping] : mappings_) {
    library.check_quietly(context_->calls().cuMemUnmap(base_ + offset, mapping.granules),
                          "cuMemUnmap");
  }
  library.check_quietly(context_->calls().cuMemAddressFree(base_, granules_), "cuMemAddressFree");
}

void CudaReservation::map(std::size_t offset, const Memory& memory, std::size_t memory_offset,
                          std::size_t bytes, Access access) {
  const auto& physical = dynamic_cast<const CudaMemory&>(memory);
  if (memory_offset != 0 || bytes != physical.bytes()) {
    throw Error("device memory of " + std::to_string(physical.bytes()) +
                " bytes is mapped whole or not at all");
  }
  if (physical.sealed() && access == Access::kReadWrite) {
    throw Error("sealed device memory is mapped read-only");
  }
  const CudaContext::Current current(*context_);
  const auto found = mappings_.find(offset);
  if (found != mappings_.end() && found->second.handle == physical.handle()) {
    return set_access(offset, physical.granules(), access);
  }
  require_free(offset, physical.granules());
  context_->check(context_->calls().cuMemMap(base_ + offset, physical.granules(), 0,
                                             physical.handle()->get(), 0),
                  "mapping " + std::to_string(bytes) + " bytes of device memory");
  try {
    set_access(offset, physical.granules(), access);
    mappings_.insert({offset, {bytes, physical.granules(), physical.handle()}});
  } catch (...) {
    context_->calls().cuMemUnmap(base_ + offset, physical.granules());
    throw;
  }
}

void CudaReservation::unmap(std::size_t offset, std::size_t bytes) {
  const auto found = mappings_.find(offset);
  if (found == mappings_.end() || found->second.bytes != bytes) {
    throw Error("no mapping of " + std::to_string(bytes) + " bytes begins at offset " +
                std::to_string(offset));
  }
  const CudaContext::Current current(*context_);
  finish_copies();
  context_->check(context_->calls().cuMemUnmap(base_ + offset, found->second.granules),
                  "unmapping " + std::to_string(bytes) + " bytes of device memory");
  mappings_.erase(found);
}

MemorySpace CudaReservation::space() const {
  const CudaContext::Current current(*context_);
  unsigned type = 0;
  context_->check(context_->calls().cuPointerGetAttribute(&type, cuda::kPointerMemoryType, base_),
                  "asking who can read device memory");
  return {.processors = type == cuda::kMemoryTypeHost, .device = context_->ordinal()};
}

void CudaReservation::require_free(std::size_t offset, std::size_t granules) const {
  if (offset > granules_ || granules > granules_ - offset) {
    throw Error("the range is outside of the reservation of " + std::to_string(bytes_) + " bytes");
  }
  const auto after = mappings_.lower_bound(offset);
  const bool meets_next = after != mappings_.end() && after->first < offset + granules;
  const bool meets_last = after != mappings_.begin() &&
                          std::prev(after)->first + std::prev(after)->second.granules > offset;
  if (meets_next || meets_last) {
    throw Error("something is mapped at offset " + std::to_string(offset) + "; unmap it first");
  }
}

void CudaReservation::set_access(std::size_t offset, std::size_t granules, Access access) {
  const cuda::AccessDesc desc{
      .location = {.type = cuda::kLocationDevice, .id = context_->device()},
      .flags = access == Access::kReadOnly ? cuda::kAccessRead : cuda::kAccessReadWrite};
  context_->check(context_->calls().cuMemSetAccess(base_ + offset, granules, &desc, 1),
                  "setting the access of device memory");
}

void CudaReservation::finish_copies() const {
  context_->check(context_->calls().cuStreamSynchronize(context_->copies()), "waiting for copies");
}

}  // namespace windrow
