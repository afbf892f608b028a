#pragma once

#include <atomic>
#include <cstdint>
#include <random>
#include <stdexcept>

#include "windrow/chunk_table.h"
#include "windrow/error.h"

namespace windrow::testing {

// Who uses each chunk's memory now, as a real user would leave its mark by writing into it: a chunk
// that is given to two at once shows as a mark that is not one's own. 0: nobody.
using Marks = std::atomic<std::uint64_t>*;
inline constexpr std::uint64_t kDecodeMark = ~0ULL;

inline void expect_mark(std::uint64_t found, std::uint64_t expected) {
  if (found != expected) {
    throw std::runtime_error("a chunk was in two hands: mark " + std::to_string(found) +
                             " instead of " + std::to_string(expected));
  }
}

// A worker that uses what it holds and gives back at random, at once what is being revoked.
class Borrower {
 public:
  Borrower(ChunkTable table, Marks marks, std::int64_t epoch)
      : table_(table), marks_(marks), epoch_(epoch), random_(static_cast<unsigned>(epoch)) {}

  void step() {
    for (const auto chunk : table_.held_in(ChunkState::kLent, epoch_)) {
      use(chunk);
      if (random_() % 4 == 0) {
        give_back(chunk);
      }
    }
    for (const auto chunk : table_.held_in(ChunkState::kDraining, epoch_)) {
      use(chunk);
      give_back(chunk);
    }
  }

 private:
  void use(std::int64_t chunk) {
    const auto mine = static_cast<std::uint64_t>(epoch_);
    const std::uint64_t found = marks_[chunk].exchange(mine);
    expect_mark(found == 0 ? mine : found, mine);
  }
  void give_back(std::int64_t chunk) {
    expect_mark(marks_[chunk].exchange(0), static_cast<std::uint64_t>(epoch_));
    table_.give_back(chunk, epoch_);
  }

  ChunkTable table_;
  Marks marks_;
  std::int64_t epoch_;
  std::minstd_rand random_;
};

// Decode: random calls of every kind. Knows what it holds as KV.
class Owner {
 public:
  Owner(ChunkTable table, Marks marks) : table_(table), marks_(marks) {}

  void step(std::int64_t borrower) {
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2:
        take();
        break;
      case 3:
      case 4:
        give_up_one();
        break;
      case 5:
        table_.lend(static_cast<std::int64_t>(random_() % 5), borrower);
        break;
      case 6:
        table_.revoke(static_cast<std::int64_t>(random_() % 5));
        break;
      default:
        table_.set_reserve(static_cast<std::int64_t>(random_() % 4));
        table_.check();
    }
  }

  // The borrower must be dead: only then does nobody write through the marks.
  void bury(std::int64_t borrower) {
    for (const auto state : {ChunkState::kLent, ChunkState::kDraining}) {
      for (const auto chunk : table_.held_in(state, borrower)) {
        marks_[chunk].store(0);
      }
    }
    table_.reclaim(borrower);
  }

  [[nodiscard]] const std::vector<std::int64_t>& kv() const { return kv_; }
  [[nodiscard]] ChunkTable& table() { return table_; }
  [[nodiscard]] unsigned random() { return static_cast<unsigned>(random_()); }

 private:
  void take() {
    const std::int64_t chunk = table_.take_kv();
    if (chunk >= 0) {
      expect_mark(marks_[chunk].exchange(kDecodeMark), 0);
      kv_.push_back(chunk);
    }
  }
  void give_up_one() {
    if (kv_.empty()) {
      return;
    }
    const std::size_t index = random_() % kv_.size();
    const std::int64_t chunk = kv_[index];
    kv_[index] = kv_.back();
    kv_.pop_back();
    expect_mark(marks_[chunk].exchange(0), kDecodeMark);
    table_.return_kv(chunk);
  }

  ChunkTable table_;
  Marks marks_;
  std::vector<std::int64_t> kv_;
  std::minstd_rand random_{17};
};

}  // namespace windrow::testing
