#include "windrow/decision.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace windrow {
namespace {

// A worker that would always have work: what `observe` and the estimate of headroom ask about.
constexpr Offer kEager{.job_epoch = 1};
// Ten minutes: no step takes as long.
constexpr double kImpossibleUs = 6e8;

std::vector<double> decode_shares(const Decider::Device& device) {
  std::vector<double> shares;
  const auto units = static_cast<double>(device.units);
  for (const DecisionSplit& split : device.splits) {
    // Where decode keeps every unit, the worker's are shared.
    const std::int64_t left = std::min(split.decode_units, device.units - split.finetune_units);
    shares.push_back(static_cast<double>(left) / units);
  }
  return shares;
}

}  // namespace

Decider::Decider(const DecisionFigures& figures, Device device, std::int64_t pause_epoch,
                 std::shared_ptr<Guard> guard)
    : guard_(std::move(guard)),
      decode_units_(device.units),
      pause_epoch_(pause_epoch),
      prompts_(decode_shares(device)),
      figures_(figures),
      device_(std::move(device)),
      solo_us_(device_.splits.size()),
      beside_us_(device_.splits.size()) {
  if (device_.splits.empty() || device_.offered.empty() || device_.units < 1 || !guard_) {
    throw std::invalid_argument("a device has a unit and a split at least, and a guard");
  }
}

void Decider::set_predictor(std::shared_ptr<Predictor> predictor) {
  if (predictor && predictor->splits() != device_.splits.size()) {
    throw std::invalid_argument("a predictor of " + std::to_string(predictor->splits()) +
                                " splits for a device of " + std::to_string(device_.splits.size()));
  }
  if (!predictor && terms_.policy) {  // no policy decides without one
    terms_.policy = nullptr;
    terms_.idle = Why::kNoProfile;
  }
  predictor_ = std::move(predictor);
}

void Decider::set_terms(DecisionTerms terms) {
  if (terms.allowed < 1 || terms.allowed > device_.splits.size()) {
    throw std::invalid_argument(std::to_string(terms.allowed) + " splits are allowed of " +
                                std::to_string(device_.splits.size()));
  }
  if (terms.policy && !predictor_) {
    throw std::invalid_argument("no policy decides without a predictor");
  }
  terms_ = std::move(terms);
  has_terms_ = true;
}

Grant Decider::decide(const View& view, const Offer& offer, std::int64_t now_ns, bool present,
                      std::int64_t chunks, const PromptQueue& prompts, std::int64_t due_ns) {
  due_ns_ = due_ns;
  Grant grant = wish(view, offer, now_ns, present, prompts);
  hand_over(grant, offer, present, prompts_first(prompts));
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
  if (prompts.left_tokens == 0) {
    beside_prompts_ = false;
  } else if (grant.finetune_units > 0) {
    beside_prompts_ = true;
  }
  return grant;
}

std::optional<double> Decider::observe(std::int64_t now_ns, double latency_us) {
  if (!has_terms_ || during_.batch == 0) {
    return std::nullopt;
  }
  if (!(0 < latency_us && latency_us < kImpossibleUs)) {
    guard_->distrust(now_ns);
    return std::nullopt;
  }
  // Where requests are judged, a long step is not a breach while each of them has slack.
  const bool judged = !terms_.per_request || during_.slack_us <= 0;
  guard_->observe(now_ns, latency_us, judged ? terms_.objective_us : 0, during_.harvested);
  if (!predictor_) {
    return std::nullopt;
  }
  const auto objective_us = static_cast<double>(terms_.objective_us);
  if (during_.split > 0) {
    return predictor_->observe(static_cast<std::size_t>(during_.split), during_.batch,
                               during_.context_tokens, latency_us, objective_us, during_.phase);
  }
  if (!during_.in_part || during_.predicted_us <= 0) {
    return std::nullopt;
  }
  const auto expected = static_cast<double>(during_.predicted_us);
  const double residual = (latency_us - expected) / expected;
  const double near = std::min(1.0, expected / objective_us);
  predictor_->follow(residual, near * near);
  return residual;
}

