#include "windrow/policies.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace windrow {
namespace {

constexpr std::int64_t kPhaseNone = 0;
constexpr std::int64_t kPhaseForward = 1;
constexpr std::int64_t kPhaseBackward = 3;

std::int64_t whole(double value) {
  return static_cast<std::int64_t>(value);  // towards zero, as Python's int()
}

double real(std::int64_t value) {
  return static_cast<double>(value);
}

// Whether a worker is there that could run its next tasklet.
bool has_work(const Offer& offer) {
  return offer.job_epoch > 0 && offer.starving == 0;
}

// What a prediction must not pass, so that the step stays within the objective.
double bound_us(const View& view, const PolicyContext& ctx) {
  return real(view.objective_us) / (1 + ctx.margin);
}

// How long the worker's next tasklet takes on so many units; 0: not known. The worker shows its
// shares by growing units, and the whole device last.
std::int64_t tasklet_us(const Offer& offer, const PolicyContext& ctx, std::int64_t units) {
  const auto at = std::ranges::lower_bound(ctx.offered, units);
  const auto place = static_cast<std::size_t>(at - ctx.offered.begin());
  return offer.estimates_us[std::min({place, ctx.offered.size() - 1, kLevelsMax - 1})];
}

// Both at work under that split.
Grant share(const PolicyContext& ctx, std::size_t index) {
  Grant grant;
  grant.action = kGo;
  grant.finetune_units = ctx.splits[index].finetune_units;
  grant.decode_units = ctx.splits[index].decode_units;
  grant.predicted_us = whole(ctx.predicted_us[index]);
  grant.in_flight_bound_us = ctx.in_flight_bound_us;
  return grant;
}

// The worker on all that the limits leave it until `gap_us` from the step's start; then decode. Its
// tasklets are half of the gap at most, or little of it could be used.
Grant in_turns(const View& view, const PolicyContext& ctx, double gap_us) {
  Grant grant;
  grant.action = kGo;
  grant.finetune_units = ctx.idle_units;
  grant.decode_units = ctx.units;
  grant.predicted_us = whole(ctx.solo_us[0] + gap_us);
  grant.in_flight_bound_us =
      std::max<std::int64_t>(1, std::min(ctx.in_flight_bound_us, whole(gap_us / 2)));
  grant.gap_until_ns = view.start_ns + whole(gap_us * 1000);
  return grant;
}

// The worker gets what the limits let it have, if they leave it anything. Decode keeps its
// narrowest share, so that its first step meets no second team on its units.
Grant decode_idle(const PolicyContext& ctx) {
  if (ctx.idle_units == 0) {
    return alone(ctx);
  }
  Grant grant;
  grant.action = kGo;
  grant.finetune_units = ctx.idle_units;
  grant.decode_units = ctx.units;
  for (const DecisionSplit& split : ctx.splits.first(ctx.allowed)) {
    grant.decode_units = std::min(grant.decode_units, split.decode_units);
  }
  grant.in_flight_bound_us = ctx.in_flight_bound_us;
  return grant;
}

// Whether the next tasklet goes on with a micro-batch that has begun.
bool mid_iteration(const Offer& offer) {
  const bool begins = offer.phase == kPhaseNone || offer.phase == kPhaseForward;
  return !(begins && offer.layer_begin == 0);
}

// --- windrow: whatever gives the worker most within the objective, picked at each decision. It
// compares what the other policies do, by the worker's own speed on each number of units: a share
// of the units throughout (Harli's pairs), the largest that is feasible; and where decode keeps all
// units, a larger share for a part of the step (LLMStation, FlexLLM). Where it departs from harli:
// - It takes the largest feasible share of the worker instead of the largest predicted latency: the
//   worker's units are what is to be gained, latency is only the price.
// - It picks at every decision, and a decision holds for 80 ms at most, so that units return to
// the
//   worker soon after a burst; to keep a batch at the edge from switching to and fro, growing needs
//   headroom, while shrinking is immediate (decode comes first).
// - Only a step beside a share throughout says what a worker costs. As long as too few have
//   (`taught`), and once in twenty steps from then on, it takes a share that is feasible, though a
//   part of the step were worth more by a prediction that no step has tried.
// - With a per-request objective it spends what running requests have saved in fast steps.

// How fast the worker is on so many units; comparable between units of one decision. By its own
// estimates where it has one for the device and for these units, else by the units.
double speed(const Offer& offer, const PolicyContext& ctx, std::int64_t units) {
  if (units == 0) {
    return 0;
  }
  const std::int64_t whole_us = tasklet_us(offer, ctx, ctx.idle_units);
  const std::int64_t here_us = tasklet_us(offer, ctx, units);
  return whole_us != 0 && here_us != 0 ? real(ctx.idle_units * whole_us) / real(here_us)
                                       : real(units);
}

// What this step may take: the objective, moved by slack or debt where requests are judged.
double budget_us(const View& view, const PolicyContext& ctx) {
  const double objective = real(view.objective_us);
  if (!ctx.per_request) {
    return objective;
  }
  const double change = real(view.slack_us) / ctx.figures.slack_steps;
  return objective + std::max(-objective / 2, std::min(objective, change));
}

// Index of the largest feasible split, growing only with headroom; 0: none.
std::size_t largest_share(double bound, const PolicyContext& ctx) {
  const double grow_bound = bound * (1 - ctx.figures.grow_headroom);
  const std::size_t current =
      ctx.current == kInTurns ? ctx.allowed : static_cast<std::size_t>(ctx.current);
  for (std::size_t index = ctx.allowed; index-- > 1;) {
    if (ctx.predicted_us[index] <= (index <= current ? bound : grow_bound)) {
      return index;
    }
  }
  return 0;
}

Grant windrow_policy(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  if (view.batch == 0) {
    return decode_idle(ctx);
  }
  const double bound = budget_us(view, ctx) / (1 + ctx.margin);
  const std::size_t index = largest_share(bound, ctx);
  Grant best = index != 0 ? share(ctx, index) : alone(ctx);
  if (index != 0 && !ctx.taught) {
    return best;
  }
  double worth = speed(offer, ctx, best.finetune_units);
  for (std::size_t larger = ctx.allowed; larger-- > index + 1;) {
    const DecisionSplit& split = ctx.splits[larger];
    if (split.decode_units < ctx.units) {
      continue;  // decode would keep to the fewer units when the worker has stopped
    }
    const double run_us = beside_us(bound, ctx.solo_us[larger], ctx.predicted_us[larger]);
    if (run_us <
        real(std::max(ctx.figures.least_gap_us, tasklet_us(offer, ctx, split.finetune_units)))) {
      continue;
    }
    const double step_us = std::min(bound, ctx.predicted_us[larger]);
    const double part_worth = speed(offer, ctx, split.finetune_units) * run_us / step_us;
    if (part_worth > ctx.figures.part_gain * worth) {
      best = share(ctx, larger);
      best.budget_us = whole(run_us);
      best.predicted_us = whole(step_us);
      // Tasklets that fill it: what is left behind the last whole one is lost.
      const double in_flight = real(std::max<std::int64_t>(1, ctx.in_flight_bound_us));
      const double filling_us = run_us / std::ceil(run_us / in_flight);
      best.in_flight_bound_us = std::max<std::int64_t>(1, whole(filling_us));
      worth = part_worth;
    }
  }
  return best;
}

// --- harli: the feasible pair whose predicted latency comes closest to the objective. Source:
// Harli, section on the QoS-guaranteed scheduler; its 45 pairs are `qos.levels.pair_levels`, and a
// device that has fewer gives those it has. It keeps an allocation that is still valid. Departures:
// equal predictions go to the larger share of the worker (the paper names no rule), and an idle
// decode leaves the device to the worker.

Grant harli(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  if (view.batch == 0) {
    return decode_idle(ctx);
  }
  const double bound = bound_us(view, ctx);
  const auto predicted = ctx.predicted_us;
  const auto current = static_cast<std::size_t>(std::max<std::int64_t>(0, ctx.current));
  if (current > 0 && current < ctx.allowed && predicted[current] <= bound) {
    return share(ctx, current);
  }
  std::size_t best = 0;
  for (std::size_t index = 1; index < ctx.allowed; ++index) {
    // Splits come by growing share of the worker, so ">=" gives it the tie.
    if (predicted[index] <= bound && (best == 0 || predicted[index] >= predicted[best])) {
      best = index;
    }
  }
  return best != 0 ? share(ctx, best) : alone(ctx);
}

// --- llmstation: as many tasklets beside a decode step as its objective leaves room for. Source:
// LLMStation, Eq. 1: N_p <= (S - N_all * l_d0) * l_d / ((l_d - l_d0) * l_p), where a decode layer
// takes l_d0 alone and l_d beside a tasklet, a tasklet takes l_p, and decode has N_all layers.
// Departures:
// - Eq. 1 is clamped: nothing when decode alone takes S; at most all layers have company, also
// where
//   a tasklet costs decode nothing (l_d <= l_d0) and Eq. 1 divides by zero.
// - The paper's device is not split. Where ours is, N_p is computed for every split and the split
//   with the most tasklets wins, the larger share where two have as many.
// - l_d0 and l_d are the predicted step over N_all: the predictor has the paper's record cache in
//   front (`StepRecords`) and the linear model behind it. l_p is the worker's own estimate; where
//   it has none yet, or a tasklet takes longer than Eq. 1 leaves beside one step, the grant is in
//   microseconds instead of tasklets: the worker runs a part of it.
// - The memory check counts what the tasklets keep against what is free in the arena.

// How many tasklets' memory is free, where the worker's tensors are in lent chunks.
std::int64_t tasklets_that_fit(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (offer.held_chunks == 0 || ctx.chunk_bytes == 0 || offer.memory_delta_bytes <= 0) {
    return std::int64_t{1} << 30;
  }
  // Bytes of free chunks are fewer than a device has; more free ones than that are not a count.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (view.free_chunks > kMost / ctx.chunk_bytes) {
    return kMost;
  }
  return std::max<std::int64_t>(0, view.free_chunks) * ctx.chunk_bytes / offer.memory_delta_bytes;
}

