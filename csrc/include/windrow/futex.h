#pragma once

#include <bit>
#include <cstdint>

#include "windrow/shared_word.h"

namespace windrow {

// The kernel compares 32 bits; a sequence has 64 and never wraps. Its low half is the futex word.
static_assert(std::endian::native == std::endian::little);

enum class Woken { kChangedOrWoken, kTimedOut, kInterrupted };

// Sleeps until `word` is no longer `seen`, someone wakes it, or CLOCK_MONOTONIC passes
// `deadline_ns`. Works across processes that share the memory. Any thread. A signal ends the sleep
// with kInterrupted, so that the caller can run its handlers. May wake for nothing.
Woken futex_wait(const SharedWord<std::uint64_t>& word, std::uint64_t seen,
                 std::int64_t deadline_ns);

// Wakes all sleepers on `word`, in every process.
void futex_wake_all(const SharedWord<std::uint64_t>& word);

}  // namespace windrow
