#pragma once

#include <cstdint>
#include <vector>

namespace windrow {

// One process's hold on the compute units of a device (cores on the host, SMs on a GPU), in groups
// of one size. Decode and worker each make their own over the same units (Driver::partition), and
// each confines itself only: that their shares do not meet is their callers' decision.
//
// Its end moves nothing; what enter() returned is valid until then. The driver outlives it.
// Thread: one at a time. Errors: Error, and std::invalid_argument for a share that the device does
// not have; a call that throws has changed nothing.
class Partition {
 public:
  // Whose share: decode's begins at the first group, the worker's ends at the last. Shares that add
  // up to no more than all groups do not meet.
  enum class Side { kDecode, kFinetune };

  virtual ~Partition() = default;
  // Units of the device; those of one group.
  [[nodiscard]] virtual int total_units() const = 0;
  [[nodiscard]] virtual int group_units() const = 0;
  [[nodiscard]] virtual int groups() const = 0;

  // Makes a share ready and returns what its work is launched on. CUDA: a CUstream as a number; the
  // same one each time. Host: 0; all of this process's threads are on those cores now, and those
  // that start later will be. With all groups it is the whole device.
  [[nodiscard]] virtual std::uintptr_t enter(Side side, int groups) = 0;
  // This process may use every unit again, its background too. CUDA: nothing to do, for a stream
  // holds no thread.
  virtual void leave() = 0;

  // Units that a share has.
  [[nodiscard]] virtual int units(Side side, int groups) = 0;
  // Units on which work of that share really runs, ascending: probes note where they are. Enters
  // nothing; waits for the probes.
  [[nodiscard]] virtual std::vector<unsigned> measure(Side side, int groups) = 0;

  // Threads of this process by the kernel's ids. Nothing where shares hold no threads (CUDA).
  // Never moves that thread from now on.
  virtual void exclude(int /*thread*/) {}
  // Keeps that thread on the last unit, out of decode's way, from now on and until leave().
  virtual void keep_in_background(int /*thread*/) {}
};

// Throws std::invalid_argument unless the partition has a share of so many groups.
void require_share(const Partition& partition, int groups);

}  // namespace windrow
