#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "windrow/clock.h"
#include "windrow/decision.h"
#include "windrow/lending.h"
#include "windrow/records.h"
#include "windrow/shared_word.h"

namespace windrow {

// What the engine knows at the start of a step: `engines.hook.StepInput`, in its order.
#define WINDROW_STEP_FIELDS(X) \
  X(step)                      \
  X(start_ns)                  \
  X(batch)                     \
  X(context_tokens)            \
  X(waiting)                   \
  X(admitted_tokens)           \
  X(slack_us)                  \
  X(prefill_tokens)            \
  X(prompts_left)              \
  X(first_token_waited_us)     \
  X(due_ns)

#define WINDROW_FIELD(name) std::int64_t name = 0;
struct StepFacts {
  WINDROW_STEP_FIELDS(WINDROW_FIELD)
  double tokens = 1;  // that a request gets of the step, on average
};
#undef WINDROW_FIELD

// Everything outside of a step that it reads, writes or moves. Called by decode's thread.
class StepSurroundings {
 public:
  virtual ~StepSurroundings() = default;

  virtual std::int64_t now_ns() = 0;
  // Decode's heartbeat in the shared page, in real time; null where both are simulated.
  virtual SharedWord<std::int64_t>* heartbeat() { return nullptr; }
  // The page.
  virtual void publish_view(const View& view) = 0;
  virtual void publish_grant(const Grant& grant) = 0;
  virtual void beat(std::int64_t now_ns) = 0;
  virtual Offer read_offer() = 0;
  virtual std::int64_t worker_age_ns() = 0;
  // The arena; see ChunkTable.
  virtual Counts counts() = 0;
  virtual std::int64_t set_reserve(std::int64_t chunks) = 0;
  virtual std::int64_t lend(std::int64_t chunks, std::int64_t owner) = 0;  // how many were
  virtual std::int64_t revoke(std::int64_t chunks) = 0;                    // how many were
  virtual std::int64_t reclaim(std::int64_t owner) = 0;
  virtual bool has_peers() = 0;
  // What other threads have left for decode's: seconds of throttling, and another policy.
  virtual void take_throttled(std::int64_t now_ns) = 0;
  virtual void take_terms(std::int64_t now_ns) = 0;
  // Steps yield a request another number of tokens, which sets another objective for them.
  virtual void take_step_tokens(double tokens) = 0;
  // For the event log, and for the decisions that are kept of a breach.
  virtual void mark(std::int64_t now_ns, std::string_view what, const std::string& detail) = 0;
  virtual void breached(const std::string& reason) = 0;
};

// The part of a policy's terms that a step itself needs.
struct StepTerms {
  bool any = false;  // a policy selects the slot
  bool harvests = false;
  std::int64_t objective_us = 0;        // of a step, for all of its tokens
  std::int64_t token_objective_us = 0;  // as the policy states it
  std::int64_t max_memory_percent = 0;
  double step_tokens = 1;  // that a request is taken to get of a step
};

struct StepSettings {
  std::int64_t max_batch = 64;
  double drain_us = 50'000;
  bool reserve_prompts = true;  // see kv_demand_bytes
  bool keeps_reserve = true;    // false: KV finds nothing kept free for it
  std::int64_t admission_window_ns = 50'000'000;
  std::int64_t worker_stale_ns = 1'000'000'000;
  std::int64_t regrant_ns = 50'000'000;
  std::int64_t steady_ns = 80'000'000;
  std::int64_t lending_every_ns = 20'000'000;
  // Of the arena.
  std::int64_t chunks = 0;
  std::int64_t chunk_bytes = 0;
  std::int64_t slots_per_chunk = 1;
  bool keeps_decisions = false;
};

// A step that was measured: its latency, what the hook took of it, and the objective in force.
struct MeasuredStep {
  std::int64_t latency_us = 0;
  std::int64_t cost_ns = 0;
  std::int64_t objective_us = 0;
  double tokens = 1;
};

// A step throughout which the worker had a split's units, and tasklets of its ran.
struct StepBeside {
  std::int64_t split = 0;
  std::int64_t batch = 0;
  std::int64_t context_tokens = 0;
  double latency_us = 0;
};

// A decision with what it rested on; then how the steps under it went.
struct KeptDecision {
  std::int64_t at_ns = 0;
  View view;
  Offer offer;
  Grant grant;
  double margin = 0;
  double alone_us = 0;
  Why why = Why::kRuns;
  bool extrapolated = false;
};
struct KeptOutcome {
  std::int64_t steps = 0;
  std::int64_t over = 0;
  std::int64_t longest_us = 0;
  std::int64_t sum_us = 0;
};
using KeptEntry = std::variant<KeptDecision, KeptOutcome>;

// What other threads read once a second.
struct StepCounters {
  std::int64_t steps = 0;
  std::int64_t over = 0;
  std::int64_t busy_us = 0;
  std::int64_t lent = 0;
  std::int64_t revoked = 0;
  std::int64_t reclaimed = 0;
  double granted_unit_seconds = 0;
  double granted_s = 0;  // for which the worker had any unit
};

// Lends, revokes and reclaims chunks as plan_lending says. Decode's thread only.
class Lender {
 public:
  Lender(StepSurroundings& around, const StepSettings& settings);

