// Devices and contexts: one primary context for all devices, a stack of current contexts per
// thread.

#include <array>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace windrow::standin {
namespace {

// Plain memory: drivers that live until the process ends still push contexts then.
thread_local std::array<cuda::Context, 64> stack;
thread_local std::size_t depth = 0;

Result require_device(cuda::Device device) {
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  return is_visible(device) ? cuda::kSuccess
                            : refuse(cuda::kInvalidDevice, "a device that is not there");
}

}  // namespace

cuda::Context primary() {
  return reinterpret_cast<cuda::Context>(0x10);
}
cuda::Context current() {
  return depth == 0 ? nullptr : stack[depth - 1];
}
bool push_current(cuda::Context context) {
  if (depth == stack.size()) {
    return false;
  }
  stack[depth++] = context;
  return true;
}
cuda::Context pop_current() {
  return depth == 0 ? nullptr : stack[--depth];
}

}  // namespace windrow::standin

using namespace windrow::standin;
namespace cuda = windrow::cuda;

extern "C" {
#pragma GCC visibility push(default)

Result cuDriverGetVersion(int* version) {
  *version = driver_version();
  return cuda::kSuccess;
}

Result cuGetErrorName(Result result, const char** name) {
  switch (result) {
    case cuda::kSuccess:
      *name = "CUDA_SUCCESS";
      break;
    case cuda::kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case cuda::kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case cuda::kNotInitialized:
      *name = "CUDA_ERROR_NOT_INITIALIZED";
      break;
    case cuda::kNoDevice:
      *name = "CUDA_ERROR_NO_DEVICE";
      break;
    case cuda::kInvalidDevice:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      break;
    case cuda::kInvalidImage:
      *name = "CUDA_ERROR_INVALID_IMAGE";
      break;
    case cuda::kInvalidContext:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      break;
    case cuda::kInvalidHandle:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case cuda::kNotFound:
      *name = "CUDA_ERROR_NOT_FOUND";
      break;
    case cuda::kNotReady:
      *name = "CUDA_ERROR_NOT_READY";
      break;
    case cuda::kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      break;
    case cuda::kNotPermitted:
      *name = "CUDA_ERROR_NOT_PERMITTED";
      break;
    case cuda::kNotSupported:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      break;
    case cuda::kInvalidResourceConfiguration:
      *name = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION";
      break;
    case cuda::kStreamDetached:
      *name = "CUDA_ERROR_STREAM_DETACHED";
      break;
    default:
      return cuda::kInvalidValue;
  }
  return cuda::kSuccess;
}

Result cuGetErrorString(Result result, const char** text) {
  *text = result == cuda::kSuccess ? "no error" : "said by the stand-in for libcuda";
  return cuda::kSuccess;
}

Result cuDeviceGetCount(int* count) {
  const std::scoped_lock lock(state().mutex);
  *count = static_cast<int>(state().visible.size());
  if (!state().initialized) {
    return cuda::kNotInitialized;  // an answer to the question whether this process uses CUDA
  }
  return enter();
}

Result cuDeviceGet(cuda::Device* device, int ordinal) {
  const std::scoped_lock lock(state().mutex);
  *device = ordinal;
  return require_device(ordinal);
}

Result cuDeviceGetName(char* name, int length, cuda::Device device) {
  const std::scoped_lock lock(state().mutex);
  std::strncpy(name, "stand-in for a GPU", static_cast<std::size_t>(length));
  return require_device(device);
}

Result cuDeviceTotalMem(std::size_t* bytes, cuda::Device device) {
  const std::scoped_lock lock(state().mutex);
  *bytes = state().memory;
  return require_device(device);
}

Result cuDeviceGetUuid(cuda::Uuid* uuid, cuda::Device device) {
  const std::scoped_lock lock(state().mutex);
  const Result result = require_device(device);
  if (result == cuda::kSuccess) {
    *uuid = uuid_of(state().visible.at(static_cast<std::size_t>(device)));
  }
  return result;
}

Result cuDeviceGetAttribute(int* value, cuda::DeviceAttribute attribute, cuda::Device device) {
  const std::scoped_lock lock(state().mutex);
  switch (attribute) {
    case cuda::DeviceAttribute::kMultiprocessorCount:
      *value = static_cast<int>(state().sms);
      break;
    case cuda::DeviceAttribute::kComputeCapabilityMajor:
      *value = state().capability;
      break;
    case cuda::DeviceAttribute::kRdmaOfVirtualMemorySupported:
      *value = state().rdma ? 1 : 0;
      break;
    case cuda::DeviceAttribute::kMpsEnabled:
      *value = static_cast<int>(setting("WINDROW_STANDIN_MPS", state().is_mps_client ? 1 : 0));
      break;
    default:
      *value = 1;
  }
  return require_device(device);
}

Result cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = require_device(device); result != cuda::kSuccess) {
    return result;
  }
  ++state().primary_retained;
  *context = primary();
  return cuda::kSuccess;
}

Result cuDevicePrimaryCtxRelease(cuda::Device device) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = require_device(device); result != cuda::kSuccess) {
    return result;
  }
  if (state().primary_retained == 0) {
    return refuse(cuda::kInvalidContext, "a primary context released more often than retained");
  }
  --state().primary_retained;
  return cuda::kSuccess;
}

Result cuCtxPushCurrent(cuda::Context context) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  const bool lives =
      context == primary() ? state().primary_retained > 0 : state().foreign.count(context) > 0;
  if (!lives) {
    return refuse(cuda::kInvalidContext, "a context made current that does not live");
  }
  return push_current(context) ? cuda::kSuccess
                               : refuse(cuda::kInvalidValue, "contexts pushed and never popped");
}

Result cuCtxPopCurrent(cuda::Context* context) {
  const std::scoped_lock lock(state().mutex);
  *context = pop_current();
  return *context != nullptr ? cuda::kSuccess
                             : refuse(cuda::kInvalidContext, "no context to take from the thread");
}

#pragma GCC visibility pop
}
