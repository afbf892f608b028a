#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "windrow/chunk_table.h"

namespace windrow::testing {

// Who uses each chunk's memory now, written into it as a real user would leave its mark: a chunk
// that is given to two at once shows as a mark that is not one's own. 0: nobody.
class Marks {
 public:
  Marks(void* memory, std::size_t stride)
      : memory_(static_cast<std::byte*>(memory)), stride_(stride) {}
  [[nodiscard]] std::atomic<std::uint64_t>& operator[](std::int64_t chunk) const {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(
        memory_ + static_cast<std::size_t>(chunk) * stride_);
  }

 private:
  std::byte* memory_;
  std::size_t stride_;
};

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

  // How many chunks it gave back.
  int step() {
    int given = 0;
    for (const auto chunk : table_.held_in(ChunkState::kLent, epoch_)) {
      use(chunk);
      if (random_() % 4 == 0) {
        give_back(chunk);
        ++given;
      }
    }
    for (const auto chunk : table_.held_in(ChunkState::kDraining, epoch_)) {
      use(chunk);
      give_back(chunk);
      ++given;
    }
    return given;
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
  Owner(ChunkTable table, Marks marks, unsigned seed)
      : table_(table),
        marks_(marks),
        epochs_(static_cast<std::size_t>(table.chunks())),
        random_(seed) {}

  // Lends to that borrower.
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

  // Throws with the first invariant that does not hold, borrowers at work or not.
  void check() {
    table_.check();
    std::size_t kv = 0;
    for (std::int64_t i = 0; i < table_.chunks(); ++i) {
      const ChunkWord word = table_.chunk(i).word;
      kv += word.state == ChunkState::kKv ? 1 : 0;
      check_mark(i, word);
      auto& epoch = epochs_[static_cast<std::size_t>(i)];
      if (static_cast<std::int32_t>(word.epoch - epoch) < 0) {
        throw std::runtime_error("the epoch of chunk " + std::to_string(i) + " went back");
      }
      epoch = word.epoch;
    }
    if (kv != kv_.size()) {
      throw std::runtime_error(std::to_string(kv) + " chunks are KV; decode took " +
                               std::to_string(kv_.size()));
    }
  }

  // With every borrower buried, all chunks are home once decode has returned its own.
  void check_all_come_home() {
    while (!kv_.empty()) {
      give_up_one();
    }
    check();
    const Counts counts = table_.counts();
    const auto home = counts[static_cast<std::size_t>(ChunkState::kFree)] +
                      counts[static_cast<std::size_t>(ChunkState::kReserved)];
    if (home != table_.chunks()) {
      throw std::runtime_error(std::to_string(table_.chunks() - home) + " chunks were lost");
    }
  }

 private:
  // Nobody but decode takes a chunk away from where it is home, so what is free has no mark.
  void check_mark(std::int64_t chunk, const ChunkWord& word) const {
    const std::uint64_t mark = marks_[chunk].load();
    switch (word.state) {
      case ChunkState::kKv:
        expect_mark(mark, kDecodeMark);
        break;
      case ChunkState::kLent:
      case ChunkState::kDraining:
        expect_mark(mark == 0 ? word.owner : mark, word.owner);
        break;
      default:
        expect_mark(mark, 0);
    }
  }
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
  std::vector<std::uint32_t> epochs_;  // as check() last saw them
  std::vector<std::int64_t> kv_;
  std::minstd_rand random_;
};

}  // namespace windrow::testing