  // Whether a worker may still hold chunks.
  [[nodiscard]] bool holds_out() const { return owner_ != 0; }
  // Chunks that would have to be FREE before all of what the worker wants could be lent.
  [[nodiscard]] std::int64_t lacking() const { return lacking_; }

  void admit(std::int64_t now_ns, std::int64_t tokens) { admitted_.add(now_ns, tokens); }
  // Lends or revokes as needed; returns how many chunks the worker may hold now. Cheap when nothing
  // presses: then it plans every 20 ms only.
  std::int64_t plan(std::int64_t now_ns, const Counts& chunks, const Offer& offer,
                    const StepTerms& terms, bool kv_short, StepCounters& counters);
  // Fits the reserve to the traffic, once a second. Belongs after a step.
  void size_reserve(std::int64_t now_ns, const StepTerms& terms);
  // Takes back what was lent, unless to the one worker that is known to live.
  void reclaim_unless(std::int64_t now_ns, std::int64_t live_epoch, StepCounters& counters);
  // How long the worker took to give back, each time since the last call, in seconds.
  [[nodiscard]] std::vector<double> take_returns() { return std::exchange(returns_s_, {}); }

 private:
  void watch_draining(std::int64_t now_ns, const Counts& chunks);

  StepSurroundings& around_;
  const StepSettings& settings_;
  AdmissionRate admitted_;
  std::int64_t owner_ = 0;  // epoch of the job whose worker holds chunks; 0: none
  std::int64_t reserve_;
  double release_us_;
  std::int64_t revoked_ns_ = 0;
  std::int64_t draining_since_ns_ = 0;
  std::int64_t planned_ns_ = 0;
  std::int64_t sized_ns_ = 0;
  std::int64_t target_ = 0;
  std::int64_t lacking_ = 0;
  std::vector<double> returns_s_;
};

// All that decode pays for before a step, in one call: judge the steps before, show the view, read
// the offer, count and lend chunks, decide, publish the grant.
//
// Compiled as a whole, since between two torch steps caches are cold: each line of Python there
// costs ten times what it costs warm. A decision is kept for a while when nothing has changed that
// it rests on. One thread at a time, which is decode's.
class HarvestStep {
 public:
  // Keeps references to both, which outlive it.
  HarvestStep(StepSurroundings& around, Decider& decider, const StepSettings& settings,
              const Grant& first);

  const Grant& before_step(const StepFacts& facts);
  // The two halves of `before_step`. Whether the last decision holds for this step, which is all
  // over then; inline, since most steps end here and each function elsewhere is one more line of
  // cold code. Of the facts it reads those that `stands_for` names.
  bool keeps(const StepFacts& facts) {
    begin_ns_ = now_ns();
    if (!stands_for(facts)) {
      return false;
    }
    // Between two decisions the worker reads nothing of decode but its heartbeat.
    if (heartbeat_ != nullptr) {
      heartbeat_->store(begin_ns_, std::memory_order_release);
    } else {
      around_.beat(begin_ns_);
    }
    waiting_since_ns_ = 0;
    cost_ns_ = now_ns() - begin_ns_;
    return true;
  }
  // Decides for a step that `keeps` has just refused.
  const Grant& decides(const StepFacts& facts);
  // A step over the objective is judged at once, others at the next decision.
  void after_step(std::int64_t end_ns, double latency_us);
  // Decode runs dry: the worker may have the device.
  const Grant& idle(std::int64_t now_ns);
  // A pass has computed so many prompt tokens under that grant.
  void after_prompt(std::int64_t tokens, double latency_us, const Grant& grant) {
    decider_.observe_prompt(tokens, latency_us, grant);
  }
  // A request got its first token, so long after it arrived.
  void after_first_token(double after_us) { decider_.observe_first_token(after_us); }
  // Pauses every worker, and asks back what is lent.
  void close();

