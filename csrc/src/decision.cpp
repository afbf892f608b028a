#include "windrow/decision.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace windrow {
namespace {

// A worker that would always have work: what `observe` asks about.
constexpr Offer kEager{.job_epoch = 1};

// Of a batch: as Python's `(batch - 1).bit_length()`, for any 64-bit figure.
std::int64_t batch_bits_of(std::int64_t batch) {
  const std::uint64_t less = static_cast<std::uint64_t>(batch) - 1;
  return static_cast<std::int64_t>(
      std::bit_width(static_cast<std::int64_t>(less) < 0 ? 0 - less : less));
}

bool within(std::int64_t value, std::int64_t bound) {
  return value >= 0 && value < bound;
}

}  // namespace

std::size_t Corrections::place_of(std::int64_t batch_bits, std::int64_t context,
                                  std::int64_t phase) const {
  auto hash = static_cast<std::uint64_t>(batch_bits) * 0x9E3779B97F4A7C15U;
  hash = (hash ^ static_cast<std::uint64_t>(context)) * 0x9E3779B97F4A7C15U;
  hash = (hash ^ static_cast<std::uint64_t>(phase)) * 0x9E3779B97F4A7C15U;
  std::size_t at = (hash >> 32U) & (places_.size() - 1);
  for (;;) {
    const Place& place = places_[at];
    const bool same =
        place.batch_bits == batch_bits && place.context == context && place.phase == phase;
    if (place.row < 0 || same) {
      return at;
    }
    at = (at + 1) & (places_.size() - 1);
  }
}

const double* Corrections::find(std::int64_t batch_bits, std::int64_t context,
                                std::int64_t phase) const {
  if (places_.empty()) {
    return nullptr;
  }
  const Place& place = places_[place_of(batch_bits, context, phase)];
  return place.row < 0 ? nullptr : &ratios_[static_cast<std::size_t>(place.row) * splits_];
}

void Corrections::set(std::int64_t batch_bits, std::int64_t context, std::int64_t phase,
                      std::size_t split, double ratio) {
  if (split >= splits_) {
    throw std::out_of_range("there is no split " + std::to_string(split));
  }
  if (places_.empty()) {
    places_.resize(2 * kMost);
  }
  Place& place = places_[place_of(batch_bits, context, phase)];
  if (place.row < 0) {
    const std::size_t row = ratios_.size() / splits_;
    if (row >= kMost) {
      throw std::length_error("more kinds of steps than the cache of records holds");
    }
    ratios_.resize(ratios_.size() + splits_, 1.0);
    place = {batch_bits, context, phase, static_cast<std::int64_t>(row)};
  }
  ratios_[static_cast<std::size_t>(place.row) * splits_ + split] = ratio;
}

void Corrections::clear() {
  places_.clear();
  ratios_.clear();
}

Decider::Decider(const DecisionFigures& figures, Device device, std::int64_t pause_epoch)
    : decode_units_(device.units),
      pause_epoch_(pause_epoch),
      figures_(figures),
      device_(std::move(device)),
      solo_us_(device_.splits.size()),
      beside_us_(device_.splits.size()),
      corrections_(device_.splits.size()) {
  if (device_.splits.empty() || device_.offered.empty() || device_.units < 1) {
    throw std::invalid_argument("a device has a unit and a split at least");
  }
}

void Decider::set_models(const std::vector<std::array<double, 3>>& models) {
  if (models.size() != device_.splits.size()) {
    throw std::invalid_argument(std::to_string(models.size()) + " models for " +
                                std::to_string(device_.splits.size()) + " splits");
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    DecisionSplit& split = device_.splits[i];
    split.c0_us = models[i][0];
    split.b0_us = models[i][1];
    split.k0_us = models[i][2];
  }
  corrections_.clear();
}

void Decider::learned(double b1, double k1, double margin, std::int64_t most_batch,
                      std::int64_t most_context, bool taught) {
  stale_fold_ = stale_fold_ || b1 != b1_ || k1 != k1_;
  b1_ = b1;
  k1_ = k1;
  margin_ = margin;
  most_batch_ = most_batch;
  most_context_ = most_context;
  taught_ = taught;
}

void Decider::correct(std::int64_t batch_bits, std::int64_t context, std::int64_t phase,
                      std::size_t split, double ratio) {
  corrections_.set(batch_bits, context, phase, split, ratio);
}

void Decider::set_terms(const DecisionTerms& terms) {
  if (terms.allowed < 1 || terms.allowed > device_.splits.size()) {
    throw std::invalid_argument(std::to_string(terms.allowed) + " splits are allowed of " +
                                std::to_string(device_.splits.size()));
  }
  terms_ = terms;
  idle_why_ = Why::kRuns;
}

bool Decider::take_trial() {
  return std::exchange(trial_, false);
}