Grant llmstation(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  if (view.batch == 0) {
    return decode_idle(ctx);
  }
  const double bound = bound_us(view, ctx);
  const double layers = real(ctx.layers);
  std::size_t best = 0;
  double best_tasklets = 0;
  double best_us = 0;
  for (std::size_t index = 1; index < ctx.allowed; ++index) {
    const double solo = ctx.solo_us[index] / layers;
    const double beside = ctx.predicted_us[index] / layers;
    const double run_us = accompanied_layers(bound, layers, solo, beside) * beside;
    const std::int64_t units = ctx.splits[index].finetune_units;
    const std::int64_t one_us = tasklet_us(offer, ctx, units);
    // Until it has been measured, a tasklet counts as faster by its units.
    const double tasklets = run_us / (one_us != 0 ? real(one_us) : 1e6 / real(units));
    if (tasklets >= best_tasklets && run_us > 0) {
      best = index;
      best_tasklets = tasklets;
      best_us = run_us;
    }
  }
  if (best == 0) {
    return alone(ctx);
  }
  const std::int64_t fitting = tasklets_that_fit(view, offer, ctx);
  if (fitting == 0) {
    return alone(ctx);
  }
  Grant grant = share(ctx, best);
  const bool measured = tasklet_us(offer, ctx, ctx.splits[best].finetune_units) != 0;
  const std::int64_t count = measured ? std::min(whole(best_tasklets), fitting) : 0;
  if (count == 0) {
    grant.budget_us = std::max<std::int64_t>(1, whole(best_us));
  } else {
    grant.n_tasklets = count;
  }
  return grant;
}

