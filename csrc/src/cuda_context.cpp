#include "windrow/cuda_context.h"

#include <string>

namespace windrow {

CudaContext::CudaContext(std::shared_ptr<const Libcuda> library, int ordinal)
    : library_(std::move(library)), ordinal_(ordinal) {
  int devices = 0;
  check(calls().cuDeviceGetCount(&devices), "counting the GPUs");
  if (ordinal < 0 || ordinal >= devices) {
    throw DriverUnavailable("there is no GPU " + std::to_string(ordinal) + ": this process sees " +
                            std::to_string(devices) +
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

void CudaContext::require_virtual_memory() const {
  using enum cuda::DeviceAttribute;
  if (attribute(kVirtualMemorySupported) == 0 || attribute(kPosixDescriptorSupported) == 0) {
    throw DriverUnavailable("GPU " + std::to_string(ordinal_) +
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
