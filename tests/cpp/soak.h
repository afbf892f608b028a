#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace windrow::testing {

struct SoakPlan {
  std::uint64_t operations = 1'000'000;  // calls that move chunks, of all processes together
  std::uint64_t kills = 100;             // of workers, at least; a busy machine has fewer chances
  unsigned seed = 1;
  std::uint64_t check_every = 1'000;
  std::uint64_t kill_every = 3'000;     // a worker, at any instruction
  std::uint64_t owner_every = 100'000;  // decode, at any instruction
};

struct SoakReport {
  std::uint64_t operations = 0;
  std::uint64_t checks = 0;
  std::uint64_t workers_killed = 0;
  std::uint64_t owners_killed = 0;
};

// Decode and two workers as real processes over a served arena: decode takes, returns, lends,
// revokes and resizes its reserve at random; the workers write into what they hold and give it
// back; all of them use the shared page; either side is killed at random and replaced. Everything
// that must hold is looked at every `check_every` operations. Throws std::runtime_error with what
// did not hold; `progress` is called now and then.
SoakReport soak(const SoakPlan& plan, const std::function<void(const SoakReport&)>& progress);

}  // namespace windrow::testing