// --- flexllm: the largest window of finetune tokens that a step has room for. Source: FlexLLM's
// hybrid token scheduler, s = argmax { f(c, s) <= S }: inference tokens c come first, then as many
// finetune tokens s as keep the predicted iteration within the objective. Departures:
// - The paper profiles f offline; here f(c, s) = t0 + w(s) * (1 - t0 / t1), where the step takes t0
//   alone and t1 beside the worker, and w(s) is how long s tokens take through all layers, by the
//   worker's own estimate of its next tasklet (a backward counts as it is).
// - Tokens run beside decode's step instead of within its kernels, so that no engine is changed;
// the
//   split with the largest window wins. Its public code has no f: it caps s at a constant.
// - Windows come in steps of 16 tokens from 16 to 512: below 16 a layer's fixed cost rules. Where a
//   step has no room for 16 tokens through all layers, it runs as many of their tasklets as fit.

// Microseconds that a finetune token takes through all layers; 0: not known.
double token_us(const Offer& offer, const PolicyContext& ctx, std::int64_t units) {
  const std::int64_t layers = std::max<std::int64_t>(1, offer.layer_end - offer.layer_begin);
  if (offer.tokens == 0) {
    return 0;
  }
  return real(ctx.layers * tasklet_us(offer, ctx, units)) / real(layers * offer.tokens);
}

