// Streams, events and work in order. Work runs when somebody waits for it, so that what is pending
// is the same in every run: an event's first question is answered "not ready", the second one
// after the work was done.
#include <algorithm>
#include <cstring>

#include "captures.h"

namespace windrow::standin {

StreamState* find_stream(cuda::Stream stream, const char* call) {
  if (stream == nullptr) {
    StreamState& its = state().default_streams[current()];
    its.context = current();
    return &its;
  }
  const auto found = state().streams.find(stream);
  if (found == state().streams.end()) {
    refuse(cuda::kInvalidHandle, std::string(call) + " on an invalid stream");
    return nullptr;
  }
  return found->second.get();
}

cuda::Stream add_stream(cuda::Context context, std::set<unsigned> sms, cuda::GreenContext green) {
  const auto stream = new_object<cuda::Stream>();
  auto made = std::make_unique<StreamState>();
  made->context = context;
  made->sms = std::move(sms);
  made->green = green;
  state().streams[stream] = std::move(made);
  return stream;
}

Result enqueue(cuda::Stream stream, const char* call, Work work) {
  StreamState* found = find_stream(stream, call);
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (found->detached) {
    return refuse(cuda::kStreamDetached,
                  std::string(call) + " on a stream whose green context is destroyed");
  }
  if (const Result result = require_no_dependency(*found, call); result != cuda::kSuccess) {
    return result;
  }
  if (Graph* graph = captured_by(*found); graph != nullptr) {
    graph->nodes.push_back(std::move(work));
    return cuda::kSuccess;
  }
  found->queue.push_back(std::move(work));
  return cuda::kSuccess;
}

void run_until(StreamState& stream, std::size_t count) {
  std::size_t& finished = state().finished[&stream];
  while (finished < count && !stream.queue.empty()) {
    stream.queue.front().run();
    stream.queue.erase(stream.queue.begin());
    ++finished;
  }
}

bool is_pending(DevicePtr begin, std::size_t bytes) {
  const auto meets = [&](const Range& range) {
    return range.begin < begin + bytes && begin < range.begin + range.bytes;
  };
  const auto pending = [&](const StreamState& stream) {
    return std::any_of(stream.queue.begin(), stream.queue.end(), [&](const Work& work) {
      return std::any_of(work.touches.begin(), work.touches.end(), meets);
    });
  };
  const auto any = [](const auto& streams, const auto& test) {
    return std::any_of(streams.begin(), streams.end(), test);
  };
  return any(state().default_streams, [&](const auto& entry) { return pending(entry.second); }) ||
         any(state().streams, [&](const auto& entry) { return pending(*entry.second); });
}

namespace {

std::size_t all_of(const StreamState& stream) {
  return state().finished[const_cast<StreamState*>(&stream)] + stream.queue.size();
}

void run_until(const EventState& event) {
  for (const Point& point : event.points) {
    run_until(*point.stream, point.after);
  }
}

EventState* find_event(cuda::Event event, const char* call) {
  const auto found = state().events.find(event);
  if (found == state().events.end()) {
    refuse(cuda::kInvalidHandle, std::string(call) + " of an invalid event");
    return nullptr;
  }
  return found->second.get();
}

}  // namespace
}  // namespace windrow::standin

using namespace windrow::standin;
namespace cuda = windrow::cuda;

extern "C" {
#pragma GCC visibility push(default)

Result cuStreamCreate(cuda::Stream* stream, unsigned flags) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuStreamCreate"); result != cuda::kSuccess) {
    return result;
  }
  std::set<unsigned> all;
  for (unsigned sm = 0; sm < s.sms; ++sm) {
    all.insert(sm);
  }
  *stream = add_stream(current(), std::move(all), nullptr);
  s.streams[*stream]->blocks = (flags & cuda::kStreamNonBlocking) == 0;
  return cuda::kSuccess;
}

Result cuStreamSynchronize(cuda::Stream stream) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuStreamSynchronize"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuStreamSynchronize"); result != cuda::kSuccess) {
    return result;
  }
  StreamState* found = find_stream(stream, "cuStreamSynchronize");
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (const auto capture = state().captures.find(found); capture != state().captures.end()) {
    capture->second.invalid = true;
    return refuse(kCaptureUnsupported, "cuStreamSynchronize of a stream that captures");
  }
  run_until(*found, all_of(*found));
  return cuda::kSuccess;
}

Result cuStreamDestroy(cuda::Stream stream) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter_context("cuStreamDestroy"); result != cuda::kSuccess) {
    return result;
  }
  StreamState* found = find_stream(stream, "cuStreamDestroy");
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (s.captures.erase(found) > 0) {
    refuse(kIllegalState, "a stream destroyed while it captured");
  }
  run_until(*found, all_of(*found));
  for (auto& [key, event] : s.events) {
    std::erase_if(event->points, [&](const Point& point) { return point.stream == found; });
  }
  s.finished.erase(found);
  s.streams.erase(stream);
  return cuda::kSuccess;
}

Result cuEventCreate(cuda::Event* event, unsigned /*flags*/) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuEventCreate"); result != cuda::kSuccess) {
    return result;
  }
  *event = new_object<cuda::Event>();
  auto made = std::make_unique<EventState>();
  made->context = current();
  state().events[*event] = std::move(made);
  return cuda::kSuccess;
}

