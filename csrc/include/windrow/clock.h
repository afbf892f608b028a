#pragma once

#include <time.h>

#include <cstdint>

namespace windrow {

// CLOCK_MONOTONIC, the one clock of page, table and events. Any thread; no system call (vDSO).
inline std::int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace windrow