Grant Decider::decide(const View& view, const Offer& offer, std::int64_t now_ns, bool present,
                      std::int64_t chunks) {
  Grant grant = wish(view, offer, now_ns, present);
  hand_over(grant, offer, present);
  const bool settled = decode_units_ == grant.decode_units;
  const bool runs = grant.action != kPause && view.batch > 0 && settled;
  const bool in_part = runs && is_for_one_step(grant);
  during_ = {.split = runs && !in_part ? current_ : 0,
             .batch = view.batch,
             .context_tokens = view.context_tokens,
             .slack_us = view.slack_us,
             .predicted_us = grant.predicted_us,
             .phase = offer.phase,
             .harvested = grant.finetune_units > 0 || decode_units_ < device_.units,
             .settled = settled,
             .in_part = in_part};
  grant.decode_units = decode_units_;
  grant.pause_epoch = pause_epoch_;
  grant.chunks = chunks;
  return grant;
}

Grant Decider::wish(const View& view, const Offer& offer, std::int64_t now_ns, bool present) {
  if (idle_why_ != Why::kRuns) {
    return paused(idle_why_);
  }
  const bool observing = terms_.observing;
  if (!present && !observing) {
    return paused(Why::kNoWorker);
  }
  predict(view.batch, view.context_tokens, offer.phase);
  extrapolated_ = view.batch > most_batch_ || view.context_tokens > most_context_;
  margin_shown_ = margin_ + extra_margin(now_ns);
  if (extrapolated_) {
    margin_shown_ += figures_.beyond_margin;
  }
  alone_us_ = solo_us_[0];
  const Why why = doubt(view, offer, now_ns);
  if (why != Why::kRuns || terms_.refused) {
    would_units_ = 0;
    return paused(why != Why::kRuns ? why : Why::kObjective);
  }
  const PolicyContext ctx{.figures = figures_,
                          .units = device_.units,
                          .splits = device_.splits,
                          .offered = device_.offered,
                          .allowed = terms_.allowed,
                          .idle_units = terms_.idle_units,
                          .predicted_us = beside_us_,
                          .solo_us = solo_us_,
                          .margin = margin_shown_,
                          .current = current_,
                          .in_flight_bound_us = terms_.objective_us / 4,
                          .layers = device_.layers,
                          .deferral_us = terms_.deferral_us,
                          .chunk_bytes = device_.chunk_bytes,
                          .per_request = terms_.per_request,
                          .gaps = device_.gaps,
                          .taught = taught_};
  const Offer& asked = observing ? kEager : offer;
  Grant grant = ask_policy(terms_.policy, terms_.option, view, asked, ctx);
  if (grant.action != kPause) {
    grant = guarded(grant, view, ctx, now_ns);
  } else {
    const std::int64_t begun_ns = view.start_ns != 0 ? view.start_ns : now_ns;
    grant.gap_until_ns = 0;
    grant.hold_admission_until_ns =
        std::min(grant.hold_admission_until_ns, begun_ns + terms_.deferral_us * 1000);
    const Why held = now_ns < guard_.paused_until_ns ? why_held() : Why::kObjective;
    why_ = offer.starving != 0 && !observing ? Why::kStarving : held;
  }
  if (grant.action == kPause) {
    current_ = 0;
  } else if (grant.gap_until_ns != 0) {
    current_ = kInTurns;
  } else if (view.batch == 0) {
    current_ = static_cast<std::int64_t>(terms_.allowed) - 1;
  } else {
    current_ = index_of(grant);
  }
  would_units_ = effective_units(grant, view, asked, ctx);
  if (observing) {
    why_ = Why::kObserve;
    return alone(ctx);
  }
  return grant;
}

Grant Decider::guarded(const Grant& wish, const View& view, const PolicyContext& ctx,
                       std::int64_t now_ns) {
  if (!may_run(now_ns)) {
    why_ = why_held();
    return alone(ctx);
  }
  std::int64_t most = device_.splits[terms_.allowed - 1].finetune_units;
  if (view.batch == 0 || wish.gap_until_ns != 0) {
    most = std::max(most, terms_.idle_units);
  }
  const std::int64_t objective_us = terms_.objective_us * (terms_.per_request ? 2 : 1);
  const double gap_us = std::max(0.0, static_cast<double>(objective_us) - solo_us_[0]);
  const std::int64_t begun_ns = view.start_ns != 0 ? view.start_ns : now_ns;
  const bool kept = wish.finetune_units > 0 && wish.finetune_units <= most &&
                    wish.gap_until_ns <= begun_ns + static_cast<std::int64_t>(gap_us * 1000) &&
                    wish.hold_admission_until_ns <= begun_ns + terms_.deferral_us * 1000;
  if (!kept || wish.action != kGo) {
    why_ = Why::kLimits;
    return alone(ctx);
  }
  why_ = Why::kRuns;
  return wish;
}

