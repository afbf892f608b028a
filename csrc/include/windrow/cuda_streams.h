#pragma once

#include <memory>

#include "windrow/cuda_context.h"
#include "windrow/streams.h"

namespace windrow {

// The streams of one GPU, torch's and green contexts' among them. Thread: any.
class CudaStreams final : public Streams {
 public:
  explicit CudaStreams(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}
  [[nodiscard]] std::unique_ptr<Event> record(StreamId stream) override;

 private:
  std::shared_ptr<const CudaContext> context_;
};

}  // namespace windrow