void Decider::observe_prompt(std::int64_t tokens, double latency_us, const Grant& grant) {
  if (grant.finetune_units == 0 && grant.decode_units == device_.units) {
    prompts_.observe(0, tokens, latency_us);
  } else if (const std::int64_t split = index_of(grant); split > 0 && !is_for_one_step(grant)) {
    prompts_.observe(static_cast<std::size_t>(split), tokens, latency_us);
  }
}

void Decider::observe_first_token(double after_us) {
  if (terms_.first_token_us == 0 || !(after_us >= 0)) {
    return;
  }
  const bool late = after_us > static_cast<double>(terms_.first_token_us);
  ++first_tokens_;
  first_tokens_over_ += late ? 1 : 0;
  if (beside_prompts_) {
    prompts_.follow(late, guard_->allowed_share());
  }
}

double Decider::headroom_units(const View& view) const {
  if (!terms_.policy || !guard_->reason().empty() || terms_.refused) {
    return 0;
  }
  const bool possible = view.batch >= 0 && view.context_tokens >= 0 && view.objective_us > 0 &&
                        static_cast<double>(view.objective_us) < kImpossibleUs;
  if (!possible) {
    return 0;
  }
  std::vector<double> beside(device_.splits.size());
  std::vector<double> solo(device_.splits.size());
  predictor_->predict(view.batch, view.context_tokens, 0, beside, solo);
  const PolicyContext ctx = context(predictor_->margin(), beside, solo);
  View at = view;
  at.start_ns = 0;  // whenever it is
  return effective_units(terms_.policy(at, kEager, ctx), at, kEager, ctx);
}

PolicyContext Decider::context(double margin, std::span<const double> beside_us,
                               std::span<const double> solo_us) const {
  return {.figures = figures_,
          .units = device_.units,
          .splits = device_.splits,
          .offered = device_.offered,
          .allowed = terms_.allowed,
          .idle_units = terms_.idle_units,
          .predicted_us = beside_us,
          .solo_us = solo_us,
          .margin = margin,
          .current = current_,
          .in_flight_bound_us = terms_.objective_us / 4,
          .layers = device_.layers,
          .deferral_us = terms_.deferral_us,
          .due_ns = due_ns_,
          .chunk_bytes = device_.chunk_bytes,
          .per_request = terms_.per_request,
          .gaps = device_.gaps,
          .taught = predictor_->taught()};
}

