#pragma once

#include <functional>
#include <set>
#include <span>
#include <vector>

#include "windrow/partition.h"

namespace windrow {

// Ids of this process's threads, as /proc lists them. Throws Error.
[[nodiscard]] std::vector<int> threads_of_this_process();

// Cores shared by the affinity of threads; a group is one core. sched_setaffinity(0) moves the
// calling thread only, so every thread is moved, also those that start meanwhile from one that was
// not moved yet; one that the kernel is just about to start is moved by the next call. A thread
// that ends meanwhile is not an error.
//
// gRPC's threads (known by name) and those that were named stay on the last core. Thread and
// errors: as Partition; where a thread cannot be moved, those that were moved go back.
class HostPartition final : public Partition {
 public:
  using ListThreads = std::function<std::vector<int>()>;

  // Throws DriverUnavailable for fewer than two cores, std::invalid_argument for ids beyond what
  // an affinity mask holds. Other than by default `threads` is a test's.
  explicit HostPartition(std::span<const int> cores, ListThreads threads = threads_of_this_process);

  [[nodiscard]] int total_units() const override { return static_cast<int>(cores_.size()); }
  [[nodiscard]] int group_units() const override { return 1; }
  [[nodiscard]] int groups() const override { return total_units(); }
  [[nodiscard]] std::uintptr_t enter(Side side, int groups) override;
  void leave() override;
  [[nodiscard]] int units(Side side, int groups) override;
  // A thread is put on each core of the share in turn and says where it runs: a core that this
  // process may not use is not among them.
  [[nodiscard]] std::vector<unsigned> measure(Side side, int groups) override;
  void exclude(int thread) override { excluded_.insert(thread); }
  void keep_in_background(int thread) override;

 private:
  [[nodiscard]] std::span<const int> share(Side side, int groups) const;
  void move_threads(std::span<const int> compute, std::span<const int> background);
  [[nodiscard]] bool is_background(int thread);

  std::vector<int> cores_;  // ascending
  ListThreads threads_;
  std::set<int> excluded_;
  std::set<int> background_;  // named, or known by name since they were first seen
};

}  // namespace windrow
