#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "windrow/records.h"

namespace windrow {

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
  kPrompts,
  kLimits,
  kObserve,
};
inline constexpr std::array<std::string_view, 18> kWhyWords{
    "",
    "no policy",
    "off",
    "no latency profile",
    "no worker",
    "the clock does not advance",
    "the view is stale",
    "the view holds impossible figures",
    "the offer holds impossible figures",
    "the prediction is impossible",
    "objective",
    "starving",
    "breaker",
    "guard",
    "queue",
    "prompts",
    "limits",
    "observe",
};

// `qos/guard.py` says what each means and has the values.
#define WINDROW_GUARD_SETTINGS(X)     \
  X(std::int64_t, pause_ns)           \
  X(std::int64_t, queue_us)           \
  X(double, widen)                    \
  X(double, widen_max)                \
  X(double, widen_queued)             \
  X(std::int64_t, widen_half_life_ns) \
  X(double, excess_factor)            \
  X(std::int64_t, window_steps)       \
  X(std::int64_t, min_steps)          \
  X(std::int64_t, first_break_ns)     \
  X(std::int64_t, longest_break_ns)   \
  X(std::int64_t, stale_ns)           \
  X(std::int64_t, standing_clock)     \
  X(double, longest_step_us)

#define WINDROW_SETTING(type, name) type name{};
struct GuardSettings {
  WINDROW_GUARD_SETTINGS(WINDROW_SETTING)
};
#undef WINDROW_SETTING

// Pauses the worker when measured steps break the objective, whatever a policy says; `qos/guard.py`
// says when. Time is an argument. One thread at a time.
class Guard {
 public:
  // `watches`: false for a guard that lets the worker run whatever was measured.
  explicit Guard(const GuardSettings& settings, bool watches = true);

  // Of the objective: 99 allows one step in a hundred to be over it.
  void set_percentile(double percentile);
  [[nodiscard]] double allowed_share() const { return allowed_share_; }  // that may be over it
  // What trips have added to the predictor's margin; fades by half every ten seconds.
  [[nodiscard]] double extra_margin(std::int64_t now_ns) const;
  // Why nothing can be decided on these figures; kRuns where it can.
  [[nodiscard]] Why doubt(const View& view, const Offer& offer,
                          std::span<const double> predicted_us, std::int64_t now_ns);
  // Whether late steps or waiting requests hold the worker at this moment.
  [[nodiscard]] bool pauses(std::int64_t now_ns) const { return now_ns < paused_until_ns_; }
  // Whether the worker may run at this moment; an open breaker lets a trial begin.
  [[nodiscard]] bool may_run(std::int64_t now_ns);
  // What holds the worker where `may_run` says no.
  [[nodiscard]] Why why_held() const;

  // A step whose latency cannot be: the worker pauses, nothing is learned.
  void distrust(std::int64_t now_ns) { pause(now_ns, false); }
  // Requests have waited for a place in decode for so long without a break.
  void queued(std::int64_t now_ns, std::int64_t waited_us);
  // A CPU limit has kept decode from running for so long beside the worker: gives up for a while.
  void throttled(std::int64_t now_ns, double seconds);
  // Half-open: the worker runs again on trial, judged by a fresh window of its own.
  void begin_trial();
  // `harvested`: the worker was granted units during the step.
  void observe(std::int64_t now_ns, double latency_us, std::int64_t objective_us, bool harvested);

  [[nodiscard]] const GuardSettings& settings() const { return settings_; }
  [[nodiscard]] const std::string& reason() const { return reason_; }  // "": it has not given up
  [[nodiscard]] std::int64_t trips() const { return trips_; }
  void set_trips(std::int64_t trips) { trips_ = trips; }

 private:
  // Share of the last steps that were over the objective, exponentially forgotten.
  struct Rate {
    std::int64_t seen = 0;
    double share = 0;
    void add(bool over, double decay);
  };

  void pause(std::int64_t now_ns, bool for_queue);
  void widen(std::int64_t now_ns, double at_least);
  void judge(std::int64_t now_ns);
  void open(std::int64_t now_ns, std::string reason);

  GuardSettings settings_;
  bool watches_;
  bool for_queue_ = false;
  Rate beside_;
  Rate alone_;
  std::int64_t over_in_a_row_ = 0;
  std::int64_t beside_objective_us_ = 0;  // of the last step beside the worker
  double beside_latency_us_ = 0;
  double extra_ = 0;
  std::int64_t extra_at_ns_ = 0;
  std::int64_t paused_until_ns_ = 0;
  std::int64_t open_until_ns_ = 0;
  std::int64_t break_ns_;
  double allowed_share_ = 0.01;
  std::int64_t last_now_ns_ = 0;
  std::int64_t standing_ = 0;
  std::int64_t trips_ = 0;
  std::string reason_;
};

}  // namespace windrow
