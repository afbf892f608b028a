#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "windrow/chunk_table.h"

namespace windrow {

// What to do with chunks now. `target` is how many the worker may hold.
struct LendingPlan {
  std::int64_t target = 0;
  std::int64_t lend = 0;
  std::int64_t revoke = 0;
};

struct LendingNeeds {
  std::int64_t wanted = 0;   // by the worker, in all
  std::int64_t limit = 0;    // of the policy
  std::int64_t reserve = 0;  // to keep free for KV
  bool kv_short = false;     // a request finds no room
  std::int64_t since_revoke_ns = 0;
};

// How many chunks to lend or to ask back; the reserve of KV comes first.
//
// Asks back: what is over `limit` or `wanted`; what the reserve lacks; and a quarter of all lent
// chunks at a time while a request finds no room, for a prompt may need more than the reserve
// holds. Lends: only what is free beyond a whole second reserve, and not within two seconds of a
// revocation, or a request's chunks would go to and fro. What is draining counts as asked for.
[[nodiscard]] LendingPlan plan_lending(const Counts& chunks, const LendingNeeds& needs);
inline constexpr std::int64_t kGrowRestNs = 2'000'000'000;

// What KV may ask for before lent memory is back. Two formulas size the reserve for it: that of the
// Harli paper counts the tokens that running requests grow by; ours the prompts as well that arrive
// meanwhile, for in a disaggregated pod they arrive whole. On the Azure conversation trace, with 50
// ms to let go and a batch of 128 at 50 ms a token of Llama-3-8B, the first gives 17 MB and the
// second 7 chunks of 128 MiB.
struct KvDemand {
  double release_us = 0;  // T, from asking until a chunk is free: the in-flight bound and the drain
  std::int64_t objective_us = 0;  // S, per output token; 0: none, growth is left out
  std::int64_t max_batch = 0;     // requests at once, each of which grows by a token in a step
  std::int64_t token_bytes = 0;   // K and V of one token in all layers
  std::int64_t admitted_q99_tokens = 0;  // 99th percentile of what is admitted within T
};

// (T / S) * max_batch * token_bytes: a step adds a token to each request; and with `prompts` those
// that are admitted within T.
[[nodiscard]] double kv_demand_bytes(const KvDemand& demand, bool prompts);

// How many of `total` chunks to keep free: one at least, for KV's next chunk must never wait; a
// quarter of the arena at most, beyond which lending would be pointless.
[[nodiscard]] std::int64_t reserve_chunks(const KvDemand& demand, bool prompts,
                                          std::int64_t chunk_bytes, std::int64_t total);

// Context tokens that arrive within windows of a fixed length; the 99th percentile of the last 600:
// at 50 ms each, the last half minute of traffic.
class AdmissionRate {
 public:
  explicit AdmissionRate(std::int64_t window_ns) : window_ns_(window_ns) {}

  // Times never fall.
  void add(std::int64_t now_ns, std::int64_t tokens);
  // Tokens; of few windows, the largest.
  [[nodiscard]] std::int64_t q99() const;

 private:
  static constexpr std::size_t kWindows = 600;

  void close_window(std::int64_t sum);

  std::int64_t window_ns_;
  std::deque<std::int64_t> sums_;
  std::int64_t begin_ns_ = 0;
  std::int64_t sum_ = 0;
};

}  // namespace windrow
