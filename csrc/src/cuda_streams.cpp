#include "windrow/cuda_streams.h"

#include "cuda_event.h"

namespace windrow {

std::unique_ptr<Event> CudaStreams::record(StreamId stream) {
  const CudaContext::Current current(*context_);
  return std::make_unique<CudaEvent>(context_, reinterpret_cast<cuda::Stream>(stream));
}

std::unique_ptr<Event> CudaStreams::record_all(std::span<const StreamId> known) {
  const CudaContext::Current current(*context_);
  if (auto event = CudaEvent::behind_all(context_)) {
    return event;
  }
  return Streams::record_all(known);
}

}  // namespace windrow