Result cuEventRecord(cuda::Event event, cuda::Stream stream) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuEventRecord"); result != cuda::kSuccess) {
    return result;
  }
  EventState* found = find_event(event, "cuEventRecord");
  StreamState* on = find_stream(stream, "cuEventRecord");
  if (found == nullptr || on == nullptr) {
    return cuda::kInvalidHandle;
  }
  // A green context is the primary one with fewer SMs: its streams take events of that one, and of
  // no other. A driver that took the rule of cuEventRecord by the letter would refuse them.
  if (found->context != on->context) {
    return refuse(cuda::kInvalidHandle, "an event recorded on a stream of another context");
  }
  if (on->green != nullptr && setting("WINDROW_STANDIN_GREEN_EVENTS", 1) == 0) {
    return cuda::kInvalidHandle;
  }
  if (const Result result = require_no_dependency(*on, "cuEventRecord"); result != cuda::kSuccess) {
    return result;
  }
  found->points = {{on, all_of(*on)}};
  found->asked = false;
  found->is_captured = captured_by(*on) != nullptr;
  return cuda::kSuccess;
}

Result cuCtxRecordEvent(cuda::Context context, cuda::Event event) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  if (setting("WINDROW_STANDIN_CONTEXT_EVENTS", 1) == 0) {
    return cuda::kNotSupported;
  }
  EventState* found = find_event(event, "cuCtxRecordEvent");
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (found->context != context) {
    return refuse(cuda::kInvalidHandle, "an event recorded behind another context than its own");
  }
  if (const Result result = require_no_capture_in(context, "cuCtxRecordEvent");
      result != cuda::kSuccess) {
    return result;
  }
  found->points.clear();
  found->asked = found->is_captured = false;
  const auto add = [&](StreamState& stream) {
    if (stream.context == context) {
      found->points.push_back({&stream, all_of(stream)});
    }
  };
  for (auto& [its, stream] : state().default_streams) {
    add(stream);
  }
  for (const auto& [handle, stream] : state().streams) {
    add(*stream);
  }
  return cuda::kSuccess;
}

Result cuEventQuery(cuda::Event event) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuEventQuery"); result != cuda::kSuccess) {
    return result;
  }
  EventState* found = find_event(event, "cuEventQuery");
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (found->is_captured) {
    return refuse(kCapturedEvent, "cuEventQuery of an event that a capture has");
  }
  if (const Result result = require_no_capture("cuEventQuery"); result != cuda::kSuccess) {
    return result;
  }
  const bool is_over =
      std::all_of(found->points.begin(), found->points.end(),
                  [](const Point& point) { return state().finished[point.stream] >= point.after; });
  if (is_over) {
    return cuda::kSuccess;
  }
  if (!found->asked) {
    found->asked = true;
    return cuda::kNotReady;
  }
  run_until(*found);
  return cuda::kSuccess;
}

Result cuEventSynchronize(cuda::Event event) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuEventSynchronize"); result != cuda::kSuccess) {
    return result;
  }
  EventState* found = find_event(event, "cuEventSynchronize");
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (found->is_captured) {
    return refuse(kCapturedEvent, "cuEventSynchronize of an event that a capture has");
  }
  if (const Result result = require_no_capture("cuEventSynchronize"); result != cuda::kSuccess) {
    return result;
  }
  run_until(*found);
  return cuda::kSuccess;
}

Result cuEventDestroy(cuda::Event event) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuEventDestroy"); result != cuda::kSuccess) {
    return result;
  }
  if (find_event(event, "cuEventDestroy") == nullptr) {
    return cuda::kInvalidHandle;
  }
  state().events.erase(event);
  return cuda::kSuccess;
}

Result cuMemcpyAsync(DevicePtr to, DevicePtr from, std::size_t bytes, cuda::Stream stream) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuMemcpyAsync"); result != cuda::kSuccess) {
    return result;
  }
  const Result target = require_access(to, bytes, cuda::kAccessReadWrite, "a copy to");
  const Result source = require_access(from, bytes, cuda::kAccessRead, "a copy from");
  if (target != cuda::kSuccess || source != cuda::kSuccess) {
    return cuda::kIllegalAddress;
  }
  return enqueue(stream, "cuMemcpyAsync",
                 {.run =
                      [=] {
                        std::memmove(reinterpret_cast<void*>(to),
                                     reinterpret_cast<const void*>(from), bytes);
                      },
                  .touches = {{to, bytes}, {from, bytes}}});
}

Result cuMemcpyDtoHAsync(void* to, DevicePtr from, std::size_t bytes, cuda::Stream stream) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuMemcpyDtoHAsync"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_access(from, bytes, cuda::kAccessRead, "a copy from");
      result != cuda::kSuccess) {
    return result;
  }
  return enqueue(stream, "cuMemcpyDtoHAsync",
                 {.run = [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); },
                  .touches = {{from, bytes}}});
}

Result cuMemsetD8Async(DevicePtr at, unsigned char value, std::size_t bytes, cuda::Stream stream) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuMemsetD8Async"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_access(at, bytes, cuda::kAccessReadWrite, "a fill of");
      result != cuda::kSuccess) {
    return result;
  }
  return enqueue(stream, "cuMemsetD8Async",
                 {.run = [=] { std::memset(reinterpret_cast<void*>(at), value, bytes); },
                  .touches = {{at, bytes}}});
}

#pragma GCC visibility pop
}
