#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "windrow/policies.h"
#include "windrow/records.h"

namespace windrow {

// Measured over predicted latency by kind of step; `qos/records.py` has the reasons and fills it.
class Corrections {
 public:
  explicit Corrections(std::size_t splits) : splits_(splits) {}

  // One factor for each split; null: nothing is known of such steps.
  [[nodiscard]] const double* find(std::int64_t batch_bits, std::int64_t context,
                                   std::int64_t phase) const;
  // Throws std::length_error beyond kMost kinds.
  void set(std::int64_t batch_bits, std::int64_t context, std::int64_t phase, std::size_t split,
           double ratio);
  void clear();

  static constexpr std::size_t kMost = 1024;

 private:
  struct Place {
    std::int64_t batch_bits = 0;
    std::int64_t context = 0;
    std::int64_t phase = 0;
    std::int64_t row = -1;  // of ratios_; -1: empty
  };

  [[nodiscard]] std::size_t place_of(std::int64_t batch_bits, std::int64_t context,
                                     std::int64_t phase) const;

  std::size_t splits_;
  std::vector<Place> places_;  // open addressing, twice as many as kMost; empty until the first
  std::vector<double> ratios_;
};

// What a policy's terms come to; `idle_units` and `allowed` are the limits on this device.
struct DecisionTerms {
  PolicyKind policy = PolicyKind::kWindrow;
  bool option = false;
  bool observing = false;
  bool per_request = false;
  bool refused = false;  // the objective is below what decode alone takes
  std::int64_t objective_us = 0;
  std::int64_t deferral_us = 0;
  std::size_t allowed = 1;
  std::int64_t idle_units = 0;
};

// What the guard has made of past steps.
struct GuardState {
  double extra = 0;  // margin that trips have added
  std::int64_t extra_at_ns = 0;
  std::int64_t paused_until_ns = 0;
  std::int64_t open_until_ns = 0;
  bool open = false;       // the breaker is
  bool for_queue = false;  // paused for requests that wait for a place in decode
};

// Why the worker does not run, in the words of kWhyWords.
enum class Why : std::uint8_t {
  kRuns,
  kNoPolicy,
  kOff,
  kNoProfile,
  kNoWorker,
  kClock,
  kStale,
  kImpossibleView,
  kImpossibleOffer,
  kImpossiblePrediction,
  kObjective,
  kStarving,
  kBreaker,
  kGuard,
  kQueue,
  kLimits,
  kObserve,
};
inline constexpr std::array<std::string_view, 17> kWhyWords{
    "",
    "no policy",
    "off",
    "no latency profile",
    "no worker",
    "the clock stands still",
    "the view is stale",
    "the view holds impossible figures",
    "the offer holds impossible figures",
    "the prediction is impossible",
    "objective",
    "starving",
    "breaker",
    "guard",
    "queue",
    "limits",
    "observe",
};

// What a step runs under, to judge it by afterwards (`control._During`).
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

// Decides for one slot as `qos/control.py`'s Controller does, in one call: predictor, guard, policy
// and handover. It learns nothing itself: whoever learns tells it. One thread at a time.
class Decider {
 public:
  struct Device {
    std::int64_t units = 1;
    std::vector<DecisionSplit> splits;
    std::vector<std::int64_t> offered;
    std::int64_t layers = 1;
    std::int64_t chunk_bytes = 0;
    bool gaps = false;
  };

  // Throws std::invalid_argument for a device without a split.
  Decider(const DecisionFigures& figures, Device device, std::int64_t pause_epoch);

  // Stage 1, by split. Throws std::invalid_argument unless there is one for each.
  void set_models(const std::vector<std::array<double, 3>>& models);
  // Stage 2, the margin, how far the profile reaches, and whether stage 2 was taught enough.
  void learned(double b1, double k1, double margin, std::int64_t most_batch,
               std::int64_t most_context, bool taught);
  void correct(std::int64_t batch_bits, std::int64_t context, std::int64_t phase, std::size_t split,
               double ratio);
  // Nothing is harvested, for that reason.
  void set_idle(Why why) { idle_why_ = why; }
  // Throws std::invalid_argument where more splits are allowed than there are, or none.
  void set_terms(const DecisionTerms& terms);
  void set_guard(const GuardState& guard) { guard_ = guard; }
  // The next decision is the first that the guard sees.
  void forget_clock() { last_now_ns_ = standing_ = 0; }

  [[nodiscard]] Grant decide(const View& view, const Offer& offer, std::int64_t now_ns,
                             bool present, std::int64_t chunks);

  // Of the last decision.
  [[nodiscard]] Why why() const { return why_; }
  [[nodiscard]] double margin() const { return margin_shown_; }
  [[nodiscard]] double alone_us() const { return alone_us_; }
  [[nodiscard]] double would_units() const { return would_units_; }
  [[nodiscard]] bool extrapolated() const { return extrapolated_; }
  [[nodiscard]] std::int64_t current() const { return current_; }
  [[nodiscard]] const DuringStep& during() const { return during_; }
  // Whether an open breaker has let a trial begin since the last call.
  [[nodiscard]] bool take_trial();

 private:
  void predict(std::int64_t batch, std::int64_t context_tokens, std::int64_t phase);
  void fold();
  [[nodiscard]] double extra_margin(std::int64_t now_ns) const;
  [[nodiscard]] Why why_held() const;
  [[nodiscard]] Why doubt(const View& view, const Offer& offer, std::int64_t now_ns);
  [[nodiscard]] bool may_run(std::int64_t now_ns);
  [[nodiscard]] Grant wish(const View& view, const Offer& offer, std::int64_t now_ns, bool present);
  [[nodiscard]] Grant guarded(const Grant& wish, const View& view, const PolicyContext& ctx,
                              std::int64_t now_ns);
  [[nodiscard]] Grant paused(Why why);
  [[nodiscard]] std::int64_t index_of(const Grant& grant) const;
  void hand_over(const Grant& wish, const Offer& offer, bool present);

  // What every decision reads lies together: in cold caches each line is a miss.
  DecisionTerms terms_;
  GuardState guard_;
  Why idle_why_ = Why::kNoPolicy;
  Why why_ = Why::kNoPolicy;
  bool stale_fold_ = true;
  bool extrapolated_ = false;
  bool trial_ = false;
  bool taught_ = false;
  double b1_ = 1;
  double k1_ = 1;
  double margin_ = 0;
  std::int64_t most_batch_ = 0;
  std::int64_t most_context_ = 0;
  std::int64_t current_ = 0;
  std::int64_t last_now_ns_ = 0;
  std::int64_t standing_ = 0;
  std::int64_t decode_units_;
  std::int64_t finetune_units_ = 0;
  std::int64_t pause_epoch_;
  double margin_shown_ = 0;
  double alone_us_ = 0;
  double would_units_ = 0;
  DuringStep during_;
  DecisionFigures figures_;
  Device device_;
  std::vector<double> solo_us_;
  std::vector<double> beside_us_;
  Corrections corrections_;
};

}  // namespace windrow
