#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>

#include "windrow/streams.h"

namespace windrow {

// When work that was queued before some moment has ended, on whatever stream: an allocator knows on
// which stream it handed memory out, but not on which others it was used. As a grace period of RCU:
// what is freed carries the number of the epoch it was freed in, and is quiet when that epoch has
// ended, for whatever used it was queued before.
//
// Thread: one at a time; the events that it returns may be waited for without it. Errors: Error
// where the device does not answer; then nothing counts as ended that did not before.
class StreamEpochs {
 public:
  using Epoch = std::uint64_t;

  // `streams` outlives it.
  explicit StreamEpochs(Streams& streams) : streams_(&streams) {}

  // Work on that stream may use memory from now on.
  void uses(StreamId stream) { known_.insert(stream); }
  // Of what is freed now. Epoch 0 ended before the first one.
  [[nodiscard]] Epoch now() const { return current_; }
  // The newest that is known to have ended; asks nobody.
  [[nodiscard]] Epoch last_ended() const { return ended_; }
  // Whether all that was queued up to the end of that epoch has ended. Never waits.
  [[nodiscard]] bool ended(Epoch epoch);
  // Ends the current epoch. The event is done when everything that was queued so far has ended.
  [[nodiscard]] std::shared_ptr<const Event> close();

 private:
  struct Closed {
    Epoch epoch;
    std::shared_ptr<const Event> event;
  };

  Streams* streams_;
  std::set<StreamId> known_;
  std::deque<Closed> closed_;  // oldest first; an event is done after all before it
  Epoch current_ = 1;
  Epoch ended_ = 0;
};

}  // namespace windrow
