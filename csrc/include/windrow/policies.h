#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "windrow/records.h"

namespace windrow {

// The policies: each a pure function from what is seen to what is granted, defined once, in
// policies.cpp. Engines, simulator and tools ask the same ones. They are compiled since decode
// waits for the answer: between two torch steps caches are cold, and each line of Python costs ten
// times what it costs warm. Floating point is IEEE double without contraction, so that a decision
// is the same on every compiler.

// The constants of policies and predictor. Times as their names say.
//   grow_headroom: below the bound by this much before the worker's share may grow: less would
//   leave
//     a step that varies by 1.5% over its bound more often than once in a hundred, and units that
//     go to and fro.
//   slack_steps: slack is spent over so many steps at least, so that one step never takes all of
//   it. part_gain: a part of a step ends the share in its middle, and a grant for each step costs a
//     decision: by so much it must be worth more than the present share.
//   least_gap_us: shorter gaps are over before the worker has woken and a tasklet's caches are
//   warm. grain_tokens, most_tokens: of FlexLLM's windows, which are cut in its artifact's steps.
//   passes: one forward, and a backward that costs twice as much: of a micro-batch in each layer.
//   batch_floor: below four requests a step costs as much as with four: reading weights dominates.
//   beyond_margin: beyond the profile the margin is wider by this: what a line that fits within 8%
//     may be off by when it is followed to twice as far, with both coefficients wrong alike.
//   seen_often: steps beyond the profile after which it reaches as far as they do.
//   lessons, parts_a_lesson: a step beside which the worker ran for a part teaches stage 2 nothing:
//     when it stopped is not known to the microsecond. So many steps beside a share first, and each
//     pays for so many parts.
#define WINDROW_DECISION_FIGURES(X)   \
  X(double, grow_headroom, 0.02)      \
  X(double, slack_steps, 16)          \
  X(double, part_gain, 1.02)          \
  X(std::int64_t, least_gap_us, 500)  \
  X(std::int64_t, grain_tokens, 16)   \
  X(std::int64_t, most_tokens, 512)   \
  X(std::int64_t, batch_floor, 4)     \
  X(double, beyond_margin, 0.08)      \
  X(std::int64_t, seen_often, 64)     \
  X(std::int64_t, lessons, 32)        \
  X(std::int64_t, parts_a_lesson, 20) \
  X(double, forgetting, 0.99)         \
  X(double, start_margin, 0.08)       \
  X(double, margin_min, 0.02)         \
  X(double, margin_max, 0.5)

#define WINDROW_FIGURE(type, name, value) type name = value;
struct DecisionFigures {
  WINDROW_DECISION_FIGURES(WINDROW_FIGURE)
};
#undef WINDROW_FIGURE

// One way to share a device while decode works.
struct DecisionSplit {
  std::int64_t finetune_units = 0;
  std::int64_t decode_units = 0;
};

// What a policy may know besides view and offer; everything it has for a memory. Spans are as long
// as the device has splits.
struct PolicyContext {
  const DecisionFigures& figures;
  std::int64_t units = 0;
  std::span<const DecisionSplit> splits;
  std::span<const std::int64_t> offered;  // units of the worker's estimates, in their order
  std::size_t allowed = 1;      // only the first so many splits are within the limits; 1: alone
  std::int64_t idle_units = 0;  // for the worker while decode computes nothing, within the limits
  std::span<const double> predicted_us;  // of the next step under each split, without margin
  std::span<const double> solo_us;       // on the same units of decode, without a worker
  double margin = 0;                     // of the prediction, relative: predictor's and guard's
  std::int64_t current = 0;  // split that was granted last; 0: the worker is paused; or kInTurns
  std::int64_t in_flight_bound_us = 0;  // how much work the worker may have launched at any time
  std::int64_t layers = 1;              // of decode's model
  std::int64_t deferral_us = 0;         // how long a request may be held back before it is admitted
  std::int64_t due_ns = 0;  // until when requests may be held back by bounds of their own; 0: none
  std::int64_t chunk_bytes = 0;  // of the arena; 0: unknown
  bool per_request = false;      // the objective is judged over a request's life, not step by step
  bool gaps = false;             // the engine can begin a step later than it could
  bool taught = true;  // enough steps beside a share throughout have said what a worker costs
};

// `PolicyContext::current` while decode and worker take turns on the whole device.
inline constexpr std::int64_t kInTurns = -1;
inline constexpr std::int64_t kPause = 0;
inline constexpr std::int64_t kGo = 1;

// Answers without side effects, and never with more than the context allows.
using Policy = std::function<Grant(const View&, const Offer&, const PolicyContext&)>;

struct NamedPolicy {
  std::string_view name;  // in a HarvestPolicy
  Grant (*decide)(const View&, const Offer&, const PolicyContext&);
};
// Every policy there is.
[[nodiscard]] std::span<const NamedPolicy> policies();
// By its name. Throws std::invalid_argument.
[[nodiscard]] const NamedPolicy& policy_of(std::string_view name);

// Decode on all units, the worker paused.
[[nodiscard]] Grant alone(const PolicyContext& ctx);
// Whether a grant is used up by one step; any other holds until something changes.
[[nodiscard]] bool is_for_one_step(const Grant& grant);
// How long a worker may run beside one step so that the step takes no longer than `bound`. A step
// that takes `solo` alone and `beside` with the worker at its side throughout takes
// solo + w * (1 - solo / beside) when the worker runs for w of it.
[[nodiscard]] double beside_us(double bound, double solo, double beside);
// LLMStation's N_d: how many of decode's layers may have a tasklet beside them. `solo`, `beside`:
// microseconds of one decode layer, l_d0 and l_d.
[[nodiscard]] double accompanied_layers(double objective, double layers, double solo,
                                        double beside);
// Units that the worker has under a grant, on average over the step.
[[nodiscard]] double effective_units(const Grant& grant, const View& view, const Offer& offer,
                                     const PolicyContext& ctx);

}  // namespace windrow
