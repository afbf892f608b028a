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

bool has_work(const Offer& offer) {
  return offer.job_epoch > 0 && offer.starving == 0;
}

double bound_us(const View& view, const PolicyContext& ctx) {
  return real(view.objective_us) / (1 + ctx.margin);
}

std::int64_t tasklet_us(const Offer& offer, const PolicyContext& ctx, std::int64_t units) {
  const auto at = std::ranges::lower_bound(ctx.offered, units);
  const auto place = static_cast<std::size_t>(at - ctx.offered.begin());
  return offer.estimates_us[std::min({place, ctx.offered.size() - 1, kLevelsMax - 1})];
}

double iteration_us(const Offer& offer, const PolicyContext& ctx) {
  const std::int64_t layers = offer.layer_end - offer.layer_begin;
  if (layers < 1 || ctx.idle_units == 0) {
    return 0;
  }
  const std::int64_t weight = offer.phase == kPhaseBackward ? 2 : 1;
  return real(ctx.figures.passes * ctx.layers * tasklet_us(offer, ctx, ctx.idle_units)) /
         real(layers * weight);
}

Grant share(const PolicyContext& ctx, std::size_t index) {
  Grant grant;
  grant.action = kGo;
  grant.finetune_units = ctx.splits[index].finetune_units;
  grant.decode_units = ctx.splits[index].decode_units;
  grant.predicted_us = whole(ctx.predicted_us[index]);
  grant.in_flight_bound_us = ctx.in_flight_bound_us;
  return grant;
}

double beside_us(double bound, double solo, double beside) {
  if (solo >= bound) {
    return 0;
  }
  return beside <= bound ? beside : (bound - solo) * beside / (beside - solo);
}

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

bool mid_iteration(const Offer& offer) {
  const bool begins = offer.phase == kPhaseNone || offer.phase == kPhaseForward;
  return !(begins && offer.layer_begin == 0);
}

// --- windrow

double speed(const Offer& offer, const PolicyContext& ctx, std::int64_t units) {
  if (units == 0) {
    return 0;
  }
  const std::int64_t whole_us = tasklet_us(offer, ctx, ctx.idle_units);
  const std::int64_t here_us = tasklet_us(offer, ctx, units);
  return whole_us != 0 && here_us != 0 ? real(ctx.idle_units * whole_us) / real(here_us)
                                       : real(units);
}

double budget_us(const View& view, const PolicyContext& ctx) {
  const double objective = real(view.objective_us);
  if (!ctx.per_request) {
    return objective;
  }
  const double change = real(view.slack_us) / ctx.figures.slack_steps;
  return objective + std::max(-objective / 2, std::min(objective, change));
}

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

double gap_before_us(double budget, const View& view, const PolicyContext& ctx) {
  if (!ctx.gaps || ctx.idle_units == 0 || view.waiting != 0 || view.admitted_tokens != 0) {
    return 0;
  }
  const double step_us = std::min(budget / (1 + ctx.figures.turns_margin * ctx.margin),
                                  ctx.figures.most_stretch * ctx.solo_us[0]);
  const double gap_us = step_us - ctx.solo_us[0];
  return gap_us >= real(ctx.figures.least_gap_us) ? gap_us : 0;
}

std::pair<Grant, double> best_beside(double bound, const Offer& offer, const PolicyContext& ctx) {
  const std::size_t index = largest_share(bound, ctx);
  Grant best = index != 0 ? share(ctx, index) : alone(ctx);
  double worth = speed(offer, ctx, best.finetune_units);
  if (index != 0 && !ctx.taught) {
    return {best, worth};
  }
  for (std::size_t larger = ctx.allowed; larger-- > index + 1;) {
    const DecisionSplit& split = ctx.splits[larger];
    if (split.decode_units < ctx.units) {
      continue;
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
      const double in_flight = real(std::max<std::int64_t>(1, ctx.in_flight_bound_us));
      const double filling_us = run_us / std::ceil(run_us / in_flight);
      best.in_flight_bound_us = std::max<std::int64_t>(1, whole(filling_us));
      worth = part_worth;
    }
  }
  return {best, worth};
}

Grant windrow(bool turns, const View& view, const Offer& offer, const PolicyContext& ctx) {
  const double budget = budget_us(view, ctx);
  const auto [beside, beside_worth] = best_beside(budget / (1 + ctx.margin), offer, ctx);
  const double gap_us = turns ? gap_before_us(budget, view, ctx) : 0;
  if (gap_us != 0) {
    const double worth = speed(offer, ctx, ctx.idle_units) * gap_us / (gap_us + ctx.solo_us[0]);
    const double wanted = ctx.current == kInTurns ? 1 : ctx.figures.turns_gain;
    if (worth > wanted * beside_worth) {
      return in_turns(view, ctx, gap_us);
    }
  }
  return beside;
}

// --- harli

Grant harli(bool repick, const View& view, const PolicyContext& ctx) {
  const double bound = bound_us(view, ctx);
  const auto predicted = ctx.predicted_us;
  const auto current = static_cast<std::size_t>(std::max<std::int64_t>(0, ctx.current));
  if (!repick && current > 0 && current < ctx.allowed && predicted[current] <= bound) {
    return share(ctx, current);
  }
  std::size_t best = 0;
  for (std::size_t index = 1; index < ctx.allowed; ++index) {
    if (predicted[index] <= bound && (best == 0 || predicted[index] >= predicted[best])) {
      best = index;
    }
  }
  return best != 0 ? share(ctx, best) : alone(ctx);
}

