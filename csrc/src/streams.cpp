#include "windrow/streams.h"

#include <algorithm>
#include <utility>

namespace windrow {
namespace {

class DoneEvent final : public Event {
 public:
  [[nodiscard]] bool done() const override { return true; }
  void wait() const override {}
};

class HostStreams final : public Streams {
 public:
  [[nodiscard]] std::unique_ptr<Event> record(StreamId /*stream*/) override {
    return std::make_unique<DoneEvent>();
  }
};

// Done when all of them are.
class AllEvents final : public Event {
 public:
  explicit AllEvents(std::vector<std::unique_ptr<Event>> events) : events_(std::move(events)) {}
  [[nodiscard]] bool done() const override {
    return std::ranges::all_of(events_, [](const auto& event) { return event->done(); });
  }
  void wait() const override {
    for (const auto& event : events_) {
      event->wait();
    }
  }

 private:
  std::vector<std::unique_ptr<Event>> events_;
};

}  // namespace

std::unique_ptr<Event> Streams::record_all(std::span<const StreamId> known) {
  std::vector<std::unique_ptr<Event>> events;
  events.reserve(known.size());
  for (const StreamId stream : known) {
    events.push_back(record(stream));
  }
  return std::make_unique<AllEvents>(std::move(events));
}

Streams& host_streams() {
  static HostStreams streams;
  return streams;
}

}  // namespace windrow
