#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "windrow/cuda_driver.h"
#include "windrow/mutex.h"
#include "windrow/partition.h"

namespace windrow {

// Of how many SMs the smallest share consists; nothing where the GPU has no shares.
[[nodiscard]] std::optional<unsigned> smallest_share(const CudaContext& context);

// The SMs of one GPU in groups of the smallest size, and what was made of them: a green context and
// a stream for each share, when it is first asked for. They live as long as this does, and the
// driver keeps it: memory that was used on a stream asks that stream when it is over, until the
// process ends. Thread: any.
class GreenShares {
 public:
  // Throws DriverUnavailable where the driver lacks green contexts or their streams take no events
  // of torch's, or the GPU is one group.
  explicit GreenShares(std::shared_ptr<const CudaContext> context);
  GreenShares(const GreenShares&) = delete;
  GreenShares& operator=(const GreenShares&) = delete;
  ~GreenShares();

  [[nodiscard]] int total_units() const { return total_units_; }
  [[nodiscard]] int group_units() const { return group_units_; }
  [[nodiscard]] int groups() const { return static_cast<int>(groups_.size()); }
  // Of so many of the groups; a stream of the primary context for all of them. Throws Error.
  [[nodiscard]] cuda::Stream stream(Partition::Side side, int groups);
  [[nodiscard]] int units(Partition::Side side, int groups);

 private:
  class Share;
  [[nodiscard]] const Share& share(Partition::Side side, int groups);
  void split();
  // Throws DriverUnavailable where torch's events would not work on these streams.
  void require_events();
  [[nodiscard]] std::vector<cuda::DeviceResource> resources(Partition::Side side, int groups) const;

  std::shared_ptr<const CudaContext> context_;
  const cuda::GreenCalls& green_;
  int total_units_ = 0;
  int group_units_ = 0;
  std::vector<cuda::DeviceResource> groups_;
  std::optional<cuda::DeviceResource> rest_;  // what fills no group and may join one
  Mutex mutex_;
  std::map<std::pair<Partition::Side, int>, std::unique_ptr<const Share>> shares_
      WINDROW_GUARDED_BY(mutex_);
};

// The SMs of one GPU, shared between decode and a finetune worker by green contexts.
//
// Both processes make the same split into groups of the device's smallest size; that the driver
// gave both the same groups is not documented, and `measure` finds out. SMs that fill no group go
// to decode, where the driver lets them be joined.
//
// A green context reserves nothing: work on other streams runs on every SM, these included. Thread
// and errors: as Partition.
class GreenPartition final : public Partition {
 public:
  GreenPartition(CudaDriver& driver, std::shared_ptr<GreenShares> shares)
      : driver_(driver), shares_(std::move(shares)) {}

  [[nodiscard]] int total_units() const override { return shares_->total_units(); }
  [[nodiscard]] int group_units() const override { return shares_->group_units(); }
  [[nodiscard]] int groups() const override { return shares_->groups(); }
  [[nodiscard]] std::uintptr_t enter(Side side, int groups) override;
  void leave() override {}
  [[nodiscard]] int units(Side side, int groups) override;
  // Several small kernels fill the share and note %smid.
  [[nodiscard]] std::vector<unsigned> measure(Side side, int groups) override;

 private:
  CudaDriver& driver_;
  std::shared_ptr<GreenShares> shares_;
};

}  // namespace windrow
