#pragma once

#include <memory>

#include "windrow/cuda_context.h"
#include "windrow/driver.h"

namespace windrow {

// A point in one stream of a GPU.
class CudaEvent final : public Event {
 public:
  // Records what was started on the stream so far. The context is current.
  CudaEvent(std::shared_ptr<const CudaContext> context, cuda::Stream stream)
      : context_(std::move(context)) {
    context_->check(context_->calls().cuEventCreate(&event_, cuda::kEventDisableTiming),
                    "creating an event");
    const auto recorded = context_->calls().cuEventRecord(event_, stream);
    if (recorded != cuda::kSuccess) {
      context_->calls().cuEventDestroy(event_);
      context_->check(recorded, "recording an event");
    }
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent() override {
    const CudaContext::Current current(*context_);
    context_->library().check_quietly(context_->calls().cuEventDestroy(event_), "cuEventDestroy");
  }

  [[nodiscard]] bool done() const override {
    const CudaContext::Current current(*context_);
    const auto result = context_->calls().cuEventQuery(event_);
    if (result == cuda::kNotReady) {
      return false;
    }
    context_->check(result, "asking whether work on the GPU is over");
    return true;
  }
  void wait() const override {
    const CudaContext::Current current(*context_);
    context_->check(context_->calls().cuEventSynchronize(event_), "waiting for work on the GPU");
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  cuda::Event event_ = nullptr;
};

}  // namespace windrow