// --- llmstation

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

std::int64_t tasklets_that_fit(const View& view, const Offer& offer, const PolicyContext& ctx) {
  if (offer.held_chunks == 0 || ctx.chunk_bytes == 0 || offer.memory_delta_bytes <= 0) {
    return std::int64_t{1} << 30;
  }
  // Bytes of free chunks are fewer than a device has; more free ones than that are no count.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (view.free_chunks > kMost / ctx.chunk_bytes) {
    return kMost;
  }
  return std::max<std::int64_t>(0, view.free_chunks) * ctx.chunk_bytes / offer.memory_delta_bytes;
}

Grant llmstation(const View& view, const Offer& offer, const PolicyContext& ctx) {
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

// --- flexllm

double token_us(const Offer& offer, const PolicyContext& ctx, std::int64_t units) {
  const std::int64_t layers = std::max<std::int64_t>(1, offer.layer_end - offer.layer_begin);
  if (offer.tokens == 0) {
    return 0;
  }
  return real(ctx.layers * tasklet_us(offer, ctx, units)) / real(layers * offer.tokens);
}

// Windows come in whole grains, as `int(run_us / token) // grain * grain`; one at least.
std::int64_t window_of(double run_us, double token, const DecisionFigures& figures) {
  const double tokens = run_us / token;
  if (tokens >= real(figures.most_tokens)) {
    return figures.most_tokens / figures.grain_tokens * figures.grain_tokens;
  }
  const std::int64_t grains = whole(tokens) / figures.grain_tokens;
  return std::max<std::int64_t>(1, grains) * figures.grain_tokens;
}

Grant flexllm(const View& view, const Offer& offer, const PolicyContext& ctx) {
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

// --- fineinfer

std::int64_t hold_until_ns(bool iteration, const View& view, const Offer& offer,
                           const PolicyContext& ctx) {
  const double last_us = real(ctx.deferral_us - view.waited_us);
  double switch_us = real(ctx.in_flight_bound_us);
  if (iteration) {
    switch_us = view.batch == 0 && mid_iteration(offer) ? 0 : iteration_us(offer, ctx);
  }
  const double left_us = last_us - switch_us;
  return left_us > 0 ? view.start_ns + whole(left_us * 1000) : 0;
}

Grant fineinfer(bool iteration, const View& view, const Offer& offer, const PolicyContext& ctx) {
  const std::int64_t hold_ns = hold_until_ns(iteration, view, offer, ctx);
  const bool busy = view.batch > 0;
  if (!busy && view.waiting != 0 && hold_ns == 0) {
    return alone(ctx);
  }
  Grant grant = busy ? alone(ctx) : decode_idle(ctx);
  grant.hold_admission_until_ns = hold_ns;
  return grant;
}

// --- temporal

Grant temporal_idle(bool iteration, const View& view, const Offer& offer,
                    const PolicyContext& ctx) {
  if (!iteration) {
    return decode_idle(ctx);
  }
  const std::int64_t left_us = ctx.deferral_us - view.waited_us;
  if (view.waiting != 0 && (left_us <= 0 || !mid_iteration(offer))) {
    return alone(ctx);
  }
  Grant grant = decode_idle(ctx);
  grant.hold_admission_until_ns = view.start_ns + std::max<std::int64_t>(0, left_us) * 1000;
  return grant;
}

Grant temporal(bool iteration, const View& view, const PolicyContext& ctx) {
  const double gap_us = bound_us(view, ctx) - ctx.solo_us[0];
  if (iteration || !ctx.gaps || ctx.idle_units == 0 || gap_us < real(ctx.figures.least_gap_us)) {
    return alone(ctx);
  }
  return in_turns(view, ctx, gap_us);
}

constexpr std::array<std::pair<std::string_view, PolicyKind>, 7> kNames{{
    {"windrow", PolicyKind::kWindrow},
    {"harli", PolicyKind::kHarli},
    {"llmstation", PolicyKind::kLlmStation},
    {"flexllm", PolicyKind::kFlexLlm},
    {"fineinfer", PolicyKind::kFineInfer},
    {"temporal", PolicyKind::kTemporal},
    {"static", PolicyKind::kStatic},
}};

}  // namespace

PolicyKind policy_of(std::string_view name) {
  for (const auto& [known, kind] : kNames) {
    if (known == name) {
      return kind;
    }
  }
  throw std::invalid_argument("there is no compiled policy " + std::string(name));
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

Grant ask_policy(PolicyKind kind, bool option, const View& view, const Offer& offer,
                 const PolicyContext& ctx) {
  if (!has_work(offer)) {
    return alone(ctx);
  }
  if (kind == PolicyKind::kStatic) {
    return ctx.allowed == 1 ? alone(ctx) : share(ctx, ctx.allowed - 1);
  }
  if (kind == PolicyKind::kFineInfer) {
    return fineinfer(option, view, offer, ctx);
  }
  if (view.batch == 0) {
    return kind == PolicyKind::kTemporal ? temporal_idle(option, view, offer, ctx)
                                         : decode_idle(ctx);
  }
  switch (kind) {
    case PolicyKind::kHarli:
      return harli(option, view, ctx);
    case PolicyKind::kLlmStation:
      return llmstation(view, offer, ctx);
    case PolicyKind::kFlexLlm:
      return flexllm(view, offer, ctx);
    case PolicyKind::kTemporal:
      return temporal(option, view, ctx);
    default:
      return windrow(option, view, offer, ctx);
  }
}

}  // namespace windrow
