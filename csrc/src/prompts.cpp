#include "windrow/prompts.h"

#include <algorithm>
#include <limits>

namespace windrow {
namespace {

// Tokens after which an older measurement counts for half as much: some chunks of a prompt.
constexpr double kHalfTokens = 2048;
constexpr double kStretchWeight = 0.2;  // of a new pass beside a worker
constexpr double kLongestStretch = 100;
constexpr double kStartMargin = 0.1;
constexpr double kMostMargin = 4;
constexpr double kWiden = 0.25;  // of the margin, at each first token that came late
// Ten minutes: no pass takes as long.
constexpr double kImpossibleUs = 6e8;

}  // namespace

PromptModel::PromptModel(const std::vector<double>& shares) : margin_(kStartMargin) {
  for (const double share : shares) {
    stretch_.push_back(share > 0 ? std::clamp(1 / share, 1.0, kLongestStretch) : kLongestStretch);
  }
}

double PromptModel::predict_us(std::size_t split, std::int64_t tokens) const {
  if (token_us_ <= 0) {
    return std::numeric_limits<double>::infinity();
  }
  return static_cast<double>(tokens) * token_us_ * stretch_.at(split) * (1 + margin_);
}

void PromptModel::observe(std::size_t split, std::int64_t tokens, double latency_us) {
  if (tokens <= 0 || !(0 < latency_us && latency_us < kImpossibleUs)) {
    return;
  }
  const auto count = static_cast<double>(tokens);
  const double measured = latency_us / count;
  if (split == 0) {
    const double weight = token_us_ > 0 ? count / (count + kHalfTokens) : 1;
    token_us_ += weight * (measured - token_us_);
    return;
  }
  if (token_us_ > 0) {
    const double ratio = std::clamp(measured / token_us_, 1.0, kLongestStretch);
    double& stretch = stretch_.at(split);
    stretch += kStretchWeight * (ratio - stretch);
  }
}

// A step up for each late one and a smaller one down for each other, which balance where the share
// of late ones is the one allowed.
void PromptModel::follow(bool late, double late_share) {
  const double step = late ? kWiden : -kWiden * late_share / (1 - late_share);
  margin_ = std::clamp(margin_ + step, kStartMargin, kMostMargin);
}

}  // namespace windrow
