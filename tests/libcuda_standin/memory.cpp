// Physical memory: a memfd for each allocation, and descriptors that may be imported once.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "captures.h"

namespace windrow::standin {
namespace {

constexpr const char* kName = "libcuda-standin";

Result require_properties(const cuda::AllocationProperties& properties) {
  if (properties.rdma_capable != 0 && !state().rdma) {
    return refuse(cuda::kNotSupported, "memory for RDMA on a device that does not support it");
  }
  const bool sound = properties.type == cuda::kAllocationPinned &&
                     properties.location.type == cuda::kLocationDevice &&
                     is_visible(properties.location.id) && properties.windows_metadata == nullptr;
  return sound ? cuda::kSuccess
               : refuse(cuda::kInvalidValue, "memory must be pinned, on a device that is there");
}

std::string link_of(int fd) {
  char text[256] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return ::readlink(path.c_str(), text, sizeof(text) - 1) < 0 ? "" : text;
}

int reopen(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return ::open(path.c_str(), O_RDWR | O_CLOEXEC);
}

// The mark is the descriptor's own, not its file's: close-on-exec, which ours all have, is taken
// off. A copy, or what another process is sent, is another descriptor and may be imported.
bool was_imported(int fd) {
  return (::fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0;
}
void mark_imported(int fd) {
  ::fcntl(fd, F_SETFD, 0);
}

}  // namespace
}  // namespace windrow::standin

using namespace windrow::standin;
namespace cuda = windrow::cuda;

extern "C" {
#pragma GCC visibility push(default)

Result cuMemGetAllocationGranularity(std::size_t* granularity,
                                     const cuda::AllocationProperties* properties, int /*option*/) {
  const std::scoped_lock lock(state().mutex);
  *granularity = state().granularity;
  const Result result = enter();
  return result != cuda::kSuccess ? result : require_properties(*properties);
}

Result cuMemCreate(cuda::MemoryHandle* handle, std::size_t bytes,
                   const cuda::AllocationProperties* properties, unsigned long long flags) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemCreate"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemCreate"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_properties(*properties); result != cuda::kSuccess) {
    return result;
  }
  if (bytes == 0 || bytes % s.granularity != 0 || flags != 0) {
    return refuse(cuda::kInvalidValue, "the size of memory is not a multiple of the granularity");
  }
  if (s.memory_used + bytes > s.memory) {
    return cuda::kOutOfMemory;
  }
  const int fd = ::memfd_create(kName, MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return cuda::kOutOfMemory;
  }
  // What a tenant before us may have left.
  const unsigned char left = 0xA5;
  if (::pwrite(fd, &left, 1, 0) != 1) {
    return cuda::kOutOfMemory;
  }
  *handle = s.next_handle++;
  s.handles[*handle] = {fd, bytes, properties->rdma_capable != 0};
  s.memory_used += bytes;
  return cuda::kSuccess;
}

Result cuMemGetInfo(std::size_t* free, std::size_t* all) {
  const State& s = state();
  const std::scoped_lock lock(state().mutex);
  *all = s.memory;
  *free = s.memory - std::min(s.memory, s.memory_used);
  return enter_context("cuMemGetInfo");
}

Result cuMemRelease(cuda::MemoryHandle handle) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemRelease"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemRelease"); result != cuda::kSuccess) {
    return result;
  }
  const auto found = s.handles.find(handle);
  if (found == s.handles.end()) {
    return refuse(cuda::kInvalidValue, "an invalid handle released, or one released twice");
  }
  ::close(found->second.fd);
  s.memory_used -= found->second.bytes;
  s.handles.erase(found);
  return cuda::kSuccess;
}

Result cuMemExportToShareableHandle(void* shareable, cuda::MemoryHandle handle, int type,
                                    unsigned long long flags) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemExportToShareableHandle");
      result != cuda::kSuccess) {
    return result;
  }
  const auto found = s.handles.find(handle);
  if (found == s.handles.end() || type != cuda::kHandlePosixDescriptor || flags != 0) {
    return refuse(cuda::kInvalidValue, "an export of an invalid handle, or of another type");
  }
  const int fd = reopen(found->second.fd);
  if (fd < 0) {
    return cuda::kOutOfMemory;
  }
  *static_cast<int*>(shareable) = fd;
  return cuda::kSuccess;
}

Result cuMemImportFromShareableHandle(cuda::MemoryHandle* handle, void* shareable, int type) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemImportFromShareableHandle");
      result != cuda::kSuccess) {
    return result;
  }
  const int shared = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  if (type != cuda::kHandlePosixDescriptor || link_of(shared).find(kName) == std::string::npos) {
    return refuse(cuda::kInvalidValue, "an import of a descriptor that is not exported memory");
  }
  if (was_imported(shared)) {
    return refuse(cuda::kInvalidValue, "a descriptor imported twice, or without close-on-exec");
  }
  struct stat status{};
  const int fd = reopen(shared);
  if (fd < 0 || ::fstat(fd, &status) != 0) {
    return cuda::kOutOfMemory;
  }
  mark_imported(shared);
  *handle = s.next_handle++;
  s.handles[*handle] = {fd, static_cast<std::size_t>(status.st_size)};
  s.memory_used += static_cast<std::size_t>(status.st_size);
  return cuda::kSuccess;
}

#pragma GCC visibility pop
}
