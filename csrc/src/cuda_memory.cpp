#include "cuda_memory.h"

#include <fcntl.h>

#include <cstdio>
#include <string>

#include "cuda_event.h"

namespace windrow {
namespace {

// What a driver may answer that knows no read-only mappings.
bool is_refusal(cuda::Result result) {
  return result == cuda::kInvalidValue || result == cuda::kNotSupported ||
         result == cuda::kNotPermitted;
}

}  // namespace

cuda::AllocationProperties allocation_properties(const CudaContext& context) {
  cuda::AllocationProperties properties{};
  properties.type = cuda::kAllocationPinned;
  properties.handle_types = cuda::kHandlePosixDescriptor;
  properties.location = {.type = cuda::kLocationDevice, .id = context.device()};
  // Prefill writes KV over RDMA, and only such memory can be registered for it.
  properties.rdma_capable =
      context.attribute(cuda::DeviceAttribute::kRdmaOfVirtualMemorySupported) != 0 ? 1 : 0;
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
  wait_for_work();
  for (const auto& [offset, mapping] : mappings_) {
    library.check_quietly(context_->calls().cuMemUnmap(base_ + offset, mapping.granules),
                          "cuMemUnmap");
  }
  library.check_quietly(context_->calls().cuMemAddressFree(base_, granules_), "cuMemAddressFree");
}

void CudaReservation::map(std::size_t offset, const Memory& memory, std::size_t memory_offset,
                          std::size_t bytes, Access access) {
  const Piece piece{&memory, memory_offset, bytes};
  const CudaMemory& physical = require_whole(piece, access);
  const auto found = mappings_.find(offset);
  if (found != mappings_.end() && found->second.handle == physical.handle()) {
    return change_access(offset, physical.granules(), access);
  }
  map_run(offset, {&piece, 1}, access);
}

void CudaReservation::map_run(std::size_t offset, std::span<const Piece> pieces, Access access) {
  std::size_t end = offset;
  for (const Piece& piece : pieces) {
    end += require_whole(piece, access).granules();
  }
  require_free(offset, end - offset);
  const CudaContext::Current current(*context_);
  std::size_t at = offset;
  try {
    for (const Piece& piece : pieces) {
      at += map_piece(at, piece);
    }
    set_access(offset, end - offset, access);
  } catch (...) {
    take_back(offset, at);
    throw;
  }
}

// Without access yet. Returns how many bytes it took.
std::size_t CudaReservation::map_piece(std::size_t offset, const Piece& piece) {
  const auto& physical = dynamic_cast<const CudaMemory&>(*piece.memory);
  const Mapping mapping{piece.bytes, physical.granules(), physical.handle()};
  const auto entry = mappings_.emplace(offset, mapping).first;  // first: it may throw
  const auto made =
      context_->calls().cuMemMap(base_ + offset, mapping.granules, 0, mapping.handle->get(), 0);
  if (made != cuda::kSuccess) {
    mappings_.erase(entry);
    context_->check(made, "mapping " + std::to_string(piece.bytes) + " bytes of device memory");
  }
  return mapping.granules;
}

void CudaReservation::take_back(std::size_t begin, std::size_t end) {
  const auto last = mappings_.lower_bound(end);
  for (auto mapping = mappings_.lower_bound(begin); mapping != last;) {
    context_->library().check_quietly(
        context_->calls().cuMemUnmap(base_ + mapping->first, mapping->second.granules),
        "cuMemUnmap");
    mapping = mappings_.erase(mapping);
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
  if (mappings_.empty()) {
    throw Error("nothing is mapped, so it is not known who could read it");
  }
  unsigned type = 0;
  context_->check(context_->calls().cuPointerGetAttribute(&type, cuda::kPointerMemoryType,
                                                          base_ + mappings_.begin()->first),
                  "asking who can read device memory");
  return {.processors = type == cuda::kMemoryTypeHost, .device = context_->ordinal()};
}

const CudaMemory& CudaReservation::require_whole(const Piece& piece, Access access) {
  const auto& physical = dynamic_cast<const CudaMemory&>(*piece.memory);
  if (piece.offset != 0 || piece.bytes != physical.bytes()) {
    throw Error("device memory of " + std::to_string(physical.bytes()) +
                " bytes is mapped whole or not at all");
  }
  if (physical.sealed() && access == Access::kReadWrite) {
    throw Error("sealed device memory is mapped read-only");
  }
  return physical;
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

// Taking access away is a courtesy (see Memory::seal_writes), and a driver may refuse it: the
// mapping stays as it is then.
void CudaReservation::change_access(std::size_t offset, std::size_t granules, Access access) {
  const CudaContext::Current current(*context_);
  const auto changed = try_set_access(offset, granules, access);
  if (access == Access::kReadOnly && is_refusal(changed)) {
    tell_writable(granules, changed);
    return;
  }
  context_->check(changed, "changing the access of device memory");
}

void CudaReservation::set_access(std::size_t offset, std::size_t granules, Access access) {
  auto given = try_set_access(offset, granules, access);
  // Nobody writes there, with or without the driver's help: a worker must not fail for want of it.
  if (access == Access::kReadOnly && is_refusal(given)) {
    tell_writable(granules, given);
    given = try_set_access(offset, granules, Access::kReadWrite);
  }
  context_->check(given, "setting the access of device memory");
}

void CudaReservation::tell_writable(std::size_t granules, cuda::Result refusal) const {
  std::fprintf(stderr,
               "windrow: %zu bytes of device memory stay writable for this process: the driver "
               "says %s\n",
               granules, context_->library().describe(refusal).c_str());
}

// What still runs would find its memory gone: an illegal access, which ends all of the process's
// work on the GPU.
void CudaReservation::wait_for_work() const {
  const auto copied = context_->calls().cuStreamSynchronize(context_->copies());
  context_->library().check_quietly(copied, "waiting for copies");
  if (copied != cuda::kSuccess) {
    return;  // the context is broken, or libcuda has gone before us at the end of the process
  }
  try {
    if (const auto all = CudaEvent::behind_all(context_)) {
      all->wait();
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "windrow: %s\n", error.what());
  }
}

cuda::Result CudaReservation::try_set_access(std::size_t offset, std::size_t granules,
                                             Access access) {
  const cuda::AccessDesc desc{
      .location = {.type = cuda::kLocationDevice, .id = context_->device()},
      .flags = access == Access::kReadOnly ? cuda::kAccessRead : cuda::kAccessReadWrite};
  return context_->calls().cuMemSetAccess(base_ + offset, granules, &desc, 1);
}

void CudaReservation::finish_copies() const {
  context_->check(context_->calls().cuStreamSynchronize(context_->copies()), "waiting for copies");
}

}  // namespace windrow