Grant Decider::paused(Why why) {
  current_ = 0;
  why_ = why;
  Grant grant;
  grant.decode_units = device_.units;
  return grant;
}

void Decider::predict(std::int64_t batch, std::int64_t context_tokens, std::int64_t phase) {
  if (stale_fold_) {
    fold();
  }
  const auto b = static_cast<double>(std::max(batch, figures_.batch_floor));
  const auto x = static_cast<double>(context_tokens);
  const double* known =
      corrections_.find(batch_bits_of(batch), context_tokens >> figures_.context_bits, phase);
  for (std::size_t i = 0; i < device_.splits.size(); ++i) {
    const DecisionSplit& split = device_.splits[i];
    const double solo = split.c0_us + split.b0_us * b + split.k0_us * x;
    const double beside = solo * split.stretch;
    solo_us_[i] = solo;
    // Whatever was measured, a worker never makes decode faster.
    beside_us_[i] = known == nullptr ? beside : std::max(beside * known[i], solo);
  }
}

void Decider::fold() {
  const auto units = static_cast<double>(device_.units);
  for (DecisionSplit& split : device_.splits) {
    const double s_inf = static_cast<double>(split.decode_units) / units;
    const double s_ft = static_cast<double>(split.finetune_units) / units;
    split.stretch = std::max(1.0, b1_ * s_inf + k1_ * s_ft);
  }
  device_.splits[0].stretch = 1;
  stale_fold_ = false;
}

Why Decider::why_held() const {
  if (guard_.open) {
    return Why::kBreaker;
  }
  return guard_.for_queue ? Why::kQueue : Why::kGuard;
}

double Decider::extra_margin(std::int64_t now_ns) const {
  if (guard_.extra == 0) {
    return 0;
  }
  const double age = static_cast<double>(now_ns - guard_.extra_at_ns) /
                     static_cast<double>(figures_.widen_half_life_ns);
  return age < 10 ? guard_.extra * std::pow(2.0, -age) : 0;
}

Why Decider::doubt(const View& view, const Offer& offer, std::int64_t now_ns) {
  standing_ = now_ns > last_now_ns_ ? 0 : standing_ + 1;
  const bool backwards = now_ns < last_now_ns_;
  last_now_ns_ = now_ns;
  if (backwards || standing_ >= figures_.standing_clock) {
    return Why::kClock;
  }
  const bool fresh =
      now_ns - figures_.stale_ns < view.start_ns && view.start_ns < now_ns + figures_.stale_ns;
  if (view.start_ns != 0 && !fresh) {
    return Why::kStale;
  }
  const double longest = figures_.longest_step_us;
  if (view.batch < 0 || view.context_tokens < 0 || view.objective_us <= 0 ||
      static_cast<double>(view.objective_us) >= longest) {
    return Why::kImpossibleView;
  }
  for (const double step_us : beside_us_) {
    if (!(0 < step_us && step_us < longest)) {
      return Why::kImpossiblePrediction;
    }
  }
  const auto longest_us = static_cast<std::int64_t>(longest);
  bool possible = within(offer.layer_begin, figures_.offered_layers) &&
                  within(offer.layer_end, figures_.offered_layers) &&
                  within(offer.tokens, figures_.offered_tokens) &&
                  offer.memory_delta_bytes < figures_.offered_bytes;
  for (const std::int64_t estimate_us : offer.estimates_us) {
    possible = possible && within(estimate_us, longest_us);
  }
  return possible ? Why::kRuns : Why::kImpossibleOffer;
}

bool Decider::may_run(std::int64_t now_ns) {
  if (now_ns < guard_.paused_until_ns) {
    return false;
  }
  if (guard_.open && now_ns >= guard_.open_until_ns) {
    guard_.open = false;  // half-open: a trial, judged by a fresh window of its own
    trial_ = true;
  }
  return !guard_.open;
}

std::int64_t Decider::index_of(const Grant& grant) const {
  for (std::size_t i = 0; i < device_.splits.size(); ++i) {
    const DecisionSplit& split = device_.splits[i];
    if (split.finetune_units == grant.finetune_units &&
        (grant.decode_units == 0 || split.decode_units == grant.decode_units)) {
      return static_cast<std::int64_t>(i);
    }
  }
  return 0;
}

void Decider::hand_over(const Grant& wish, const Offer& offer, bool present) {
  if (wish.finetune_units < finetune_units_) {
    ++pause_epoch_;
  }
  finetune_units_ = wish.finetune_units;
  if (wish.decode_units > decode_units_ && present) {
    const bool quiet =
        offer.pause_epoch_seen >= pause_epoch_ && (wish.action == kGo || offer.in_flight_us == 0);
    if (!quiet) {
      return;
    }
  }
  decode_units_ = wish.decode_units;
}

}  // namespace windrow
