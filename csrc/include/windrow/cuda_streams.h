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
  // One event of the whole context, where the driver knows such events (12.5).
  [[nodiscard]] std::unique_ptr<Event> record_all(std::span<const StreamId> known) override;

 private:
  std::shared_ptr<const CudaContext> context_;
};

}  // namespace windrow
