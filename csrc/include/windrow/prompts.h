#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace windrow {

// Prompts that wait for their first token, at the start of a pass.
struct PromptQueue {
  std::int64_t left_tokens = 0;  // still to be computed, those of this pass included; 0: no prompt
  std::int64_t waited_us = 0;    // since the oldest of those requests arrived
  bool computing = false;        // this pass computes a prompt, of whichever request
};

// How long prompts take under each split of a device, and how much room to leave.
//
// A prompt token takes `token_us` on the whole device; beside a worker as many times that as passes
// under the split have shown. Before the first such pass, a product that is bound by compute is
// taken to slow down by the units that it loses. Source: LLMStation and FlexLLM compute prompts
// with the device to themselves or in the same batch; a factor by split is ours. Attention's square
// is left out: the margin, which follows measured first tokens, covers it. One thread at a time.
class PromptModel {
 public:
  // `shares`: by split, the part of the device's units that decode keeps; the first has no worker.
  explicit PromptModel(const std::vector<double>& shares);

  // Time of so many tokens under a split, with the margin; infinite until a pass without a worker
  // has been measured.
  [[nodiscard]] double predict_us(std::size_t split, std::int64_t tokens) const;
  // Takes note of a pass that computed so many tokens; nonsense is left out. `split` 0: no worker.
  void observe(std::size_t split, std::int64_t tokens, double latency_us);
  // Lets the margin follow a first token that came beside a worker, so that `late_share` of them
  // (0 to 1, exclusive) are late.
  void follow(bool late, double late_share);

  [[nodiscard]] double token_us() const { return token_us_; }  // 0: not known
  [[nodiscard]] double margin() const { return margin_; }

 private:
  double token_us_ = 0;
  double margin_;
  std::vector<double> stretch_;  // by split; 1 for the first
};

}  // namespace windrow
