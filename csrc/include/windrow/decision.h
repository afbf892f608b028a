#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "windrow/guard.h"
#include "windrow/policies.h"
#include "windrow/predictor.h"
#include "windrow/prompts.h"
#include "windrow/records.h"

namespace windrow {

// What a policy's terms come to; `idle_units` and `allowed` are the limits on this device.
struct DecisionTerms {
  Policy policy = {};         // none: nothing is harvested,
  Why idle = Why::kNoPolicy;  // for this reason
  bool observing = false;
  bool per_request = false;
  bool refused = false;  // the objective is below what decode alone takes
  std::int64_t objective_us = 0;
  std::int64_t deferral_us = 0;
  std::int64_t first_token_us = 0;  // within which a request gets its first token; 0: no objective
  std::size_t allowed = 1;
  std::int64_t idle_units = 0;
};

// What a step runs under, to judge it by afterwards (`qos.control.DuringStep`).
struct DuringStep {
  std::int64_t split = 0;
  std::int64_t batch = 0;
  std::int64_t context_tokens = 0;
  std::int64_t slack_us = 0;
  std::int64_t predicted_us = 0;
  std::int64_t phase = 0;
  bool harvested = false;
  bool settled = true;
  bool in_part = false;
};

// Decides for one slot, step by step: predictor, guard, policy and handover in one call. It learns
// from steps through the same guard and predictor, which are others' too. One thread at a time.
class Decider {
 public:
  struct Device {
    std::int64_t units = 1;
    std::vector<DecisionSplit> splits;
    std::vector<std::int64_t> offered;  // units of the worker's estimates, in their order
    std::int64_t layers = 1;
    std::int64_t chunk_bytes = 0;
    bool gaps = false;
    bool handover = true;  // false: decode gets its units back at once, whatever runs on them
  };

  // Throws std::invalid_argument for a device without a split, or without a guard.
  Decider(const DecisionFigures& figures, Device device, std::int64_t pause_epoch,
          std::shared_ptr<Guard> guard);

  // Throws std::invalid_argument unless it has as many splits.
  void set_predictor(std::shared_ptr<Predictor> predictor);
  void set_guard(std::shared_ptr<Guard> guard) { guard_ = std::move(guard); }
  // No policy selects the slot.
  void clear_terms() {
    terms_ = {};
    has_terms_ = false;
  }
  // Throws std::invalid_argument where more splits are allowed than there are, or none, or without
  // a predictor.
  void set_terms(DecisionTerms terms);

  // What both sides do from now on. `present`: a worker is attached and its heart beats; `chunks`:
  // how many it may hold; `due_ns`: when the first waiting request has to be admitted, where any
  // has a bound of its own; 0: none has.
  [[nodiscard]] Grant decide(const View& view, const Offer& offer, std::int64_t now_ns,
                             bool present, std::int64_t chunks, const PromptQueue& prompts = {},
                             std::int64_t due_ns = 0);
  // Judges the step that was decided last, and learns from it. Returns how far it was from its
  // prediction, relative to that; nothing where it ran without a worker or between two partitions.
  std::optional<double> observe(std::int64_t now_ns, double latency_us);
  // Learns from a pass that computed so many prompt tokens under that grant.
  void observe_prompt(std::int64_t tokens, double latency_us, const Grant& grant);
  // Counts a request's first token, that long after it arrived.
  void observe_first_token(double after_us);
  // What a worker that always has work would get at this moment, on average over a step.
  [[nodiscard]] double headroom_units(const View& view) const;

  [[nodiscard]] Guard& guard() { return *guard_; }
  // Of the last decision.
  [[nodiscard]] Why why() const { return why_; }
  [[nodiscard]] double margin() const { return margin_shown_; }
  [[nodiscard]] double alone_us() const { return alone_us_; }
  [[nodiscard]] double would_units() const { return would_units_; }
  [[nodiscard]] bool extrapolated() const { return extrapolated_; }
  [[nodiscard]] const DuringStep& during() const { return during_; }
  [[nodiscard]] const PromptModel& prompts() const { return prompts_; }
  // First tokens since the start, and those of them that came later than the objective.
  [[nodiscard]] std::int64_t first_tokens() const { return first_tokens_; }
  [[nodiscard]] std::int64_t first_tokens_over() const { return first_tokens_over_; }

 private:
  [[nodiscard]] PolicyContext context(double margin, std::span<const double> beside_us,
                                      std::span<const double> solo_us) const;
  [[nodiscard]] Grant wish(const View& view, const Offer& offer, std::int64_t now_ns, bool present,
                           const PromptQueue& prompts);
  [[nodiscard]] std::int64_t held_until_ns(std::int64_t begun_ns) const;
  [[nodiscard]] bool prompts_first(const PromptQueue& prompts) const;
  [[nodiscard]] std::size_t allowed_beside(const PromptQueue& prompts) const;
  [[nodiscard]] Grant guarded(const Grant& wish, const View& view, const PolicyContext& ctx,
                              std::int64_t now_ns);
  [[nodiscard]] Grant paused(Why why);
  [[nodiscard]] std::int64_t index_of(const Grant& grant) const;
  void hand_over(const Grant& wish, const Offer& offer, bool present, bool prompts);

  std::shared_ptr<Guard> guard_;
  std::shared_ptr<Predictor> predictor_;  // null: none is known
  DecisionTerms terms_;
  bool has_terms_ = false;
  Why why_ = Why::kNoPolicy;
  bool extrapolated_ = false;
  std::int64_t current_ = 0;
  std::int64_t decode_units_;
  std::int64_t finetune_units_ = 0;
  std::int64_t pause_epoch_;
  double margin_shown_ = 0;
  double alone_us_ = 0;
  double would_units_ = 0;
  DuringStep during_;
  std::int64_t due_ns_ = 0;  // of the requests that wait for the step that is decided
  PromptModel prompts_;
  bool beside_prompts_ = false;  // a worker ran while a request waited for its first token
  std::int64_t first_tokens_ = 0;
  std::int64_t first_tokens_over_ = 0;
  DecisionFigures figures_;
  Device device_;
  std::vector<double> solo_us_;
  std::vector<double> beside_us_;
};

}  // namespace windrow
