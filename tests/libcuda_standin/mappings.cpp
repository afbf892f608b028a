// Addresses: reservations, whole mappings in them, and access, by mmap and mprotect. What CUDA
// would make a fault of the GPU is a fault of the processor here.
#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "captures.h"

namespace windrow::standin {
namespace {

void* pointer(DevicePtr address) {
  return reinterpret_cast<void*>(address);
}

// The reservation that holds all of the range, or the end.
std::map<DevicePtr, Reservation>::iterator around(DevicePtr begin, std::size_t bytes) {
  auto& all = state().reservations;
  auto found = all.upper_bound(begin);
  if (found == all.begin()) {
    return all.end();
  }
  --found;
  const DevicePtr end = found->first + found->second.bytes;
  return begin + bytes <= end ? found : all.end();
}

// One address space: what CUDA did not reserve is the host's own.
bool is_host_memory(DevicePtr address) {
  return around(address, 1) == state().reservations.end();
}

bool is_mapped_anywhere(const Reservation& reservation, DevicePtr begin, std::size_t bytes) {
  for (const auto& [at, mapping] : reservation.mappings) {
    if (at < begin + bytes && begin < at + mapping.bytes) {
      return true;
    }
  }
  return false;
}

Result require_mappable(DevicePtr at, std::size_t bytes, std::size_t offset,
                        const Physical& physical) {
  const std::size_t granularity = state().granularity;
  if (offset != 0) {
    return refuse(cuda::kInvalidValue, "cuMemMap with an offset that is not 0");
  }
  if (bytes == 0 || bytes % granularity != 0 || at % granularity != 0) {
    return refuse(cuda::kInvalidValue, "a mapping that is not a multiple of the granularity");
  }
  if (bytes != physical.bytes) {
    return refuse(cuda::kInvalidValue, "a mapping that is not as large as its memory");
  }
  const auto reservation = around(at, bytes);
  if (reservation == state().reservations.end()) {
    return refuse(cuda::kInvalidValue, "a mapping at addresses that are not reserved");
  }
  if (is_mapped_anywhere(reservation->second, at, bytes)) {
    return refuse(cuda::kInvalidValue, "a mapping where something is mapped");
  }
  return cuda::kSuccess;
}

// The mappings that make up exactly that range, or none.
std::vector<DevicePtr> tiles(const Reservation& reservation, DevicePtr begin, std::size_t bytes) {
  std::vector<DevicePtr> found;
  DevicePtr at = begin;
  while (at < begin + bytes) {
    const auto mapping = reservation.mappings.find(at);
    if (mapping == reservation.mappings.end()) {
      return {};
    }
    found.push_back(at);
    at += mapping->second.bytes;
  }
  return at == begin + bytes ? found : std::vector<DevicePtr>{};
}

}  // namespace

Result require_access(DevicePtr begin, std::size_t bytes, int access, const char* call) {
  if (is_host_memory(begin)) {
    return cuda::kSuccess;
  }
  const auto reservation = around(begin, bytes);
  DevicePtr at = begin;
  while (reservation != state().reservations.end() && at < begin + bytes) {
    auto mapping = reservation->second.mappings.upper_bound(at);
    if (mapping == reservation->second.mappings.begin()) {
      break;
    }
    --mapping;
    if (at >= mapping->first + mapping->second.bytes ||
        (mapping->second.access & access) != access) {
      break;
    }
    at = mapping->first + mapping->second.bytes;
  }
  return at >= begin + bytes
             ? cuda::kSuccess
             : refuse(cuda::kIllegalAddress,
                      std::string(call) + " over memory that is not mapped with that access");
}

}  // namespace windrow::standin

using namespace windrow::standin;
namespace cuda = windrow::cuda;

extern "C" {
#pragma GCC visibility push(default)

Result cuMemAddressReserve(DevicePtr* address, std::size_t bytes, std::size_t alignment,
                           DevicePtr wanted, unsigned long long flags) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemAddressReserve"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemAddressReserve"); result != cuda::kSuccess) {
    return result;
  }
  if (bytes == 0 || bytes % s.granularity != 0 || alignment != 0 || wanted != 0 || flags != 0) {
    return refuse(cuda::kInvalidValue, "a reservation that is not a multiple of the granularity");
  }
  // More than asked for, so that an aligned part of it can be kept.
  const std::size_t more = bytes + s.granularity;
  void* base = ::mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return cuda::kOutOfMemory;
  }
  const auto begin = reinterpret_cast<DevicePtr>(base);
  const DevicePtr aligned = (begin + s.granularity - 1) / s.granularity * s.granularity;
  if (aligned > begin) {
    ::munmap(base, aligned - begin);
  }
  ::munmap(pointer(aligned + bytes), begin + more - (aligned + bytes));
  s.reservations[aligned] = {.bytes = bytes, .mappings = {}};
  *address = aligned;
  return cuda::kSuccess;
}