  // From any thread that holds whatever lock keeps decode's away.
  void news() { news_ = true; }                // something is to be taken
  void look_again() { steady_until_ns_ = 0; }  // the last decision does not stand any more
  void worker_lives(std::int64_t epoch);       // the only one that does; 0: none

  void set_terms(const StepTerms& terms) { terms_ = terms; }
  [[nodiscard]] const View& view() const { return view_; }
  [[nodiscard]] const Grant& grant() const { return grant_; }
  [[nodiscard]] std::int64_t cost_ns() const { return cost_ns_; }
  [[nodiscard]] std::int64_t live_epoch() const { return live_epoch_; }  // -1: not known yet
  [[nodiscard]] std::int64_t tokens_done() const { return tokens_done_; }
  [[nodiscard]] bool has_news() const { return news_; }
  [[nodiscard]] Lender& lender() { return lender_; }
  [[nodiscard]] StepCounters counters() const;
  // Since the last call.
  [[nodiscard]] std::vector<MeasuredStep> take_measured() { return std::exchange(measured_, {}); }
  [[nodiscard]] std::vector<double> take_residuals() { return std::exchange(residuals_, {}); }
  [[nodiscard]] std::vector<StepBeside> take_beside() { return std::exchange(beside_, {}); }
  [[nodiscard]] std::vector<KeptEntry> take_kept() { return std::exchange(kept_, {}); }

 private:
  struct Unjudged {
    double latency_us;
    std::int64_t cost_ns;
  };

  std::int64_t now_ns() { return heartbeat_ != nullptr ? monotonic_ns() : around_.now_ns(); }
  [[nodiscard]] bool stands_for(const StepFacts& facts) const {
    return begin_ns_ < steady_until_ns_ && facts.batch == view_.batch &&
           facts.admitted_tokens == 0 && facts.waiting == 0 && facts.prefill_tokens == 0 &&
           facts.prompts_left == 0 && !news_;
  }
  void judge(std::int64_t now_ns);
  [[nodiscard]] bool yields_otherwise(double tokens) const;
  void decide(std::int64_t now_ns, const StepFacts* facts);
  void show(std::int64_t now_ns, const StepFacts* facts, std::int64_t free_chunks);
  Offer read_offer(std::int64_t now_ns);
  void keep_beside(const Offer& offer);
  void put(const Grant& grant, std::int64_t now_ns);
  void mark_action(std::int64_t now_ns);
  void keep(KeptEntry entry);

  // What a step reads where the last decision still holds is together, the view's batch included.
  SharedWord<std::int64_t>* heartbeat_;
  std::int64_t steady_until_ns_ = 0;
  std::int64_t begin_ns_ = 0;
  std::int64_t cost_ns_ = 0;
  std::int64_t waiting_since_ns_ = 0;  // since when requests wait; 0: none does
  bool news_ = false;
  bool prefilled_ = false;
  bool present_ = false;
  View view_;
  StepSurroundings& around_;
  Decider& decider_;
  StepSettings settings_;
  StepTerms terms_;
  // Requests that decode runs, as its last step showed them; none once it ran dry.
  struct Running {
    std::int64_t batch = 0;
    std::int64_t context_tokens = 0;
  };
  Running running_;
  Grant grant_;
  std::int64_t objective_us_ = 0;
  std::int64_t published_ns_ = 0;
  std::int64_t live_epoch_ = -1;
  std::int64_t tokens_done_ = 0;
  std::int64_t paused_ns_ = 0;  // since when the worker is paused; 0: it is not, or only starves
  std::int64_t trips_ = 0;      // of the guard, as last seen, as is the next
  std::string reason_;
  std::string marked_reason_;
  StepCounters counters_;
  double units_ = 0;  // of the worker, since `units_since_ns_`
  std::int64_t units_since_ns_;
  double unit_ns_ = 0;
  std::int64_t granted_ns_ = 0;
  Lender lender_;
  std::vector<Unjudged> unjudged_;
  std::vector<MeasuredStep> measured_;
  std::vector<double> residuals_;
  // Judged beside a share of the worker's, until its next offer tells whether it computed.
  std::vector<StepBeside> perhaps_beside_;
  std::vector<StepBeside> beside_;
  Offer offer_;  // the last one that was read
  std::vector<KeptEntry> kept_;
};

}  // namespace windrow
