#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "windrow/policies.h"

namespace windrow {

// Measured over predicted latency by kind of step, in front of the linear model.
//
// Source: LLMStation's record cache, a dictionary from batch and tasklet to measured latencies,
// with a linear predictor for what it misses. Departure: a record holds measured over predicted
// instead of microseconds, so that it is right for the whole of its bucket (batches up to the next
// power of two, 4,096 context tokens) and a miss is simply a correction of 1.
class StepRecords {
 public:
  explicit StepRecords(std::size_t splits) : splits_(splits) {}

  // By which each split's prediction is to be multiplied; null: a miss. Valid until the next `add`.
  [[nodiscard]] const double* find(std::int64_t batch, std::int64_t context_tokens,
                                   std::int64_t phase) const;
  // Keeps how long a step took, over what the linear model says.
  void add(std::size_t split, std::int64_t batch, std::int64_t context_tokens, std::int64_t phase,
           double ratio);
  // Kinds of steps that are corrected.
  [[nodiscard]] std::size_t known() const { return known_count_; }

 private:
  struct Place {
    std::int64_t batch_bits = 0;
    std::int64_t context = 0;
    std::int64_t phase = 0;
    std::int64_t row = -1;  // -1: empty
  };

  [[nodiscard]] std::size_t place_of(std::int64_t batch, std::int64_t context_tokens,
                                     std::int64_t phase, Place& key) const;

  std::size_t splits_;
  std::vector<Place> places_;  // open addressing, twice the kinds; empty until the first
  // By row and split, but for the last two, which are by row.
  std::vector<double> ratios_;
  std::vector<double> known_;
  std::vector<std::int64_t> seen_;
  std::vector<bool> is_known_;
  std::size_t known_count_ = 0;
};

// What steps teach: both stages' factors and the records; nothing (Harli); the records
// (LLMStation).
enum class PredictorForm : std::uint8_t { kWindrow, kHarli, kLlmStation };

// Latency of the next step for every split of a device: Harli's two stages, refined online.
//
// Stage 1 (`qos/solo.py`) is fitted from a profile. Stage 2 (`qos/co_run.py`) multiplies it by what
// a worker costs, with one (b1, k1) for all batches and phases, which recursive least squares
// follows. What steps of the same kind took comes before both. One thread at a time.
class Predictor {
 public:
  struct Device {
    std::int64_t units = 1;
    std::vector<DecisionSplit> splits;
    std::vector<std::array<double, 3>> models;  // stage 1 by split: c0, b0 and k0 in microseconds
    std::array<double, 2> start{};              // b1 and k1
    bool measured = false;                      // `start` comes from steps beside a worker
    std::int64_t most_batch = 0;                // what was profiled
    std::int64_t most_context = 0;
    PredictorForm form = PredictorForm::kWindrow;
    bool blind = false;  // expects every step to take no time, and learns nothing
  };

  // Throws std::invalid_argument unless there is one model for each split, and a split.
  Predictor(const DecisionFigures& figures, Device device);

  // Under each split with a worker beside it (`beside`), and without one on decode's units there
  // (`solo`), both without a margin and as long as there are splits. `phase`: of the next tasklet.
  void predict(std::int64_t batch, std::int64_t context_tokens, std::int64_t phase,
               std::span<double> beside_us, std::span<double> solo_us) const;
  // Whether batch or context are beyond what was profiled, or seen often enough since.
  [[nodiscard]] bool extrapolates(std::int64_t batch, std::int64_t context_tokens) const;
  // Learns from a step beside a worker under `split`; returns the relative residual. A step alone
  // (split 0) says nothing of stage 2: its residual is returned and nothing moves. A step counts by
  // the square of how near it was to `objective_us` (0: in full). Throws std::out_of_range.
  double observe(std::size_t split, std::int64_t batch, std::int64_t context_tokens,
                 double latency_us, double objective_us, std::int64_t phase);
  // Lets the margin follow a step beside which a worker ran for a part of it.
  void follow(double residual, double weight);

  [[nodiscard]] std::size_t splits() const { return device_.splits.size(); }
  [[nodiscard]] double b1() const { return b1_; }
  [[nodiscard]] double k1() const { return k1_; }
  [[nodiscard]] double margin() const { return margin_; }
  void set_margin(double margin) { margin_ = margin; }
  // Whether enough steps beside a share have moved stage 2, of late too.
  [[nodiscard]] bool taught() const;
  // What the smallest batch takes on all units, alone and with hardly any context.
  [[nodiscard]] double least_step_us() const;
  [[nodiscard]] const StepRecords& records() const { return records_; }

 private:
  [[nodiscard]] double alone_us(std::size_t split, std::int64_t batch,
                                std::int64_t context_tokens) const;
  void fold();
  void widen_range(std::int64_t batch, std::int64_t context_tokens);
  void learn(std::size_t split, double ratio, double weight);
  void move_margin(double residual, double weight);

  DecisionFigures figures_;
  Device device_;
  std::vector<double> stretch_;  // stage 2 by split
  double b1_;
  double k1_;
  // Information about (b1, k1), symmetric; the prior counts as much as one step.
  double i00_ = 1;
  double i01_ = 0;
  double i11_ = 1;
  double margin_;
  std::int64_t credit_;      // of steps beside a share, in parts of steps
  std::int64_t beyond_ = 0;  // steps that lay outside of what was profiled
  StepRecords records_;
};

}  // namespace windrow
