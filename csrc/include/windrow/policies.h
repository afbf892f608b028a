#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "windrow/records.h"

namespace windrow {

// The policies as they run before a step. Each is the twin of the file of that name in
// `sidecar/windrow_sidecar/qos/policies/`, which says what it does, why, and after which source; a
// test holds both equal. Floating point here is IEEE double in the order of the Python source, and
// is compiled without contraction, so answers are the same bit for bit.

enum class PolicyKind : std::uint8_t {
  kWindrow,
  kHarli,
  kLlmStation,
  kFlexLlm,
  kFineInfer,
  kTemporal,
  kStatic,
};

// By its name in a HarvestPolicy. Throws std::invalid_argument.
[[nodiscard]] PolicyKind policy_of(std::string_view name);

// The constants of the Python policies, predictor and guard, which define them; times as there.
#define WINDROW_DECISION_FIGURES(X)   \
  X(double, grow_headroom)            \
  X(double, slack_steps)              \
  X(double, turns_margin)             \
  X(double, turns_gain)               \
  X(double, part_gain)                \
  X(double, most_stretch)             \
  X(std::int64_t, least_gap_us)       \
  X(std::int64_t, grain_tokens)       \
  X(std::int64_t, most_tokens)        \
  X(std::int64_t, passes)             \
  X(std::int64_t, batch_floor)        \
  X(double, beyond_margin)            \
  X(std::int64_t, context_bits)       \
  X(std::int64_t, widen_half_life_ns) \
  X(std::int64_t, stale_ns)           \
  X(std::int64_t, standing_clock)     \
  X(double, longest_step_us)          \
  X(std::int64_t, offered_layers)     \
  X(std::int64_t, offered_tokens)     \
  X(std::int64_t, offered_bytes)

#define WINDROW_FIGURE(type, name) type name{};
struct DecisionFigures {
  WINDROW_DECISION_FIGURES(WINDROW_FIGURE)
};
#undef WINDROW_FIGURE

// One way to share a device while decode works, with stage 1 and 2 of the predictor for it.
struct DecisionSplit {
  std::int64_t finetune_units = 0;
  std::int64_t decode_units = 0;
  double c0_us = 0;
  double b0_us = 0;
  double k0_us = 0;  // per context token
  double stretch = 1;
};

// `policies/base.py` says what each means. Spans are as long as the device has splits.
struct PolicyContext {
  const DecisionFigures& figures;
  std::int64_t units = 0;
  std::span<const DecisionSplit> splits;
  std::span<const std::int64_t> offered;  // units of the worker's estimates, in their order
  std::size_t allowed = 1;
  std::int64_t idle_units = 0;
  std::span<const double> predicted_us;
  std::span<const double> solo_us;
  double margin = 0;
  std::int64_t current = 0;
  std::int64_t in_flight_bound_us = 0;
  std::int64_t layers = 1;
  std::int64_t deferral_us = 0;
  std::int64_t chunk_bytes = 0;
  bool per_request = false;
  bool gaps = false;
  bool taught = true;
};

// `Context.current` while decode and worker take turns on the whole device.
inline constexpr std::int64_t kInTurns = -1;
inline constexpr std::int64_t kPause = 0;
inline constexpr std::int64_t kGo = 1;

// The answer of a policy; `option`: the one variant that it has beside its default.
[[nodiscard]] Grant ask_policy(PolicyKind kind, bool option, const View& view, const Offer& offer,
                               const PolicyContext& ctx);

// Decode on all units, the worker paused.
[[nodiscard]] Grant alone(const PolicyContext& ctx);
// Whether a grant is used up by one step; any other stands until something changes.
[[nodiscard]] bool is_for_one_step(const Grant& grant);
// Units that the worker has under a grant, on average over the step.
[[nodiscard]] double effective_units(const Grant& grant, const View& view, const Offer& offer,
                                     const PolicyContext& ctx);

}  // namespace windrow