// What policy and guard want, whatever the worker is doing right now.
Grant Decider::wish(const View& view, const Offer& offer, std::int64_t now_ns, bool present,
                    const PromptQueue& prompts) {
  if (!terms_.policy) {
    return paused(terms_.idle);
  }
  const bool observing = terms_.observing;
  if (!present && !observing) {
    return paused(Why::kNoWorker);
  }
  predictor_->predict(view.batch, view.context_tokens, offer.phase, beside_us_, solo_us_);
  extrapolated_ = predictor_->extrapolates(view.batch, view.context_tokens);
  margin_shown_ = predictor_->margin() + guard_->extra_margin(now_ns);
  if (extrapolated_) {
    margin_shown_ += figures_.beyond_margin;
  }
  alone_us_ = solo_us_[0];
  const Why why = guard_->doubt(view, offer, beside_us_, now_ns);
  if (why != Why::kRuns || terms_.refused) {
    would_units_ = 0;
    return paused(why != Why::kRuns ? why : Why::kObjective);
  }
  if (terms_.first_token_us == 0 && prompts_first(prompts)) {
    would_units_ = 0;
    return paused(Why::kPrompts);
  }
  PolicyContext ctx = context(margin_shown_, beside_us_, solo_us_);
  ctx.allowed = allowed_beside(prompts);
  if (ctx.allowed == 1 && terms_.allowed > 1) {
    would_units_ = 0;
    return paused(Why::kPrompts);
  }
  const Offer& asked = observing ? kEager : offer;
  Grant grant = terms_.policy(view, asked, ctx);
  if (grant.action != kPause) {
    grant = guarded(grant, view, ctx, now_ns);
  } else {
    const std::int64_t begun_ns = view.start_ns != 0 ? view.start_ns : now_ns;
    grant.gap_until_ns = 0;
    grant.hold_admission_until_ns =
        std::min(grant.hold_admission_until_ns, held_until_ns(begun_ns));
    // There may be no room because the guard has widened the margin.
    const Why held = guard_->pauses(now_ns) ? guard_->why_held() : Why::kObjective;
    why_ = offer.starving != 0 && !observing ? Why::kStarving : held;
  }
  if (grant.action == kPause) {
    current_ = 0;
  } else if (grant.gap_until_ns != 0) {
    current_ = kInTurns;
  } else if (view.batch == 0) {
    // From the whole device any split is a step down, which needs no headroom.
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

// The latest time until which requests are held back: by the policy's bound, or by their own.
std::int64_t Decider::held_until_ns(std::int64_t begun_ns) const {
  return std::max(begun_ns + terms_.deferral_us * 1000, due_ns_);
}

// Whether a prompt goes before the worker: with an objective for first tokens every one that waits,
// since the worker gets what leaves that time; without one the prompt that this pass computes,
// which then has the device to itself. Source of that: LLMStation, Alg. 1 (prefill alone).
bool Decider::prompts_first(const PromptQueue& prompts) const {
  return terms_.first_token_us != 0 ? prompts.left_tokens != 0 : prompts.computing;
}

// As many splits as leave every waiting prompt its first token in time: the one that arrived first
// has waited longest, and the last has all the others before it. Both at once is more than any
// single request has to bear.
std::size_t Decider::allowed_beside(const PromptQueue& prompts) const {
  if (terms_.first_token_us == 0 || prompts.left_tokens == 0) {
    return terms_.allowed;
  }
  for (std::size_t index = terms_.allowed; index-- > 1;) {
    const double after_us = static_cast<double>(prompts.waited_us) +
                            prompts_.predict_us(index, prompts.left_tokens) + beside_us_[index];
    if (after_us <= static_cast<double>(terms_.first_token_us)) {
      return index + 1;
    }
  }
  return 1;
}

// The wish, unless the guard forbids it or it passes a hard limit.
Grant Decider::guarded(const Grant& wish, const View& view, const PolicyContext& ctx,
                       std::int64_t now_ns) {
  if (!guard_->may_run(now_ns)) {
    why_ = guard_->why_held();
    return alone(ctx);
  }
  std::int64_t most = device_.splits[terms_.allowed - 1].finetune_units;
  if (view.batch == 0 || wish.gap_until_ns != 0) {
    most = std::max(most, terms_.idle_units);
  }
  // What decode alone takes of the objective is never given away, nor a longer wait.
  const std::int64_t objective_us = terms_.objective_us * (terms_.per_request ? 2 : 1);
  const double gap_us = std::max(0.0, static_cast<double>(objective_us) - solo_us_[0]);
  const std::int64_t begun_ns = view.start_ns != 0 ? view.start_ns : now_ns;
  const bool kept = wish.finetune_units > 0 && wish.finetune_units <= most &&
                    wish.gap_until_ns <= begun_ns + static_cast<std::int64_t>(gap_us * 1000) &&
                    wish.hold_admission_until_ns <= held_until_ns(begun_ns);
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

// Moves units between the sides: the worker shrinks at once, decode grows once it is quiet. Two
// teams of threads on one core are worse than either alone, so decode keeps its narrow share until
// nothing of an older grant runs any more, or the worker is known to be gone. Taking units from the
// worker raises the pause epoch, which it checks before each launch: under GO, what is in flight
// was launched after it saw this epoch, thus within the units that it grants; a pause is over only
// when nothing is in flight at all. `prompts`: one is about to be computed that has to be in time.
// A pass over a prompt takes many times what is in flight, and would keep the narrow share for all
// of it; so decode takes its units at once.
void Decider::hand_over(const Grant& wish, const Offer& offer, bool present, bool prompts) {
  if (wish.finetune_units < finetune_units_) {
    ++pause_epoch_;
  }
  finetune_units_ = wish.finetune_units;
  if (wish.decode_units > decode_units_ && present && device_.handover && !prompts) {
    const bool quiet =
        offer.pause_epoch_seen >= pause_epoch_ && (wish.action == kGo || offer.in_flight_us == 0);
    if (!quiet) {
      return;
    }
  }
  decode_units_ = wish.decode_units;
}

}  // namespace windrow