Result cuMemAddressFree(DevicePtr address, std::size_t bytes) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemAddressFree"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemAddressFree"); result != cuda::kSuccess) {
    return result;
  }
  const auto found = s.reservations.find(address);
  if (found == s.reservations.end() || found->second.bytes != bytes) {
    return refuse(cuda::kInvalidValue, "addresses freed that are not one whole reservation");
  }
  if (!found->second.mappings.empty()) {
    return refuse(cuda::kInvalidValue, "a reservation freed that still has mappings");
  }
  ::munmap(pointer(address), bytes);
  s.reservations.erase(found);
  return cuda::kSuccess;
}

Result cuMemMap(DevicePtr address, std::size_t bytes, std::size_t offset, cuda::MemoryHandle handle,
                unsigned long long /*flags*/) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  ++s.maps;
  if (const Result result = enter_context("cuMemMap"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemMap"); result != cuda::kSuccess) {
    return result;
  }
  const auto physical = s.handles.find(handle);
  if (physical == s.handles.end()) {
    return refuse(cuda::kInvalidValue, "a mapping of a handle that is released or never was");
  }
  if (const Result result = require_mappable(address, bytes, offset, physical->second);
      result != cuda::kSuccess) {
    return result;
  }
  if (::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second.fd, 0) ==
      MAP_FAILED) {
    return cuda::kOutOfMemory;
  }
  around(address, bytes)->second.mappings[address] = {.bytes = bytes};
  return cuda::kSuccess;
}

Result cuMemUnmap(DevicePtr address, std::size_t bytes) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuMemUnmap"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemUnmap"); result != cuda::kSuccess) {
    return result;
  }
  const auto reservation = around(address, bytes);
  if (reservation == s.reservations.end()) {
    return refuse(cuda::kInvalidValue, "unmapping addresses that are not reserved");
  }
  const auto mapped = tiles(reservation->second, address, bytes);
  if (mapped.empty()) {
    return refuse(cuda::kInvalidValue, "unmapping something else than whole mappings");
  }
  if (is_pending(address, bytes)) {
    return refuse(cuda::kIllegalAddress, "unmapping memory that pending work uses");
  }
  ::mmap(pointer(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (const DevicePtr at : mapped) {
    reservation->second.mappings.erase(at);
  }
  return cuda::kSuccess;
}

Result cuMemSetAccess(DevicePtr address, std::size_t bytes, const cuda::AccessDesc* desc,
                      std::size_t count) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  ++s.accesses;
  if (const Result result = enter_context("cuMemSetAccess"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuMemSetAccess"); result != cuda::kSuccess) {
    return result;
  }
  if (count != 1 || desc->location.type != cuda::kLocationDevice ||
      !is_visible(desc->location.id)) {
    return refuse(cuda::kInvalidDevice, "access for a device that is not there");
  }
  const auto reservation = around(address, bytes);
  const auto mapped = reservation == s.reservations.end()
                          ? std::vector<DevicePtr>{}
                          : tiles(reservation->second, address, bytes);
  if (mapped.empty()) {
    return refuse(cuda::kInvalidValue, "access set over something else than whole mappings");
  }
  const bool is_narrowing = std::any_of(mapped.begin(), mapped.end(), [&](DevicePtr at) {
    const int held = reservation->second.mappings[at].access;
    return (held & ~desc->flags) != 0;
  });
  if ((is_narrowing && !s.narrows) || (desc->flags == cuda::kAccessRead && !s.reads)) {
    return setting("WINDROW_STANDIN_REFUSES_WITH", cuda::kNotSupported);
  }
  const int protection = (desc->flags & cuda::kAccessRead ? PROT_READ : PROT_NONE) |
                         (desc->flags == cuda::kAccessReadWrite ? PROT_WRITE : PROT_NONE);
  if (::mprotect(pointer(address), bytes, protection) != 0) {
    return cuda::kInvalidValue;
  }
  for (const DevicePtr at : mapped) {
    reservation->second.mappings[at].access = desc->flags;
  }
  return cuda::kSuccess;
}

// The honest answer: processors can read what is device memory here.
Result cuPointerGetAttribute(void* data, int attribute, DevicePtr address) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuPointerGetAttribute"); result != cuda::kSuccess) {
    return result;
  }
  const auto reservation = around(address, 1);
  if (attribute != cuda::kPointerMemoryType || reservation == state().reservations.end() ||
      !is_mapped_anywhere(reservation->second, address, 1)) {
    return refuse(cuda::kInvalidValue, "an attribute of an address that is not mapped");
  }
  *static_cast<unsigned*>(data) = cuda::kMemoryTypeHost;
  return cuda::kSuccess;
}

#pragma GCC visibility pop
}
