#pragma once

#include <map>
#include <memory>

#include "windrow/error.h"
#include "windrow/streams.h"

namespace windrow::testing {

// Streams whose work ends when the test says so. Waiting for work that nobody ends ends it, as time
// would, and is counted.
class ScriptedStreams final : public Streams {
 public:
  void launch(StreamId stream) { ++queues_[stream]->launched; }
  void finish(StreamId stream) { queues_[stream]->finished = queues_[stream]->launched; }
  void finish_one(StreamId stream) { ++queues_[stream]->finished; }
  void fail_next_record() { fail_ = true; }
  [[nodiscard]] int waits() const { return *waits_; }
  [[nodiscard]] int records() const { return records_; }

  [[nodiscard]] std::unique_ptr<Event> record(StreamId stream) override {
    ++records_;
    if (std::exchange(fail_, false)) {
      throw Error("recording an event: out of events");
    }
    return std::make_unique<Point>(queues_[stream].queue, queues_[stream]->launched, waits_);
  }

 private:
  struct Queue {
    int launched = 0;
    int finished = 0;
  };
  struct Shared {
    std::shared_ptr<Queue> queue = std::make_shared<Queue>();
    Queue* operator->() const { return queue.get(); }
  };
  class Point final : public Event {
   public:
    Point(std::shared_ptr<Queue> queue, int at, std::shared_ptr<int> waits)
        : queue_(std::move(queue)), at_(at), waits_(std::move(waits)) {}
    [[nodiscard]] bool done() const override { return queue_->finished >= at_; }
    void wait() const override {
      if (!done()) {
        ++*waits_;
        queue_->finished = at_;
      }
    }

   private:
    std::shared_ptr<Queue> queue_;
    int at_;
    std::shared_ptr<int> waits_;
  };

  std::map<StreamId, Shared> queues_;
  std::shared_ptr<int> waits_ = std::make_shared<int>(0);
  int records_ = 0;
  bool fail_ = false;
};

}  // namespace windrow::testing
