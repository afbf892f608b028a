#include "windrow/guard.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

namespace windrow {
namespace {

// Beyond these a worker's figures cannot be meant: no model has as many layers, no tasklet as many
// tokens, no device as many bytes. Products of figures below them fit 64 bits.
constexpr std::int64_t kOfferedLayers = std::int64_t{1} << 20;
constexpr std::int64_t kOfferedTokens = std::int64_t{1} << 31;
constexpr std::int64_t kOfferedBytes = std::int64_t{1} << 50;

bool within(std::int64_t value, std::int64_t bound) {
  return value >= 0 && value < bound;
}

}  // namespace

Guard::Guard(const GuardSettings& settings, bool watches)
    : settings_(settings), watches_(watches), break_ns_(settings.first_break_ns) {}

void Guard::Rate::add(bool over, double decay) {
  ++seen;
  // A plain mean until the window is full: the first step must not weigh as much as 400.
  share += ((over ? 1.0 : 0.0) - share) * std::max(decay, 1.0 / static_cast<double>(seen));
}

void Guard::set_percentile(double percentile) {
  allowed_share_ = std::max(0.0, 1.0 - percentile / 100.0);
}

double Guard::extra_margin(std::int64_t now_ns) const {
  if (extra_ == 0) {
    return 0;
  }
  const double age = static_cast<double>(now_ns - extra_at_ns_) /
                     static_cast<double>(settings_.widen_half_life_ns);
  return age < 10 ? extra_ * std::pow(2.0, -age) : 0;
}

Why Guard::doubt(const View& view, const Offer& offer, std::span<const double> predicted_us,
                 std::int64_t now_ns) {
  standing_ = now_ns > last_now_ns_ ? 0 : standing_ + 1;
  const bool backwards = now_ns < last_now_ns_;
  last_now_ns_ = now_ns;
  if (backwards || standing_ >= settings_.standing_clock) {
    return Why::kClock;
  }
  const bool fresh =
      now_ns - settings_.stale_ns < view.start_ns && view.start_ns < now_ns + settings_.stale_ns;
  if (view.start_ns != 0 && !fresh) {
    return Why::kStale;
  }
  const double longest = settings_.longest_step_us;
  if (view.batch < 0 || view.context_tokens < 0 || view.objective_us <= 0 ||
      static_cast<double>(view.objective_us) >= longest) {
    return Why::kImpossibleView;
  }
  for (const double step_us : predicted_us) {
    if (!(0 < step_us && step_us < longest)) {
      return Why::kImpossiblePrediction;
    }
  }
  const auto longest_us = static_cast<std::int64_t>(longest);
  bool possible = within(offer.layer_begin, kOfferedLayers) &&
                  within(offer.layer_end, kOfferedLayers) && within(offer.tokens, kOfferedTokens) &&
                  offer.memory_delta_bytes < kOfferedBytes;
  for (const std::int64_t estimate_us : offer.estimates_us) {
    possible = possible && within(estimate_us, longest_us);
  }
  return possible ? Why::kRuns : Why::kImpossibleOffer;
}

bool Guard::may_run(std::int64_t now_ns) {
  if (!watches_) {
    return true;
  }
  if (pauses(now_ns)) {
    return false;
  }
  if (!reason_.empty() && now_ns >= open_until_ns_) {
    begin_trial();
  }
  return reason_.empty();
}

Why Guard::why_held() const {
  if (!reason_.empty()) {
    return Why::kBreaker;
  }
  return for_queue_ ? Why::kQueue : Why::kGuard;
}

void Guard::queued(std::int64_t now_ns, std::int64_t waited_us) {
  if (!watches_ || waited_us < settings_.queue_us) {
    return;
  }
  if (now_ns >= paused_until_ns_) {
    // Steps a tenth shorter than those that could not keep up.
    const double shorter =
        beside_latency_us_ != 0
            ? static_cast<double>(beside_objective_us_) / (0.9 * beside_latency_us_) - 1
            : 0;
    widen(now_ns, std::min(settings_.widen_queued, shorter));
  }
  pause(now_ns, true);
}

void Guard::throttled(std::int64_t now_ns, double seconds) {
  // Limits are counted in periods of 100 ms, so decode is held for longer than any margin
  // covers, and what the worker takes of the pod's limit decode lacks.
  if (!reason_.empty()) {
    return;
  }
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(),
                "its CPU limit kept decode from running for %.0f ms beside the worker: raise "
                "resources.limits.cpu of decode's container, or harvest fewer cores",
                seconds * 1000);
  open(now_ns, text.data());
}

void Guard::begin_trial() {
  reason_.clear();
  beside_ = {};
}

void Guard::observe(std::int64_t now_ns, double latency_us, std::int64_t objective_us,
                    bool harvested) {
  if (!watches_) {
    return;
  }
  const bool over = objective_us > 0 && latency_us > static_cast<double>(objective_us);
  if (harvested) {
    beside_objective_us_ = objective_us;
    beside_latency_us_ = latency_us;
  }
  (harvested ? beside_ : alone_).add(over, 1.0 / static_cast<double>(settings_.window_steps));
  over_in_a_row_ = over && harvested ? over_in_a_row_ + 1 : 0;
  if (over_in_a_row_ >= 2) {
    widen(now_ns, 0);
    pause(now_ns, false);
    over_in_a_row_ = 0;
    ++trips_;
  }
  if (over && harvested) {
    judge(now_ns);
  } else if (harvested && beside_.seen == 4 * settings_.window_steps) {
    break_ns_ = settings_.first_break_ns;  // long enough without a break
  }
}

void Guard::pause(std::int64_t now_ns, bool for_queue) {
  paused_until_ns_ = now_ns + settings_.pause_ns;
  for_queue_ = for_queue;
}

void Guard::widen(std::int64_t now_ns, double at_least) {
  const double before = extra_margin(now_ns);
  const double wider = std::min(settings_.widen_max, before + settings_.widen);
  extra_ = std::max({before, wider, at_least});
  extra_at_ns_ = now_ns;
}

void Guard::judge(std::int64_t now_ns) {
  const double bound = alone_.share + settings_.excess_factor * allowed_share_;
  if (!reason_.empty() || beside_.seen < settings_.min_steps || beside_.share <= bound) {
    return;
  }
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(),
                "%.1f%% of %lld steps beside the worker broke the objective, %.1f%% of those "
                "without",
                beside_.share * 100,
                static_cast<long long>(std::min(beside_.seen, settings_.window_steps)),
                alone_.share * 100);
  open(now_ns, text.data());
}

// Each time for twice as long.
void Guard::open(std::int64_t now_ns, std::string reason) {
  reason_ = std::move(reason);
  open_until_ns_ = now_ns + break_ns_;
  break_ns_ = std::min(2 * break_ns_, settings_.longest_break_ns);
}

}  // namespace windrow
