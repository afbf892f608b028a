#include "windrow/cuda_context.h"

#include <cstdio>
#include <string>

namespace windrow {

CudaContext::CudaContext(std::shared_ptr<const Libcuda> library, int ordinal)
    : library_(std::move(library)), ordinal_(ordinal) {
  int devices = 0;
  check(calls().cuDeviceGetCount(&devices), "counting the GPUs");
  if (ordinal < 0 || ordinal >= devices) {
    throw DriverUnavailable("GPU " + std::to_string(ordinal) +
                            " does not exist: this process sees " + std::to_string(devices) +
                            "; look at CUDA_VISIBLE_DEVICES and the container's nvidia.com/gpu");
  }
  check(calls().cuDeviceGet(&device_, ordinal), "opening GPU " + std::to_string(ordinal));
  require_virtual_memory();
  check(calls().cuDevicePrimaryCtxRetain(&context_, device_), "retaining the primary context");
  try {
    make_stream();
  } catch (...) {
    calls().cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

CudaContext::~CudaContext() {
  {
    const Current current(*this);
    library_->check_quietly(calls().cuStreamDestroy(copies_), "destroying the stream of copies");
  }
  library_->check_quietly(calls().cuDevicePrimaryCtxRelease(device_),
                          "releasing the primary context");
}

int CudaContext::attribute(cuda::DeviceAttribute which) const {
  int value = 0;
  check(calls().cuDeviceGetAttribute(&value, which, device_), "reading an attribute of the GPU");
  return value;
}

bool CudaContext::is_mps_client() const {
  int value = 0;
  const auto asked =
      calls().cuDeviceGetAttribute(&value, cuda::DeviceAttribute::kMpsEnabled, device_);
  return asked == cuda::kSuccess && value != 0;
}

std::string CudaContext::describe_memory() const {
  const Current current(*this);
  std::size_t free = 0;
  std::size_t all = 0;
  if (calls().cuMemGetInfo(&free, &all) != cuda::kSuccess) {
    return "how much is free it does not tell";
  }
  char text[64];
  constexpr double kGiB = 1 << 30;
  std::snprintf(text, sizeof(text), "%.1f of %.1f GiB are free", static_cast<double>(free) / kGiB,
                static_cast<double>(all) / kGiB);
  return text;
}

void CudaContext::require_virtual_memory() const {
  using enum cuda::DeviceAttribute;
  if (attribute(kVirtualMemorySupported) == 0 || attribute(kPosixDescriptorSupported) == 0) {
    throw DriverUnavailable("GPU " + std::to_string(ordinal_) + " with a driver of " +
                            cuda_version_text(library_->version()) +
                            " cannot map memory at addresses of our choice and share it by "
                            "descriptor; Windrow needs a GPU and a driver that can (Volta or "
                            "newer, on Linux)");
  }
}

void CudaContext::make_stream() {
  const Current current(*this);
  check(calls().cuStreamCreate(&copies_, cuda::kStreamNonBlocking), "creating a stream");
}

CudaContext::Current::Current(const CudaContext& context)
    : context_(context),
      pushed_(context.calls().cuCtxPushCurrent(context.context_) == cuda::kSuccess) {}

CudaContext::Current::~Current() {
  cuda::Context popped = nullptr;
  if (pushed_) {
    context_.library_->check_quietly(context_.calls().cuCtxPopCurrent(&popped),
                                     "taking the context back");
  }
}

}  // namespace windrow
