#include "windrow/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "windrow/error.h"

namespace windrow {
namespace {

const void* low_half(const SharedWord<std::uint64_t>& word) {
  return &word;
}

}  // namespace

Woken futex_wait(const SharedWord<std::uint64_t>& word, std::uint64_t seen,
                 std::int64_t deadline_ns) {
  const timespec deadline{.tv_sec = static_cast<time_t>(deadline_ns / 1'000'000'000),
                          .tv_nsec = static_cast<long>(deadline_ns % 1'000'000'000)};
  // The BITSET form takes an absolute deadline on CLOCK_MONOTONIC: a restarted wait does not drift.
  const long rc =
      ::syscall(SYS_futex, low_half(word), FUTEX_WAIT_BITSET, static_cast<std::uint32_t>(seen),
                &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
  if (rc == 0 || errno == EAGAIN) {
    return Woken::kChangedOrWoken;
  }
  if (errno == ETIMEDOUT) {
    return Woken::kTimedOut;
  }
  if (errno == EINTR) {
    return Woken::kInterrupted;
  }
  throw errno_error("waiting on the shared page");
}

void futex_wake_all(const SharedWord<std::uint64_t>& word) {
  ::syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace windrow
