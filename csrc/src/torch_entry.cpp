#include "windrow/torch_entry.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "windrow/error.h"
#include "windrow/mutex.h"

namespace windrow {
namespace {

// Never destroyed: torch frees tensors in destructors of its own that may run later.
struct Registry {
  Mutex mutex;
  std::array<std::shared_ptr<DeviceAllocator>, kMostDevices> allocators WINDROW_GUARDED_BY(mutex);
};

Registry& registry() {
  static auto* const made = new Registry;
  return *made;
}

thread_local std::string last_error;

std::size_t require_device(int device) {
  if (device < 0 || device >= kMostDevices) {
    throw std::out_of_range("device " + std::to_string(device) + " is none of the " +
                            std::to_string(kMostDevices) + " that the allocator knows");
  }
  return static_cast<std::size_t>(device);
}

std::shared_ptr<DeviceAllocator> allocator_of(int device) {
  const std::size_t index = require_device(device);
  const MutexLock lock(registry().mutex);
  if (!registry().allocators[index]) {
    throw Error("no allocator serves device " + std::to_string(device) +
                "; call windrow_sidecar.memory.allocator.install first");
  }
  return registry().allocators[index];
}

std::vector<std::shared_ptr<DeviceAllocator>> all_allocators() {
  const MutexLock lock(registry().mutex);
  std::vector<std::shared_ptr<DeviceAllocator>> all;
  for (const auto& allocator : registry().allocators) {
    if (allocator) {
      all.push_back(allocator);
    }
  }
  return all;
}

// torch names no device when it records a stream.
std::shared_ptr<DeviceAllocator> allocator_holding(const void* address) {
  for (auto& allocator : all_allocators()) {
    if (allocator->contains(address)) {
      return allocator;
    }
  }
  throw Error("no allocator holds that address");
}

StreamId id_of(void* stream) {
  return reinterpret_cast<StreamId>(stream);
}

// Runs `call`; what it throws becomes this thread's last error.
template <class Call>
bool guarded(const char* what, Call call) noexcept {
  try {
    last_error.clear();
    call();
    return true;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown error";
  }
  std::fprintf(stderr, "windrow: %s: %s\n", what, last_error.c_str());
  return false;
}

}  // namespace

void serve_device(int device, std::shared_ptr<DeviceAllocator> allocator) {
  const std::size_t index = require_device(device);
  const MutexLock lock(registry().mutex);
  // Swapped, so that the one before ends outside of the lock.
  std::swap(registry().allocators[index], allocator);
}

}  // namespace windrow

#define WINDROW_EXPORT __attribute__((visibility("default")))

extern "C" {

WINDROW_EXPORT void* windrow_torch_alloc(ssize_t bytes, int device, void* stream) {
  if (bytes < 0) {
    throw std::invalid_argument("cannot allocate " + std::to_string(bytes) + " bytes");
  }
  return windrow::allocator_of(device)->allocate(static_cast<std::size_t>(bytes),
                                                 windrow::id_of(stream));
}

WINDROW_EXPORT void* windrow_alloc(ssize_t bytes, int device, void* stream) noexcept {
  void* address = nullptr;
  windrow::guarded("allocating", [&] { address = windrow_torch_alloc(bytes, device, stream); });
  return address;
}

WINDROW_EXPORT void windrow_free(void* address, ssize_t /*bytes*/, int device,
                                 void* /*stream*/) noexcept {
  windrow::guarded("freeing", [&] {
    if (address != nullptr) {
      windrow::allocator_of(device)->free(static_cast<std::byte*>(address));
    }
  });
}

WINDROW_EXPORT void windrow_record_stream(void* address, void* stream) noexcept {
  windrow::guarded("recording a stream", [&] {
    windrow::allocator_holding(address)->record_stream(static_cast<std::byte*>(address),
                                                       windrow::id_of(stream));
  });
}

WINDROW_EXPORT void windrow_begin_pool(int device, windrow::GraphPoolId pool,
                                       std::function<bool(void*)> filter) {
  windrow::allocator_of(device)->begin_pool(pool,
                                            [asked = std::move(filter)](windrow::StreamId stream) {
                                              return asked(reinterpret_cast<void*>(stream));
                                            });
}

WINDROW_EXPORT void windrow_end_pool(int device, windrow::GraphPoolId pool) noexcept {
  windrow::guarded("ending a pool of graphs",
                   [&] { windrow::allocator_of(device)->end_pool(pool); });
}

WINDROW_EXPORT void windrow_release_pool(int device, windrow::GraphPoolId pool) noexcept {
  windrow::guarded("releasing a pool of graphs",
                   [&] { windrow::allocator_of(device)->release_pool(pool); });
}

WINDROW_EXPORT void windrow_empty_cache() noexcept {
  windrow::guarded("emptying the cache", [] {
    for (const auto& allocator : windrow::all_allocators()) {
      allocator->release_cached();
    }
  });
}

WINDROW_EXPORT const char* windrow_last_error() noexcept {
  return windrow::last_error.c_str();
}
}
