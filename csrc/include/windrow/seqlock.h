#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "windrow/futex.h"
#include "windrow/shared_word.h"

namespace windrow {

inline constexpr std::size_t kCacheLine = 64;

// One record that one writer publishes whole to any number of readers, in any process.
//
// Two copies and a sequence: the writer fills the copy that the sequence does not point to and then
// moves the sequence. So a writer that is killed in the middle of a publication leaves the record
// before it readable for ever (with a single copy every reader would spin on an odd sequence), and
// its successor simply publishes over the half-written copy.
//
// Thread: one writer at a time (its owner sees to that); any readers. Nothing blocks but wait().
// Order: words are stored with release and loaded with acquire instead of behind fences. That is
// free on x86, one instruction on Arm, and lets ThreadSanitizer follow it, which fences do not:
//   - a reader that sees any word of publication n + 2 (the next one into its copy) must, in its
//     second look at the sequence, see n + 1 or later, and retries;
//   - a reader that sees sequence n sees all words of publication n.
//
// Memory that is all zero is an empty lock: sequence 0, record of zeros.
template <class Record>
class Seqlock {
  static_assert(std::is_trivially_copyable_v<Record>);
  static_assert(sizeof(Record) % sizeof(std::int64_t) == 0);

 public:
  static constexpr std::size_t kWords = sizeof(Record) / sizeof(std::int64_t);

  // Returns the sequence of this publication.
  std::uint64_t publish(const Record& record) {
    static_assert(offsetof(Seqlock, sequence_) == 0 && offsetof(Seqlock, awaited_) == kCacheLine &&
                  offsetof(Seqlock, copies_) == 2 * kCacheLine);
    const std::uint64_t next = sequence_.load(std::memory_order_relaxed) + 1;
    const auto words = std::bit_cast<std::array<std::int64_t, kWords>>(record);
    auto& copy = copies_[next % 2];
    for (std::size_t i = 0; i < kWords; ++i) {
      copy[i].store(words[i], std::memory_order_release);
    }
    // Sequentially consistent, as is the load of `awaited_`: either the waiter sees this sequence
    // before it sleeps, or we see that it wants to be woken. (Dekker's handshake.)
    sequence_.store(next, std::memory_order_seq_cst);
    if (awaited_.load(std::memory_order_seq_cst) >= next) {
      futex_wake_all(sequence_);
    }
    return next;
  }

  [[nodiscard]] Record read() const {
    std::array<std::int64_t, kWords> words;
    for (;;) {
      const std::uint64_t before = sequence_.load(std::memory_order_acquire);
      const auto& copy = copies_[before % 2];
      for (std::size_t i = 0; i < kWords; ++i) {
        words[i] = copy[i].load(std::memory_order_acquire);
      }
      if (sequence_.load(std::memory_order_relaxed) == before) {
        return std::bit_cast<Record>(words);
      }
    }
  }

  [[nodiscard]] std::uint64_t sequence() const { return sequence_.load(std::memory_order_acquire); }

  // Sleeps until the sequence differs from `seen`, the deadline passes or a signal comes.
  // `awaited_` names the publication that a sleeper waits for and only grows, so that publishing
  // costs no system call when no thread sleeps, and a sleeper that was killed costs one at most.
  Woken wait(std::uint64_t seen, std::int64_t deadline_ns) {
    if (sequence() != seen) {
      return Woken::kChangedOrWoken;
    }
    std::uint64_t awaited = awaited_.load(std::memory_order_relaxed);
    while (awaited < seen + 1 &&
           !awaited_.compare_exchange(awaited, seen + 1, std::memory_order_seq_cst)) {
    }
    if (sequence_.load(std::memory_order_seq_cst) != seen) {
      return Woken::kChangedOrWoken;
    }
    return futex_wait(sequence_, seen, deadline_ns);
  }

 private:
  alignas(kCacheLine) SharedWord<std::uint64_t> sequence_;
  alignas(kCacheLine) SharedWord<std::uint64_t> awaited_;  // written by readers: a line of its own
  alignas(kCacheLine) std::array<std::array<SharedWord<std::int64_t>, kWords>, 2> copies_;
};

}  // namespace windrow
