#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "windrow/cuda_driver.h"

namespace windrow {

// The SMs of one GPU, shared between decode and a finetune worker by green contexts.
//
// Both processes make the same split into groups of the device's smallest size. Decode's shares
// begin at the first group, the worker's end at the last, so that shares which add up to no more
// than all groups are disjoint; that the driver gave both the same groups is not documented, and
// `measure` finds out. SMs that fill no group go to decode, where the driver lets them be joined.
//
// A share's context and stream are made when it is first asked for and kept: their streams stay
// valid as long as this object. A green context reserves nothing: work on other streams runs on
// every SM, these included. Thread: one at a time.
class GreenPartition {
 public:
  enum class Side { kDecode, kFinetune };

  // Throws DriverUnavailable where the driver lacks green contexts or the GPU is one group.
  // The driver outlives it.
  explicit GreenPartition(CudaDriver& driver);
  GreenPartition(const GreenPartition&) = delete;
  GreenPartition& operator=(const GreenPartition&) = delete;
  ~GreenPartition();

  // SMs of the device; those of one group.
  [[nodiscard]] int total_units() const { return total_units_; }
  [[nodiscard]] int group_units() const { return group_units_; }
  [[nodiscard]] int groups() const { return static_cast<int>(groups_.size()); }

  // A stream (CUstream as a number) that runs on so many groups of that side; with all groups it is
  // a plain one, on every SM. Throws std::invalid_argument where there are not so many.
  [[nodiscard]] std::uintptr_t stream(Side side, int groups);
  // SMs that the driver says a share has.
  [[nodiscard]] int units(Side side, int groups);
  // SMs on which kernels of that share ran, ascending: several small kernels fill it and note
  // %smid. Waits until they are done.
  [[nodiscard]] std::vector<unsigned> measure(Side side, int groups);

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
