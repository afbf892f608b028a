#pragma once

#include "state.h"

// Captures of streams, and graphs of what was captured. Windrow's core captures nothing itself
// (torch does), so these calls are not among those that it looks up.

namespace windrow::standin {

// CUstreamCaptureMode and CUstreamCaptureStatus.
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };

inline constexpr Result kIllegalState = 401;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureInvalidated = 901;
inline constexpr Result kCaptureImplicit = 906;
inline constexpr Result kCapturedEvent = 907;
inline constexpr Result kCaptureWrongThread = 908;

// What was captured: its work in order, which each launch runs again.
struct Graph {
  std::vector<Work> nodes;
};

// Success, or the refusal of a call that CUDA calls potentially unsafe while a capture forbids it
// on this thread; the captures that forbid it are invalid then.
Result require_no_capture(const char* call);
// ... of a call that no capture in the context outlives, whatever its mode.
Result require_no_capture_in(cuda::Context context, const char* call);
// ... of work on the default stream, which is behind all streams that are not non-blocking.
Result require_no_dependency(const StreamState& stream, const char* call);
// The capture of that stream: its work becomes nodes; nullptr: it captures nothing.
Graph* captured_by(StreamState& stream);

}  // namespace windrow::standin
