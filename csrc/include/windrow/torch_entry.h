#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>

#include "windrow/device_allocator.h"

namespace windrow {

inline constexpr int kMostDevices = 16;

// From now on the C entry points serve that device from this allocator; nullptr: from none. It
// stays alive until the next call for the device, for torch may free at any time, also while the
// interpreter goes down. Thread: any. Throws std::out_of_range.
void serve_device(int device, std::shared_ptr<DeviceAllocator> allocator);

}  // namespace windrow

// What torch.cuda.memory.CUDAPluggableAllocator calls; `stream` is a cudaStream_t. No exception
// leaves those that are noexcept: they say on stderr what went wrong, and windrow_last_error()
// reports it to the thread that called.
extern "C" {

// nullptr for 0 bytes and on every error.
void* windrow_alloc(ssize_t bytes, int device, void* stream) noexcept;

// As windrow_alloc, but throws std::runtime_error on an error, as torch's own allocators do: torch
// does not look at what it gets, so a nullptr would end in a kernel that faults, and under MPS a
// fault of the worker ends decode too. The one entry point that may be called from C++ only.
void* windrow_torch_alloc(ssize_t bytes, int device, void* stream);

void windrow_free(void* address, ssize_t bytes, int device, void* stream) noexcept;
void windrow_record_stream(void* address, void* stream) noexcept;

// The pool of a capture of CUDA graphs (DeviceAllocator::begin_pool). torch calls the first before
// the capture begins, so it may throw as windrow_torch_alloc does; from C++ only. `filter` says of
// a cudaStream_t whether it captures.
void windrow_begin_pool(int device, windrow::GraphPoolId pool, std::function<bool(void*)> filter);
void windrow_end_pool(int device, windrow::GraphPoolId pool) noexcept;
void windrow_release_pool(int device, windrow::GraphPoolId pool) noexcept;

// torch.cuda.empty_cache.
void windrow_empty_cache() noexcept;

// Text of this thread's last error; empty when there was none. Valid until its next call.
const char* windrow_last_error() noexcept;
}
