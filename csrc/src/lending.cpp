#include "windrow/lending.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace windrow {
namespace {

enum : std::size_t { kFree, kKv, kLent, kReserved, kDraining };

}  // namespace

LendingPlan plan_lending(const Counts& chunks, const LendingNeeds& needs) {
  const std::int64_t lent = chunks[kLent];
  const std::int64_t ceiling = std::max<std::int64_t>(0, std::min(needs.wanted, needs.limit));
  std::int64_t lacking = std::max<std::int64_t>(
      0, needs.reserve - chunks[kReserved] - chunks[kFree] - chunks[kDraining]);
  if (needs.kv_short && chunks[kDraining] == 0) {
    lacking = std::max(lacking, (lent + 3) / 4);
  }
  const std::int64_t revoke = std::min(lent, std::max(lacking, lent - ceiling));
  if (revoke != 0) {
    return {.target = lent - revoke, .revoke = revoke};
  }
  const std::int64_t spare =
      chunks[kFree] - std::max<std::int64_t>(0, needs.reserve - chunks[kReserved]) - needs.reserve;
  if (spare <= 0 || needs.kv_short || needs.since_revoke_ns < kGrowRestNs) {
    return {.target = lent};
  }
  const std::int64_t lend = std::min(spare, ceiling - lent);
  return {.target = lent + lend, .lend = lend};
}

double kv_demand_bytes(const KvDemand& demand, bool prompts) {
  const auto token = static_cast<double>(demand.token_bytes);
  double bytes = 0;
  if (demand.objective_us != 0) {
    bytes = demand.release_us / static_cast<double>(demand.objective_us) *
            static_cast<double>(demand.max_batch) * token;
  }
  return prompts ? bytes + token * static_cast<double>(demand.admitted_q99_tokens) : bytes;
}

std::int64_t reserve_chunks(const KvDemand& demand, bool prompts, std::int64_t chunk_bytes,
                            std::int64_t total) {
  const double chunks =
      std::ceil(kv_demand_bytes(demand, prompts) / static_cast<double>(chunk_bytes));
  const std::int64_t quarter = total / 4;
  const auto most = static_cast<double>(quarter);
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(chunks, most)));
}

void AdmissionRate::add(std::int64_t now_ns, std::int64_t tokens) {
  if (now_ns - begin_ns_ >= window_ns_) {
    if (begin_ns_ != 0) {
      close_window(sum_);
      // Windows without a step are windows without an arrival.
      const std::int64_t empty = (now_ns - begin_ns_) / window_ns_ - 1;
      for (std::int64_t i = std::min<std::int64_t>(empty, kWindows); i > 0; --i) {
        close_window(0);
      }
    }
    begin_ns_ = now_ns;
    sum_ = 0;
  }
  sum_ += tokens;
}

void AdmissionRate::close_window(std::int64_t sum) {
  if (sums_.size() >= kWindows) {
    sums_.pop_front();
  }
  sums_.push_back(sum);
}

std::int64_t AdmissionRate::q99() const {
  std::vector<std::int64_t> all(sums_.begin(), sums_.end());
  all.push_back(sum_);
  const auto count = static_cast<double>(all.size());
  const auto place = static_cast<std::size_t>(std::ceil(0.99 * count)) - 1;
  const auto at = all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size() - 1, place));
  std::nth_element(all.begin(), at, all.end());
  return *at;
}

}  // namespace windrow
