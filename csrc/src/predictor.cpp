#include "windrow/predictor.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

namespace windrow {
namespace {

// Records forget with this weight; fewer than so many steps are not a record yet.
constexpr double kRecordWeight = 0.05;
constexpr std::int64_t kRecordSteps = 16;
// A correction beyond this is a model that does not fit, which the margin is for.
constexpr double kMostCorrection = 1.25;
constexpr std::size_t kMostKinds = 1024;
constexpr int kContextBits = 12;
constexpr double kMarginQuantile = 0.95;
// A tracker of a quantile moves by this much a step, up by 0.95 and down by 0.05 of it: from 8% to
// 4% in some 800 steps, from 4% to 8% in 40 steps that all exceed.
constexpr double kMarginPace = 1e-3;
// One step of which the machine made several must not move the model by more than this.
constexpr double kMostInnovation = 0.5;
// With one level both regressors are proportional for ever, and plain forgetting would let the
// information about the other direction fade to nothing: the first step in it would then throw the
// estimate far off. So much information (a tenth of one step's) never fades.
constexpr double kLeastInformation = 0.1;

// Of a batch less one: as many bits as its absolute value has, for any 64-bit figure.
std::int64_t batch_bits_of(std::int64_t batch) {
  const std::uint64_t less = static_cast<std::uint64_t>(batch) - 1;
  return static_cast<std::int64_t>(
      std::bit_width(static_cast<std::int64_t>(less) < 0 ? 0 - less : less));
}

double real(std::int64_t value) {
  return static_cast<double>(value);
}

}  // namespace

std::size_t StepRecords::place_of(std::int64_t batch, std::int64_t context_tokens,
                                  std::int64_t phase, Place& key) const {
  key = {batch_bits_of(batch), context_tokens >> kContextBits, phase, -1};
  auto hash = static_cast<std::uint64_t>(key.batch_bits) * 0x9E3779B97F4A7C15U;
  hash = (hash ^ static_cast<std::uint64_t>(key.context)) * 0x9E3779B97F4A7C15U;
  hash = (hash ^ static_cast<std::uint64_t>(key.phase)) * 0x9E3779B97F4A7C15U;
  std::size_t at = (hash >> 32U) & (places_.size() - 1);
  for (;;) {
    const Place& place = places_[at];
    const bool same = place.batch_bits == key.batch_bits && place.context == key.context &&
                      place.phase == key.phase;
    if (place.row < 0 || same) {
      return at;
    }
    at = (at + 1) & (places_.size() - 1);
  }
}

const double* StepRecords::find(std::int64_t batch, std::int64_t context_tokens,
                                std::int64_t phase) const {
  if (known_count_ == 0) {
    return nullptr;
  }
  Place key;
  const Place& place = places_[place_of(batch, context_tokens, phase, key)];
  const auto row = static_cast<std::size_t>(place.row);
  return place.row >= 0 && is_known_[row] ? &known_[row * splits_] : nullptr;
}

void StepRecords::add(std::size_t split, std::int64_t batch, std::int64_t context_tokens,
                      std::int64_t phase, double ratio) {
  if (places_.empty()) {
    places_.resize(2 * kMostKinds);
  }
  Place key;
  Place& place = places_[place_of(batch, context_tokens, phase, key)];
  if (place.row < 0) {
    const std::size_t kinds = is_known_.size();
    if (kinds >= kMostKinds) {
      return;
    }
    key.row = static_cast<std::int64_t>(kinds);
    place = key;
    ratios_.resize(ratios_.size() + splits_, 1.0);
    known_.resize(known_.size() + splits_, 1.0);
    seen_.resize(seen_.size() + splits_, 0);
    is_known_.push_back(false);
  }
  const auto row = static_cast<std::size_t>(place.row);
  const std::size_t cell = row * splits_ + split;
  ++seen_[cell];
  // One disturbed step says nothing about its kind.
  const double bounded = std::max(1 / kMostCorrection, std::min(kMostCorrection, ratio));
  ratios_[cell] += std::max(kRecordWeight, 1 / real(seen_[cell])) * (bounded - ratios_[cell]);
  if (seen_[cell] >= kRecordSteps) {
    known_[cell] = ratios_[cell];
    known_count_ += is_known_[row] ? 0 : 1;
    is_known_[row] = true;
  }
}

Predictor::Predictor(const DecisionFigures& figures, Device device)
    : figures_(figures),
      device_(std::move(device)),
      stretch_(device_.splits.size()),
      b1_(device_.start[0]),
      k1_(device_.start[1]),
      margin_(figures.start_margin),
      credit_(device_.measured ? figures.lessons * figures.parts_a_lesson : 0),
      records_(device_.splits.size()) {
  if (device_.splits.empty() || device_.models.size() != device_.splits.size()) {
    throw std::invalid_argument(std::to_string(device_.models.size()) + " models for " +
                                std::to_string(device_.splits.size()) + " splits");
  }
  fold();
}

void Predictor::predict(std::int64_t batch, std::int64_t context_tokens, std::int64_t phase,
                        std::span<double> beside_us, std::span<double> solo_us) const {
  if (device_.blind) {
    std::ranges::fill(beside_us, 1.0);
    std::ranges::fill(solo_us, 1.0);
    return;
  }
  const double* known = records_.find(batch, context_tokens, phase);
  for (std::size_t i = 0; i < device_.splits.size(); ++i) {
    const double solo = alone_us(i, batch, context_tokens);
    const double beside = solo * stretch_[i];
    solo_us[i] = solo;
    // Whatever was measured, a worker never makes decode faster.
    beside_us[i] = known == nullptr ? beside : std::max(beside * known[i], solo);
  }
}

bool Predictor::extrapolates(std::int64_t batch, std::int64_t context_tokens) const {
  return batch > device_.most_batch || context_tokens > device_.most_context;
}

double Predictor::observe(std::size_t split, std::int64_t batch, std::int64_t context_tokens,
                          double latency_us, double objective_us, std::int64_t phase) {
  if (split >= device_.splits.size()) {
    throw std::out_of_range("split " + std::to_string(split) + " does not exist");
  }
  if (device_.blind) {
    return 0;
  }
  widen_range(batch, context_tokens);
  const double alone = alone_us(split, batch, context_tokens);
  const double linear = alone * (split != 0 ? stretch_[split] : 1.0);
  double expected = linear;
  if (split != 0) {
    if (const double* known = records_.find(batch, context_tokens, phase)) {
      expected = std::max(alone, expected * known[split]);
    }
  }
  const double residual = (latency_us - expected) / expected;
  if (split == 0) {
    return residual;
  }
  credit_ =
      std::min(2 * figures_.lessons * figures_.parts_a_lesson, credit_ + figures_.parts_a_lesson);
  // Only steps near the objective can break it, and short ones mislead: a millisecond that the
  // machine takes away is half of a 2 ms step and a tenth of a 10 ms one. On two cores a margin
  // over all steps alike grew to 15 to 26%, where steps of half the objective and more needed 7 to
  // 10%.
  double weight = 1;
  if (objective_us != 0) {
    const double near = std::min(1.0, expected / objective_us);
    weight = near * near;
  }
  if (device_.form != PredictorForm::kHarli) {
    records_.add(split, batch, context_tokens, phase, latency_us / linear);
  }
  if (device_.form == PredictorForm::kWindrow) {
    learn(split, latency_us / alone, weight);
  }
  move_margin(residual, weight);
  return residual;
}

void Predictor::follow(double residual, double weight) {
  credit_ = std::max<std::int64_t>(0, credit_ - 1);
  move_margin(residual, weight);
}

bool Predictor::taught() const {
  return credit_ >= figures_.lessons * figures_.parts_a_lesson;
}

double Predictor::least_step_us() const {
  return device_.blind ? 0 : alone_us(0, 1, 0);
}

double Predictor::alone_us(std::size_t split, std::int64_t batch,
                           std::int64_t context_tokens) const {
  const auto& [c0, b0, k0] = device_.models[split];
  return c0 + b0 * real(std::max(batch, figures_.batch_floor)) + k0 * real(context_tokens);
}

void Predictor::fold() {
  const double units = real(device_.units);
  for (std::size_t i = 0; i < device_.splits.size(); ++i) {
    const DecisionSplit& split = device_.splits[i];
    const double s_inf = real(split.decode_units) / units;
    const double s_ft = real(split.finetune_units) / units;
    stretch_[i] = std::max(1.0, b1_ * s_inf + k1_ * s_ft);
  }
  stretch_[0] = 1;  // decode alone, whatever stage 2 says of s_ft = 0
}

// A batch or context that has been seen often is not an extrapolation any more.
void Predictor::widen_range(std::int64_t batch, std::int64_t context_tokens) {
  if (!extrapolates(batch, context_tokens) || ++beyond_ < figures_.seen_often) {
    return;
  }
  beyond_ = 0;
  device_.most_batch = std::max(device_.most_batch, batch);
  device_.most_context = std::max(device_.most_context, context_tokens);
}

// One step of recursive least squares on ratio = b1 * s_inf + k1 * s_ft.
void Predictor::learn(std::size_t split, double ratio, double weight) {
  const double x0 = real(device_.splits[split].decode_units) / real(device_.units);
  const double x1 = real(device_.splits[split].finetune_units) / real(device_.units);
  const double fading = weight * (1 - figures_.forgetting);
  const double leak = fading * kLeastInformation;
  i00_ = (1 - fading) * i00_ + weight * x0 * x0 + leak;
  i01_ = (1 - fading) * i01_ + weight * x0 * x1;
  i11_ = (1 - fading) * i11_ + weight * x1 * x1 + leak;
  double error = ratio - (b1_ * x0 + k1_ * x1);
  error = std::max(-kMostInnovation, std::min(kMostInnovation, error));
  const double pull = weight * error / (i00_ * i11_ - i01_ * i01_);
  b1_ += pull * (i11_ * x0 - i01_ * x1);
  k1_ += pull * (i00_ * x1 - i01_ * x0);
  fold();
}

// Follows the 95th percentile of the relative residual.
void Predictor::move_margin(double residual, double weight) {
  const double pace = weight * kMarginPace;
  margin_ = residual > margin_
                ? std::min(figures_.margin_max, margin_ + pace * kMarginQuantile)
                : std::max(figures_.margin_min, margin_ - pace * (1 - kMarginQuantile));
}

}  // namespace windrow
