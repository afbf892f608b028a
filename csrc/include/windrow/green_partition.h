#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "windrow/cuda_driver.h"
#include "windrow/partition.h"

namespace windrow {

// Of how many SMs the smallest share consists; nothing where the GPU has no shares.
[[nodiscard]] std::optional<unsigned> smallest_share(const CudaContext& context);

// The SMs of one GPU, shared between decode and a finetune worker by green contexts.
//
// Both processes make the same split into groups of the device's smallest size; that the driver
// gave both the same groups is not documented, and `measure` finds out. SMs that fill no group go
// to decode, where the driver lets them be joined.
//
// A share's context and stream are made when it is first entered and kept. A green context reserves
// nothing: work on other streams runs on every SM, these included. With all groups the stream is a
// plain one. Thread and errors: as Partition.
class GreenPartition final : public Partition {
 public:
  // Throws DriverUnavailable where the driver lacks green contexts or the GPU is one group.
  explicit GreenPartition(CudaDriver& driver);
  GreenPartition(const GreenPartition&) = delete;
  GreenPartition& operator=(const GreenPartition&) = delete;
  ~GreenPartition() override;

  [[nodiscard]] int total_units() const override { return total_units_; }
  [[nodiscard]] int group_units() const override { return group_units_; }
  [[nodiscard]] int groups() const override { return static_cast<int>(groups_.size()); }
  [[nodiscard]] std::uintptr_t enter(Side side, int groups) override;
  void leave() override {}
  [[nodiscard]] int units(Side side, int groups) override;
  // Several small kernels fill the share and note %smid.
  [[nodiscard]] std::vector<unsigned> measure(Side side, int groups) override;

 private:
  // A green context and its stream; none for the whole device.
  class Share;
  Share& share(Side side, int groups);
  void split();
  [[nodiscard]] std::vector<cuda::DeviceResource> resources(Side side, int groups) const;

  CudaDriver& driver_;
  std::shared_ptr<const CudaContext> context_;
  const cuda::GreenCalls& green_;
  int total_units_ = 0;
  int group_units_ = 0;
  std::vector<cuda::DeviceResource> groups_;
  std::optional<cuda::DeviceResource> rest_;  // what fills no group and may join one
  std::map<std::pair<Side, int>, std::unique_ptr<Share>> shares_;
};

}  // namespace windrow
