#include "windrow/stream_epochs.h"

#include <vector>

namespace windrow {
namespace {

// A caller that asks again and again while the device works leaves an event behind each time that
// something was freed in between.
constexpr std::size_t kMostClosed = 8;

}  // namespace

bool StreamEpochs::ended(Epoch epoch) {
  if (epoch > ended_ && epoch == current_ && closed_.size() < kMostClosed) {
    static_cast<void>(close());
  }
  while (epoch > ended_ && !closed_.empty() && closed_.front().event->done()) {
    ended_ = closed_.front().epoch;
    closed_.pop_front();
  }
  return epoch <= ended_;
}

std::shared_ptr<const Event> StreamEpochs::close() {
  const std::vector<StreamId> known(known_.begin(), known_.end());
  std::shared_ptr<const Event> event = streams_->record_all(known);
  closed_.push_back({current_, event});
  ++current_;
  return event;
}

}  // namespace windrow