// Windows come in whole grains; one at least.
std::int64_t window_of(double run_us, double token, const DecisionFigures& figures) {
  const double tokens = run_us / token;
  if (tokens >= real(figures.most_tokens)) {
    return figures.most_tokens / figures.grain_tokens * figures.grain_tokens;
  }
  const std::int64_t grains = whole(tokens) / figures.grain_tokens;
  return std::max<std::int64_t>(1, grains) * figures.grain_tokens;
}

Grant flexllm(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  if (view.batch == 0) {
    return decode_idle(ctx);
  }
  const double bound = bound_us(view, ctx);
  std::size_t best = 0;
  std::int64_t best_tokens = 0;
  double best_us = 0;
  for (std::size_t index = 1; index < ctx.allowed; ++index) {
    const double run_us = beside_us(bound, ctx.solo_us[index], ctx.predicted_us[index]);
    const double token = token_us(offer, ctx, ctx.splits[index].finetune_units);
    const std::int64_t tokens =
        token != 0 ? window_of(run_us, token, ctx.figures) : ctx.figures.grain_tokens;
    if (run_us > 0 && tokens >= best_tokens) {
      best = index;
      best_tokens = tokens;
      best_us = token != 0 ? std::min(run_us, real(tokens) * token) : run_us;
    }
  }
  if (best == 0) {
    return alone(ctx);
  }
  const double solo = ctx.solo_us[best];
  const double beside = ctx.predicted_us[best];
  Grant grant = share(ctx, best);
  grant.window_tokens = best_tokens;
  grant.budget_us = std::max<std::int64_t>(1, whole(best_us));
  grant.predicted_us = whole(solo + std::min(best_us, beside) * (1 - solo / beside));
  return grant;
}

// --- fineinfer: deferred continuous batching: requests wait a little, finetuning uses the time.
// Source: FineInfer, Alg. 1: a queued request r that has waited d_r is taken once d_r + t_f reaches
// its bound, t_f being one finetune iteration; the batch decodes until it is empty, then finetune
// iterations run until the next request is due. Departures:
// - The worker stops at a tasklet instead of an iteration, so that t_f is the bound on what is in
//   flight.
// - Requests are held before they are admitted to decode: their prompts are computed elsewhere.
// - A request without a bound of its own has the policy's.

// How long requests may still be held back: the oldest has the policy's bound, or the first to be
// due has one of its own.
std::int64_t may_wait_us(const View& view, const PolicyContext& ctx) {
  if (view.waiting != 0 && ctx.due_ns != 0) {
    return (ctx.due_ns - view.start_ns) / 1000;
  }
  return ctx.deferral_us - view.waited_us;
}

// When the first waiting request is due; 0: it is.
std::int64_t hold_until_ns(const View& view, const PolicyContext& ctx) {
  const double left_us = real(may_wait_us(view, ctx)) - real(ctx.in_flight_bound_us);
  return left_us > 0 ? view.start_ns + whole(left_us * 1000) : 0;
}

Grant fineinfer(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  const std::int64_t hold_ns = hold_until_ns(view, ctx);
  const bool busy = view.batch > 0;
  if (!busy && view.waiting != 0 && hold_ns == 0) {
    return alone(ctx);
  }
  Grant grant = busy ? alone(ctx) : decode_idle(ctx);
  grant.hold_admission_until_ns = hold_ns;
  return grant;
}

