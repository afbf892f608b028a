#pragma once

#include <memory>

#include "windrow/cuda_context.h"
#include "windrow/driver.h"

namespace windrow {

// A point in the work of a GPU.
class CudaEvent final : public Event {
 public:
  // Behind what was started on the stream so far. The context is current.
  CudaEvent(std::shared_ptr<const CudaContext> context, cuda::Stream stream)
      : CudaEvent(std::move(context)) {
    context_->check(context_->calls().cuEventRecord(event_, stream), "recording an event");
  }
  // Behind what was started on any stream so far, those of green contexts among them; nullptr where
  // the driver cannot tell. The context is current.
  [[nodiscard]] static std::unique_ptr<Event> behind_all(
      std::shared_ptr<const CudaContext> context) {
    const auto record = context->library().record_context();
    if (record == nullptr) {
      return nullptr;
    }
    std::unique_ptr<CudaEvent> event(new CudaEvent(std::move(context)));
    const bool is_recorded = record(event->context_->handle(), event->event_) == cuda::kSuccess;
    return is_recorded ? std::move(event) : nullptr;
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
  explicit CudaEvent(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
    // A thread that waits for it sleeps: a spinning worker would take a core from decode.
    context_->check(context_->calls().cuEventCreate(
                        &event_, cuda::kEventDisableTiming | cuda::kEventBlockingSync),
                    "creating an event");
  }

  std::shared_ptr<const CudaContext> context_;
  cuda::Event event_ = nullptr;
};

}  // namespace windrow
