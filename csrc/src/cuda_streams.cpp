#include "windrow/cuda_streams.h"

#include "cuda_event.h"

namespace windrow {

std::unique_ptr<Event> CudaStreams::record(StreamId stream) {
  const CudaContext::Current current(*context_);
  return std::make_unique<CudaEvent>(context_, reinterpret_cast<cuda::Stream>(stream));
}

}  // namespace windrow
