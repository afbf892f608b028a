// Captures: what a stream is given becomes a graph and does not run; and what CUDA forbids
// meanwhile.
#include "captures.h"

#include <algorithm>

namespace windrow::standin {
namespace {

thread_local CaptureMode thread_mode = CaptureMode::kGlobal;

// Why the calling thread may make no unsafe call, as cuThreadExchangeStreamCaptureMode has it.
bool forbids(const Capture& capture) {
  if (thread_mode == CaptureMode::kRelaxed) {
    return false;
  }
  if (capture.thread == std::this_thread::get_id()) {
    return capture.mode != static_cast<int>(CaptureMode::kRelaxed);
  }
  return capture.mode == static_cast<int>(CaptureMode::kGlobal) &&
         thread_mode == CaptureMode::kGlobal;
}

template <class Test>
Result require_none(Test conflicts, const std::string& rule, Result refusal) {
  bool found = false;
  for (auto& [stream, capture] : state().captures) {
    if (conflicts(*stream, capture)) {
      capture.invalid = true;
      found = true;
    }
  }
  return found ? refuse(refusal, rule) : cuda::kSuccess;
}

}  // namespace

Result require_no_capture(const char* call) {
  return require_none([](const StreamState&, const Capture& capture) { return forbids(capture); },
                      std::string(call) + " while a stream captures", kCaptureUnsupported);
}

Result require_no_capture_in(cuda::Context context, const char* call) {
  return require_none(
      [&](const StreamState& stream, const Capture&) { return stream.context == context; },
      std::string(call) + " while a stream of the context captures", kCaptureUnsupported);
}

Result require_no_dependency(const StreamState& stream, const char* call) {
  const auto found = state().default_streams.find(stream.context);
  if (found == state().default_streams.end() || &found->second != &stream) {
    return cuda::kSuccess;
  }
  return require_none(
      [&](const StreamState& other, const Capture&) {
        return other.blocks && other.context == stream.context;
      },
      std::string(call) + " on the default stream while a blocking stream captures",
      kCaptureImplicit);
}

Graph* captured_by(StreamState& stream) {
  const auto found = state().captures.find(&stream);
  return found == state().captures.end() ? nullptr : found->second.graph.get();
}

}  // namespace windrow::standin

using namespace windrow::standin;
namespace cuda = windrow::cuda;

extern "C" {
#pragma GCC visibility push(default)

Result cuStreamBeginCapture_v2(cuda::Stream stream, CaptureMode mode) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuStreamBeginCapture"); result != cuda::kSuccess) {
    return result;
  }
  if (stream == nullptr) {
    return refuse(kCaptureUnsupported, "a capture of the default stream");
  }
  StreamState* found = find_stream(stream, "cuStreamBeginCapture");
  if (found == nullptr) {
    return cuda::kInvalidHandle;
  }
  if (state().captures.count(found) > 0) {
    return refuse(kIllegalState, "a capture of a stream that captures");
  }
  state().captures[found] = {.mode = static_cast<int>(mode),
                             .thread = std::this_thread::get_id(),
                             .graph = std::make_shared<Graph>()};
  return cuda::kSuccess;
}

Result cuStreamEndCapture(cuda::Stream stream, Graph** graph) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuStreamEndCapture"); result != cuda::kSuccess) {
    return result;
  }
  StreamState* on = find_stream(stream, "cuStreamEndCapture");
  const auto found = state().captures.find(on);
  if (found == state().captures.end()) {
    return refuse(kIllegalState, "the end of a capture that was not begun");
  }
  const bool is_bound = found->second.mode != static_cast<int>(CaptureMode::kRelaxed);
  if (is_bound && found->second.thread != std::this_thread::get_id()) {
    return refuse(kCaptureWrongThread, "a capture that another thread began, ended");
  }
  const Capture capture = found->second;
  state().captures.erase(found);
  *graph = nullptr;
  if (capture.invalid) {
    return kCaptureInvalidated;  // the rule was noted when it was broken
  }
  *graph = capture.graph.get();
  state().graphs[*graph] = capture.graph;
  return cuda::kSuccess;
}

Result cuStreamIsCapturing(cuda::Stream stream, CaptureStatus* status) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuStreamIsCapturing"); result != cuda::kSuccess) {
    return result;
  }
  *status = CaptureStatus::kNone;
  StreamState* on = find_stream(stream, "cuStreamIsCapturing");
  if (const auto found = state().captures.find(on); found != state().captures.end()) {
    *status = found->second.invalid ? CaptureStatus::kInvalidated : CaptureStatus::kActive;
  }
  return on == nullptr ? cuda::kInvalidHandle : cuda::kSuccess;
}

Result cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cuda::kSuccess;
}

// A graph that can be launched is the graph itself, kept until both are destroyed.
Result cuGraphInstantiateWithFlags(Graph** made, Graph* graph, unsigned long long /*flags*/) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuGraphInstantiate"); result != cuda::kSuccess) {
    return result;
  }
  const auto found = state().graphs.find(graph);
  if (found == state().graphs.end()) {
    return refuse(cuda::kInvalidValue, "an invalid graph instantiated");
  }
  auto copy = std::make_shared<Graph>(*found->second);
  *made = copy.get();
  state().graphs[*made] = std::move(copy);
  return cuda::kSuccess;
}

Result cuGraphLaunch(Graph* graph, cuda::Stream stream) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuGraphLaunch"); result != cuda::kSuccess) {
    return result;
  }
  const auto found = state().graphs.find(graph);
  if (found == state().graphs.end()) {
    return refuse(cuda::kInvalidValue, "an invalid graph launched");
  }
  for (const Work& node : found->second->nodes) {
    for (const Range& range : node.touches) {
      const int access = cuda::kAccessReadWrite;
      if (const Result result = require_access(range.begin, range.bytes, access, "a graph's node");
          result != cuda::kSuccess) {
        return result;
      }
    }
    if (const Result result = enqueue(stream, "cuGraphLaunch", node); result != cuda::kSuccess) {
      return result;
    }
  }
  return cuda::kSuccess;
}

Result cuGraphDestroy(Graph* graph) {
  const std::scoped_lock lock(state().mutex);
  return state().graphs.erase(graph) == 1
             ? cuda::kSuccess
             : refuse(cuda::kInvalidValue, "an invalid graph destroyed");
}

Result cuGraphExecDestroy(Graph* graph) {
  return cuGraphDestroy(graph);
}

#pragma GCC visibility pop
}
