#include "windrow/harvest_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

namespace windrow {
namespace {

enum : std::size_t { kFree, kKv, kLent, kReserved, kDraining };

// Of the tokens that a step yields, what is too small a change to judge steps by another objective.
constexpr double kSameTokens = 0.05;
constexpr std::int64_t kReserveEveryNs = 1'000'000'000;
// The ring of decisions holds no more; what was never drained is not kept for longer.
constexpr std::size_t kMostKept = 16'384;

// Forgets the older half of what nobody has taken: with no agent there, nobody ever does.
template <typename T>
void keep_newest(std::vector<T>& kept) {
  if (kept.size() >= kMostKept) {
    kept.erase(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(kept.size() / 2));
  }
}

// Of what an engine measured; nonsense counts as nothing.
std::int64_t whole_us(double latency_us) {
  constexpr double kMost = 1e15;
  return latency_us > 0 && latency_us < kMost ? static_cast<std::int64_t>(latency_us) : 0;
}

}  // namespace

Lender::Lender(StepSurroundings& around, const StepSettings& settings)
    : around_(around),
      settings_(settings),
      admitted_(settings.admission_window_ns),
      release_us_(settings.drain_us) {
  if (!settings.keeps_reserve) {
    around_.set_reserve(0);
  }
  reserve_ = around_.counts()[kReserved];
}

std::int64_t Lender::plan(std::int64_t now_ns, const Counts& chunks, const Offer& offer,
                          const StepTerms& terms, bool kv_short, StepCounters& counters) {
  watch_draining(now_ns, chunks);
  const bool pressed =
      chunks[kLent] != 0 && (kv_short || chunks[kReserved] + chunks[kFree] < reserve_);
  if (!pressed && now_ns - planned_ns_ < settings_.lending_every_ns) {
    return target_;
  }
  planned_ns_ = now_ns;
  if (owner_ != 0 && offer.job_epoch == 0 && !around_.has_peers()) {
    // Nobody is attached any more: with the agent that could say so, the worker died too.
    reclaim_unless(now_ns, 0, counters);
  }
  std::int64_t total = 0;
  for (const std::int64_t count : chunks) {
    total += count;
  }
  const std::int64_t limit = terms.harvests ? total * terms.max_memory_percent / 100 : 0;
  // Chunks of an earlier worker that is not known dead yet: no other worker may have them.
  const bool fenced = owner_ != 0 && owner_ != offer.job_epoch;
  const std::int64_t wanted = fenced ? 0 : offer.wanted_chunks;
  const LendingPlan plan = plan_lending(
      chunks, {.wanted = wanted,
               .limit = limit,
               .reserve = reserve_,
               .kv_short = kv_short,
               .since_revoke_ns = revoked_ns_ != 0 ? now_ns - revoked_ns_
                                                   : std::numeric_limits<std::int64_t>::max()});
  const std::int64_t ceiling = std::min(wanted, limit);
  const std::int64_t beyond = std::max<std::int64_t>(0, ceiling - chunks[kLent]);
  lacking_ = ceiling != 0 ? std::max<std::int64_t>(
                                0, beyond + 2 * reserve_ - chunks[kFree] - chunks[kReserved])
                          : 0;
  if (plan.revoke != 0) {
    const std::int64_t asked = around_.revoke(plan.revoke);
    if (asked != 0) {
      revoked_ns_ = now_ns;
      counters.revoked += asked;
      draining_since_ns_ = draining_since_ns_ != 0 ? draining_since_ns_ : now_ns;
      around_.mark(now_ns, "revoke", std::to_string(asked) + " chunks");
    }
  } else if (plan.lend != 0) {
    const std::int64_t lent = around_.lend(plan.lend, offer.job_epoch);
    if (lent != 0) {
      owner_ = offer.job_epoch;
      counters.lent += lent;
      around_.mark(now_ns, "lend", std::to_string(lent) + " chunks");
    }
  }
  target_ = fenced ? 0 : plan.target;
  return target_;
}

void Lender::size_reserve(std::int64_t now_ns, const StepTerms& terms) {
  if (!terms.any || now_ns - sized_ns_ < kReserveEveryNs || !settings_.keeps_reserve) {
    return;
  }
  sized_ns_ = now_ns;
  const std::int64_t in_flight_bound_us = terms.objective_us / 4;
  const KvDemand demand{
      .release_us = static_cast<double>(in_flight_bound_us) + release_us_,
      .objective_us = terms.token_objective_us,
      .max_batch = settings_.max_batch,
      .token_bytes = settings_.chunk_bytes / settings_.slots_per_chunk,
      .admitted_q99_tokens = admitted_.q99(),
  };
  const std::int64_t wanted =
      reserve_chunks(demand, settings_.reserve_prompts, settings_.chunk_bytes, settings_.chunks);
  if (wanted != reserve_) {
    around_.set_reserve(wanted);
    reserve_ = wanted;
  }
}

void Lender::reclaim_unless(std::int64_t now_ns, std::int64_t live_epoch, StepCounters& counters) {
  if (owner_ == 0 || owner_ == live_epoch) {
    return;
  }
  const std::int64_t taken = around_.reclaim(owner_);
  counters.reclaimed += taken;
  around_.mark(now_ns, "reclaim",
               std::to_string(taken) + " chunks of epoch " + std::to_string(owner_));
  owner_ = 0;
  target_ = 0;
  draining_since_ns_ = 0;
}

// Measures how long the worker takes to give back: the reserve has to last so long.
void Lender::watch_draining(std::int64_t now_ns, const Counts& chunks) {
  if (chunks[kDraining] != 0) {
    return;
  }
  if (draining_since_ns_ != 0) {
    const double took_us = static_cast<double>(now_ns - draining_since_ns_) / 1e3;
    release_us_ = std::max(took_us, 0.9 * release_us_ + 0.1 * took_us);
    draining_since_ns_ = 0;
    returns_s_.push_back(took_us / 1e6);
  }
  if (chunks[kLent] == 0) {
    owner_ = 0;
  }
}

HarvestStep::HarvestStep(StepSurroundings& around, Decider& decider, const StepSettings& settings,
                         const Grant& first)
    : heartbeat_(around.heartbeat()),
      around_(around),
      decider_(decider),
      settings_(settings),
      grant_(first),
      units_since_ns_(around.now_ns()),
      lender_(around, settings_) {}

const Grant& HarvestStep::before_step(const StepFacts& facts) {
  return keeps(facts) ? grant_ : decides(facts);
}

const Grant& HarvestStep::decides(const StepFacts& facts) {
  judge(begin_ns_);
  prefilled_ = facts.prefill_tokens > 0 || facts.batch == 0;
  if (facts.admitted_tokens != 0) {
    lender_.admit(begin_ns_, facts.admitted_tokens);
  }
  decide(begin_ns_, &facts);
  if (decider_.during().settled && !is_for_one_step(grant_) && !prefilled_) {
    steady_until_ns_ = begin_ns_ + settings_.steady_ns;
  }
  cost_ns_ = now_ns() - begin_ns_;
  return grant_;
}

void HarvestStep::after_step(std::int64_t end_ns, double latency_us) {
  unjudged_.push_back({latency_us, cost_ns_});
  if (objective_us_ > 0 && latency_us > static_cast<double>(objective_us_)) {
    judge(end_ns);
  }
}

const Grant& HarvestStep::idle(std::int64_t now_ns) {
  judge(now_ns);
  decide(now_ns, nullptr);
  return grant_;
}

void HarvestStep::close() {
  around_.revoke(settings_.chunks);
  Grant pause;
  pause.pause_epoch = grant_.pause_epoch + 1;
  grant_ = pause;
  around_.publish_grant(grant_);
}

void HarvestStep::worker_lives(std::int64_t epoch) {
  live_epoch_ = epoch;
  look_again();
}

StepCounters HarvestStep::counters() const {
  StepCounters counters = counters_;
  counters.granted_unit_seconds = unit_ns_ / 1e9;
  counters.granted_s = static_cast<double>(granted_ns_) / 1e9;
  return counters;
}

// Counts and learns from the steps under the last decision. In one go: cold code is dear.
void HarvestStep::judge(std::int64_t now_ns) {
  KeptOutcome outcome;
  for (const auto& [latency_us, cost_ns] : unjudged_) {
    const std::int64_t took_us = whole_us(latency_us);
    const bool over = objective_us_ > 0 && latency_us > static_cast<double>(objective_us_);
    outcome.over += over ? 1 : 0;
    outcome.longest_us = std::max(outcome.longest_us, took_us);
    outcome.sum_us += took_us;
    ++counters_.steps;
    counters_.over += over ? 1 : 0;
    counters_.busy_us += took_us;
    keep_newest(measured_);
    measured_.push_back({took_us, cost_ns, objective_us_, terms_.step_tokens});
    if (prefilled_) {
      continue;
    }
    if (const auto residual = decider_.observe(now_ns, latency_us)) {
      keep_newest(residuals_);
      residuals_.push_back(*residual);
      if (const DuringStep& during = decider_.during(); during.split > 0) {
        keep_newest(perhaps_beside_);
        perhaps_beside_.push_back({.split = during.split,
                                   .batch = during.batch,
                                   .context_tokens = during.context_tokens,
                                   .latency_us = latency_us});
      }
    }
  }
  outcome.steps = static_cast<std::int64_t>(unjudged_.size());
  unjudged_.clear();
  if (outcome.steps != 0) {
    keep(outcome);
  }
  if (news_) {
    around_.take_throttled(now_ns);
  }
  const Guard& guard = decider_.guard();
  if (guard.trips() != trips_ || guard.reason() != reason_) {
    look_again();
    // A new guard's clean record, or a trial, does not count as a breach.
    const bool acted = guard.trips() > trips_ || !guard.reason().empty();
    trips_ = guard.trips();
    reason_ = guard.reason();
    if (acted) {
      around_.breached(reason_.empty() ? "two steps over the objective" : reason_);
    }
    if (reason_ != marked_reason_) {
      marked_reason_ = reason_;
      around_.mark(now_ns, reason_.empty() ? "breaker-trial" : "breaker", reason_);
    }
  }
  lender_.size_reserve(now_ns, terms_);
}

bool HarvestStep::yields_otherwise(double tokens) const {
  const double known = terms_.step_tokens;
  return std::abs(tokens - known) > kSameTokens * known || (tokens == 1.0 && known != 1.0);
}

void HarvestStep::decide(std::int64_t now_ns, const StepFacts* facts) {
  if (news_) {
    news_ = false;
    // Also throttling that another thread has left since the steps were judged: its news ends here.
    around_.take_throttled(now_ns);
    around_.take_terms(now_ns);
  }
  if (facts != nullptr && facts->batch != 0 && facts->prefill_tokens == 0 &&
      yields_otherwise(facts->tokens)) {
    around_.take_step_tokens(facts->tokens);
  }
  look_again();
  objective_us_ = terms_.objective_us;
  const Counts chunks = around_.counts();
  const std::int64_t held_until_ns = grant_.hold_admission_until_ns;
  show(now_ns, facts, chunks[kFree]);
  if (live_epoch_ >= 0) {
    lender_.reclaim_unless(now_ns, live_epoch_, counters_);
  }
  const Offer offer = read_offer(now_ns);
  keep_beside(offer);
  // Requests that wait although the batch has room wait for KV.
  const bool held = now_ns < held_until_ns;
  const bool kv_short = view_.waiting > 0 && view_.batch < settings_.max_batch && !held;
  if (view_.waited_us != 0 && !held) {
    decider_.guard().queued(now_ns, view_.waited_us);
  }
  const std::int64_t may_hold = lender_.plan(now_ns, chunks, offer, terms_, kv_short, counters_);
  PromptQueue prompts;
  if (facts != nullptr) {
    prompts = {.left_tokens = facts->prompts_left,
               .waited_us = facts->first_token_waited_us,
               .computing = facts->prefill_tokens > 0};
  }
  const std::int64_t due_ns = facts != nullptr && facts->waiting != 0 ? facts->due_ns : 0;
  const Grant grant = decider_.decide(view_, offer, now_ns, present_, may_hold, prompts, due_ns);
  unit_ns_ += units_ * static_cast<double>(now_ns - units_since_ns_);
  granted_ns_ += units_ > 0 ? now_ns - units_since_ns_ : 0;
  units_ = grant.finetune_units != 0 ? decider_.would_units() : 0;
  units_since_ns_ = now_ns;
  put(grant, now_ns);
  if (settings_.keeps_decisions) {
    keep(KeptDecision{.at_ns = now_ns,
                      .view = view_,
                      .offer = offer,
                      .grant = grant_,
                      .margin = decider_.margin(),
                      .alone_us = decider_.alone_us(),
                      .why = decider_.why(),
                      .extrapolated = decider_.extrapolated()});
  }
}

// Publishes the view of a step; without facts, that of an engine that runs nothing.
void HarvestStep::show(std::int64_t now_ns, const StepFacts* facts, std::int64_t free_chunks) {
  View view;
  view.free_chunks = free_chunks;
  view.objective_us = objective_us_;
  if (facts == nullptr) {
    waiting_since_ns_ = 0;
    running_ = {};
    view.step = view_.step;
    view.start_ns = now_ns;
  } else {
    // A step that computes a prompt is work even when no request gets a token: not idle. Nor is one
    // for which no request finds room; where requests are held back, nothing runs.
    const bool held = facts->start_ns < grant_.hold_admission_until_ns;
    const std::int64_t least = held && facts->prefill_tokens == 0 ? 0 : 1;
    view.step = facts->step;
    view.start_ns = facts->start_ns;
    if (facts->batch != 0 || facts->prefill_tokens == 0) {
      running_ = {.batch = facts->batch, .context_tokens = facts->context_tokens};
    }
    // Behind a pass over prompts comes a step of those that run already: the share that it will
    // have is decided here, since units come back to decode only when the worker is quiet.
    view.batch = running_.batch != 0 ? running_.batch : least;
    view.context_tokens = running_.context_tokens;
    view.waiting = facts->waiting;
    view.admitted_tokens = facts->admitted_tokens + facts->prefill_tokens;
    view.slack_us = facts->slack_us;
    // How long the queue has not been empty: at least as long as its oldest request waits.
    if (facts->waiting == 0) {
      waiting_since_ns_ = 0;
    } else if (waiting_since_ns_ == 0) {
      waiting_since_ns_ = view.start_ns;
    }
    view.waited_us = facts->waiting != 0 ? (view.start_ns - waiting_since_ns_) / 1000 : 0;
  }
  view_ = view;
  around_.publish_view(view_);
}

// A worker that is dead, fenced or silent offers nothing.
Offer HarvestStep::read_offer(std::int64_t now_ns) {
  const Offer offer = around_.read_offer();
  const bool present = offer.job_epoch > 0 && (live_epoch_ < 0 || live_epoch_ == offer.job_epoch) &&
                       around_.worker_age_ns() < settings_.worker_stale_ns;
  if (present != present_) {
    present_ = present;
    around_.mark(now_ns, present ? "worker-attached" : "worker-gone",
                 "epoch " + std::to_string(offer.job_epoch));
  }
  if (!present) {
    return {};
  }
  tokens_done_ = offer.tokens_done;
  return offer;
}

// Keeps the steps since the last offer where tasklets ran meanwhile: a worker that had units and
// nothing to compute slows nobody down.
void HarvestStep::keep_beside(const Offer& offer) {
  const bool computed = offer.job_epoch != 0 && offer.job_epoch == offer_.job_epoch &&
                        (offer.tasklet_id != offer_.tasklet_id ||
                         (offer.in_flight_us > 0 && offer_.in_flight_us > 0));
  if (computed) {
    for (const StepBeside& step : perhaps_beside_) {
      keep_newest(beside_);
      beside_.push_back(step);
    }
  }
  perhaps_beside_.clear();
  offer_ = offer;
}

// Publishes grants that change, or that the worker has not heard for a while.
void HarvestStep::put(const Grant& grant, std::int64_t now_ns) {
  const Grant old = std::exchange(grant_, grant);
  const bool changed = grant.finetune_units != old.finetune_units || grant.action != old.action ||
                       grant.pause_epoch != old.pause_epoch || grant.chunks != old.chunks ||
                       grant.decode_units != old.decode_units || is_for_one_step(grant) ||
                       is_for_one_step(old);
  if (changed || now_ns - published_ns_ >= settings_.regrant_ns) {
    published_ns_ = now_ns;
    around_.publish_grant(grant_);
  }
  if (grant.action != old.action) {
    mark_action(now_ns);
  }
}

// Marks a pause or its end. A worker that starves for a moment is not marked.
void HarvestStep::mark_action(std::int64_t now_ns) {
  if (grant_.action == kPause && decider_.why() != Why::kStarving) {
    paused_ns_ = now_ns;
    const std::string_view why = kWhyWords[static_cast<std::size_t>(decider_.why())];
    around_.mark(now_ns, "pause",
                 std::string(why) + ": batch " + std::to_string(view_.batch) + ", " +
                     std::to_string(view_.context_tokens) + " context tokens");
  } else if (grant_.action != kPause && paused_ns_ != 0) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "after %.0f ms",
                  static_cast<double>(now_ns - paused_ns_) / 1e6);
    around_.mark(now_ns, "resume", text.data());
    paused_ns_ = 0;
  }
}

void HarvestStep::keep(KeptEntry entry) {
  if (!settings_.keeps_decisions) {
    return;
  }
  if (kept_.size() >= kMostKept) {
    // From the second half on, beginning with a decision: an outcome belongs to the one before it.
    auto first = kept_.begin() + static_cast<std::ptrdiff_t>(kept_.size() / 2);
    while (first != kept_.end() && std::holds_alternative<KeptOutcome>(*first)) {
      ++first;
    }
    kept_.erase(kept_.begin(), first);
  }
  kept_.push_back(entry);
}

}  // namespace windrow
