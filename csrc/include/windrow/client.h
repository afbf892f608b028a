#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "windrow/fd.h"
#include "windrow/geometry.h"

namespace windrow {

// The peer's end of an arena's socket; the other one is ArenaServer. Open as long as it lives: by
// that the owner knows who is there, and the peer that its owner lives. One thread at a time. All
// that ask throw AttachError when the owner refuses, hangs up or does not answer in five seconds,
// and Error when this process has no descriptors left.
class ArenaClient {
 public:
  struct Shared {
    Geometry geometry;
    OwnedFd control;
    std::vector<OwnedFd> blocks;
  };
  struct Named {
    OwnedFd fd;
    std::size_t bytes;
  };

  // Tries again until the deadline (CLOCK_MONOTONIC) while no server listens there.
  ArenaClient(const std::string& socket_path, std::int64_t deadline_ns);

  // All descriptors of the arena; this process is its peer from now on.
  [[nodiscard]] Shared attach();
  // One that the owner exported.
  [[nodiscard]] Named named(const std::string& name);
  // The control region, read-only, and no blocks: for those who only look.
  [[nodiscard]] Shared inspect();

  // Who serves. Its id as this process sees it: 0 from within another pid namespace.
  [[nodiscard]] pid_t owner() const;
  // False once the process that serves has died or closed its arena. No system call but poll.
  [[nodiscard]] bool owner_lives() const;

 private:
  OwnedFd socket_;
};

}  // namespace windrow