// --- temporal: decode and worker in turns on the whole device, as a GPU without MPS shares it.
// Source: temporal sharing as LLMStation's and FlexLLM's baselines have it: each step is begun so
// late that it ends at its objective, and the worker has the time before it; so it keeps
// (S - t0) / S of the device. An engine that cannot begin a step later gives the worker the time in
// which decode is idle.

Grant temporal(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  if (view.batch == 0) {
    return decode_idle(ctx);
  }
  const double gap_us = bound_us(view, ctx) - ctx.solo_us[0];
  if (!ctx.gaps || ctx.idle_units == 0 || gap_us < real(ctx.figures.least_gap_us)) {
    return alone(ctx);
  }
  return in_turns(view, ctx, gap_us);
}

// --- iterations: turns by whole finetune iterations. The worker runs them while decode is idle,
// and requests wait for the end of the one that has begun, up to the bound on waiting.

Grant iterations(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (!has_work(offer) || view.batch != 0) {
    return alone(ctx);
  }
  const std::int64_t left_us = may_wait_us(view, ctx);
  if (view.waiting != 0 && (left_us <= 0 || !mid_iteration(offer))) {
    return alone(ctx);
  }
  Grant grant = decode_idle(ctx);
  grant.hold_admission_until_ns = view.start_ns + std::max<std::int64_t>(0, left_us) * 1000;
  return grant;
}

// --- static: the baseline that needs no prediction, where the guard alone protects decode: the
// largest share that the limits allow, whatever decode does, also while it idles. Source: the
// StaticMode that Harli is compared with (60% of SMs and memory), and MPS percentages.

Grant fixed_share(const View& /*view*/, const Offer& offer, const PolicyContext& ctx) {
  return !has_work(offer) || ctx.allowed == 1 ? alone(ctx) : share(ctx, ctx.allowed - 1);
}

// The one list of names: what offers policies reads it.
constexpr std::array<NamedPolicy, 8> kPolicies{{
    {"windrow", &windrow_policy},
    {"harli", &harli},
    {"llmstation", &llmstation},
    {"flexllm", &flexllm},
    {"fineinfer", &fineinfer},
    {"temporal", &temporal},
    {"static", &fixed_share},
    {"iterations", &iterations},
}};

}  // namespace

std::span<const NamedPolicy> policies() {
  return kPolicies;
}

const NamedPolicy& policy_of(std::string_view name) {
  for (const NamedPolicy& policy : kPolicies) {
    if (policy.name == name) {
      return policy;
    }
  }
  throw std::invalid_argument(std::string(name) + " is not a policy");
}

double beside_us(double bound, double solo, double beside) {
  if (solo >= bound) {
    return 0;
  }
  return beside <= bound ? beside : (bound - solo) * beside / (beside - solo);
}

double accompanied_layers(double objective, double layers, double solo, double beside) {
  if (layers * solo >= objective) {
    return 0;
  }
  if (beside <= solo) {
    return layers;
  }
  const double room = (objective - layers * solo) / (beside - solo);
  return room >= layers ? layers : real(whole(room));
}

Grant alone(const PolicyContext& ctx) {
  Grant grant;
  grant.decode_units = ctx.units;
  grant.predicted_us = whole(ctx.predicted_us[0]);
  return grant;
}

bool is_for_one_step(const Grant& grant) {
  return grant.budget_us != 0 || grant.n_tasklets != 0 || grant.gap_until_ns != 0 ||
         grant.hold_admission_until_ns != 0;
}

double effective_units(const Grant& grant, const View& view, const Offer& offer,
                       const PolicyContext& ctx) {
  if (grant.action != kGo) {
    return 0;
  }
  double part = 1;
  const double step_us = real(std::max<std::int64_t>(1, grant.predicted_us));
  if (grant.gap_until_ns != 0) {
    part = real(grant.gap_until_ns - view.start_ns) / 1000 / step_us;
  } else if (grant.budget_us != 0) {
    part = real(grant.budget_us) / step_us;
  } else if (grant.n_tasklets != 0) {
    const std::int64_t one_us = tasklet_us(offer, ctx, grant.finetune_units);
    if (one_us != 0) {
      part = real(grant.n_tasklets * one_us) / step_us;
    }
  }
  return real(grant.finetune_units) * std::min(1.0, part);
}

}  // namespace windrow
