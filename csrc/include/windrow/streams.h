#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "windrow/driver.h"

namespace windrow {

// A stream of device work by its handle (`cudaStream_t` as a number); 0 is the default stream.
using StreamId = std::uintptr_t;

// What an allocator has to know of streams: when their work is over.
//
// Thread: any. Errors: Error, with the failed call in the message.
class Streams {
 public:
  virtual ~Streams() = default;
  // Done when everything that was launched on `stream` before this call has ended.
  [[nodiscard]] virtual std::unique_ptr<Event> record(StreamId stream) = 0;
  // Done when everything that was launched before this call has ended, on any stream of the device.
  // A device that cannot tell looks at the streams of `known` only.
  [[nodiscard]] virtual std::unique_ptr<Event> record_all(std::span<const StreamId> known);
};

// Of the host driver: work is over when the call that does it returns, so every event is done.
[[nodiscard]] Streams& host_streams();

}  // namespace windrow
