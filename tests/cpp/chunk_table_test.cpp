#include "windrow/chunk_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>

#include "shared_memory.h"
#include "windrow/error.h"

namespace windrow {
namespace {

using testing::SharedMemory;
using Ids = std::vector<std::int64_t>;

class ChunkTableTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kChunks = 8;
  static constexpr std::int64_t kReserve = 2;

  ChunkTableTest() { ChunkTable::format(memory_.data(), kChunks, kReserve); }

  [[nodiscard]] ChunkState state(std::int64_t chunk) const {
    return owner_.chunk(chunk).word.state;
  }

  SharedMemory memory_{ChunkTable::bytes(kChunks)};
  ChunkTable owner_{memory_.data(), kChunks, Side::kOwner};
  ChunkTable peer_{memory_.data(), kChunks, Side::kPeer};
};

TEST_F(ChunkTableTest, AWordSurvivesPackingAtItsExtremes) {
  const ChunkWord word{.state = ChunkState::kDraining,
                       .owner = static_cast<std::uint32_t>(kMostOwner),
                       .epoch = 0xFFFFFFFF};
  EXPECT_EQ(ChunkWord::unpack(word.pack()), word);
}

TEST_F(ChunkTableTest, TheReserveLiesAtTheHighestIds) {
  EXPECT_EQ(owner_.states(), (std::vector<std::uint8_t>{0, 0, 0, 0, 0, 0, 3, 3}));
}

TEST_F(ChunkTableTest, TakesTheLowestFreeThenTheReserveThenNothing) {
  for (std::int64_t expected = 0; expected < kChunks; ++expected) {
    EXPECT_EQ(owner_.take_kv(), expected);
  }
  EXPECT_EQ(owner_.take_kv(), -1);
}

TEST_F(ChunkTableTest, PrefersALowChunkThatThePeerGaveBackToAHigherFreeOne) {
  owner_.set_reserve(0);
  owner_.lend(kChunks, 5);
  peer_.give_back(5, 5);
  EXPECT_EQ(owner_.take_kv(), 5);
  peer_.give_back(7, 5);
  peer_.give_back(1, 5);
  EXPECT_EQ(owner_.take_kv(), 1);
  EXPECT_EQ(owner_.take_kv(), 7);
}

TEST_F(ChunkTableTest, LendsFromTheHighestFreeIdAndNeverTheReserve) {
  EXPECT_EQ(owner_.lend(3, 9), (Ids{5, 4, 3}));
  EXPECT_EQ(owner_.lend(100, 9), (Ids{2, 1, 0}));
  EXPECT_EQ(owner_.counts(), (Counts{0, 0, 6, 2, 0}));
}

TEST_F(ChunkTableTest, FillsAShortReserveBeforeItLends) {
  owner_.lend(6, 9);
  ASSERT_EQ(owner_.take_kv(), 6);  // one of the reserve
  owner_.return_kv(6);
  ASSERT_EQ(state(6), ChunkState::kReserved);
  peer_.give_back(0, 9);
  owner_.set_reserve(3);
  EXPECT_TRUE(owner_.lend(1, 9).empty());
  EXPECT_EQ(state(0), ChunkState::kReserved);
}

TEST_F(ChunkTableTest, ReturnsToTheReserveWhileItIsShort) {
  for (int i = 0; i < 7; ++i) {
    owner_.take_kv();
  }
  owner_.return_kv(0);
  EXPECT_EQ(state(0), ChunkState::kReserved);
  owner_.return_kv(1);
  EXPECT_EQ(state(1), ChunkState::kFree);
}

TEST_F(ChunkTableTest, ASmallerReserveFreesTheSurplus) {
  EXPECT_EQ(owner_.set_reserve(0), 0);
  EXPECT_EQ(owner_.counts(), (Counts{8, 0, 0, 0, 0}));
}

TEST_F(ChunkTableTest, RevokesTheLowestIdsFirstAndThePeerSeesThem) {
  owner_.lend(4, 9);
  EXPECT_EQ(owner_.revoke(2), (Ids{2, 3}));
  EXPECT_EQ(peer_.held_in(ChunkState::kDraining, 9), (Ids{2, 3}));
  EXPECT_EQ(peer_.held_in(ChunkState::kLent, 9), (Ids{4, 5}));
  peer_.give_back(2, 9);
  EXPECT_EQ(state(2), ChunkState::kFree);
}

TEST_F(ChunkTableTest, ReclaimTakesOnlyTheChunksOfThatBorrower) {
  owner_.lend(2, 7);
  owner_.lend(2, 8);
  owner_.revoke(1);
  EXPECT_EQ(owner_.reclaim(7), 2);
  EXPECT_EQ(owner_.counts(), (Counts{4, 0, 1, 2, 1}));
  EXPECT_EQ(
      peer_.held_in(ChunkState::kDraining, 8).size() + peer_.held_in(ChunkState::kLent, 8).size(),
      2U);
}

TEST_F(ChunkTableTest, WrongTransitionsThrowAndChangeNothing) {
  const std::int64_t kv = owner_.take_kv();
  owner_.lend(1, 9);
  const auto before = owner_.states();
  EXPECT_THROW(owner_.return_kv(1), OwnershipError);     // FREE
  EXPECT_THROW(owner_.return_kv(5), OwnershipError);     // LENT
  EXPECT_THROW(peer_.give_back(kv, 9), OwnershipError);  // KV
  EXPECT_THROW(peer_.give_back(5, 8), OwnershipError);   // another borrower's
  EXPECT_THROW(peer_.give_back(6, 9), OwnershipError);   // RESERVED
  EXPECT_THROW(static_cast<void>(owner_.chunk(8)), std::out_of_range);
  EXPECT_THROW(owner_.lend(1, 0), std::invalid_argument);
  EXPECT_THROW(owner_.lend(1, kMostOwner + 1), std::invalid_argument);
  EXPECT_THROW(owner_.lend(-1, 9), std::invalid_argument);
  EXPECT_THROW(owner_.set_reserve(kChunks + 1), std::invalid_argument);
  EXPECT_EQ(owner_.states(), before);
}

TEST_F(ChunkTableTest, ThePeerCannotMakeTheOwnersCalls) {
  EXPECT_THROW(peer_.take_kv(), OwnershipError);
  EXPECT_THROW(peer_.return_kv(0), OwnershipError);
  EXPECT_THROW(peer_.set_reserve(1), OwnershipError);
  EXPECT_THROW(peer_.lend(1, 9), OwnershipError);
  EXPECT_THROW(peer_.revoke(1), OwnershipError);
  EXPECT_THROW(peer_.reclaim(9), OwnershipError);
  EXPECT_EQ(owner_.counts(), (Counts{6, 0, 0, 2, 0}));
}

TEST_F(ChunkTableTest, EveryTransitionGrowsTheEpochAndTheTime) {
  const ChunkInfo before = owner_.chunk(0);
  owner_.take_kv();
  owner_.return_kv(0);
  const ChunkInfo after = owner_.chunk(0);
  EXPECT_EQ(after.word.epoch, before.word.epoch + 2);
  EXPECT_GE(after.since_ns, before.since_ns);
}

TEST_F(ChunkTableTest, CheckNamesABrokenWord) {
  owner_.check();
  auto* words = reinterpret_cast<std::uint64_t*>(memory_.as<std::byte>() + 2 * kCacheLine);
  const std::uint64_t sound = words[3];
  words[3] = ChunkWord{.state = ChunkState::kLent, .owner = 0, .epoch = 1}.pack();
  EXPECT_THROW(owner_.check(), Error);
  words[3] = 0xF;
  EXPECT_THROW(owner_.check(), Error);
  words[3] = sound;
  owner_.check();
}

// A word of each state, and a table of one chunk that holds it.
class EveryMove : public ::testing::TestWithParam<Side> {
 protected:
  static constexpr std::array<ChunkState, kChunkStates> kAll = {
      ChunkState::kFree, ChunkState::kKv, ChunkState::kLent, ChunkState::kReserved,
      ChunkState::kDraining};

  static ChunkWord word_in(ChunkState state) {
    const bool borrowed = state == ChunkState::kLent || state == ChunkState::kDraining;
    return {.state = state, .owner = borrowed ? 5U : 0U, .epoch = 41};
  }
  void put(const ChunkWord& word) { words()[0] = word.pack(); }
  [[nodiscard]] std::uint64_t* words() const {
    return reinterpret_cast<std::uint64_t*>(memory_.as<std::byte>() + 2 * kCacheLine);
  }

  SharedMemory memory_{ChunkTable::bytes(1)};
  ChunkTable table_{memory_.data(), 1, GetParam()};
};

TEST_P(EveryMove, IsMadeWhenTheWrittenTableHasItAndIsAnErrorThatChangesNothingWhenNot) {
  for (const ChunkState from : kAll) {
    for (const ChunkState to : kAll) {
      const ChunkWord before = word_in(from);
      put(before);
      const bool written =
          std::any_of(kTransitions.begin(), kTransitions.end(), [&](const Transition& t) {
            return t.from == from && t.to == to && (t.by_peer || GetParam() == Side::kOwner);
          });
      if (written) {
        EXPECT_TRUE(table_.move(0, before, to, 5));
        EXPECT_EQ(table_.chunk(0).word.state, to);
        EXPECT_EQ(table_.chunk(0).word.epoch, before.epoch + 1);
        EXPECT_NO_THROW(table_.check());
      } else {
        EXPECT_THROW(table_.move(0, before, to, 5), OwnershipError) << name_of(from) << name_of(to);
        EXPECT_EQ(words()[0], before.pack());
      }
    }
  }
}

TEST_P(EveryMove, IsRefusedOnceTheWordIsAnother) {
  const ChunkWord seen = word_in(ChunkState::kLent);
  ChunkWord now = seen;
  now.epoch += 2;  // it went and came back
  put(now);
  EXPECT_FALSE(table_.move(0, seen, ChunkState::kFree));
  EXPECT_EQ(words()[0], now.pack());
}

INSTANTIATE_TEST_SUITE_P(BySide, EveryMove, ::testing::Values(Side::kOwner, Side::kPeer),
                         [](const auto& side) {
                           return side.param == Side::kOwner ? "Owner" : "Peer";
                         });

// A worker has the table mapped writable; whatever it leaves there, decode gets an answer.
TEST_F(ChunkTableTest, GarbageNeverCrashesHangsOrNamesAChunkThatIsNone) {
  std::mt19937_64 random(7);
  auto* words = memory_.as<std::uint64_t>();
  const auto named = [&](std::int64_t chunk) { return chunk >= -1 && chunk < kChunks; };
  for (int round = 0; round < 20'000; ++round) {
    words[random() % (ChunkTable::bytes(kChunks) / sizeof(std::uint64_t))] = random();
    EXPECT_TRUE(named(owner_.take_kv()));
    for (const auto& ids : {owner_.lend(3, 9), owner_.revoke(2)}) {
      EXPECT_TRUE(std::all_of(ids.begin(), ids.end(), named));
    }
    EXPECT_LE(owner_.reclaim(9), kChunks);
    EXPECT_LE(owner_.set_reserve(static_cast<std::int64_t>(random() % kChunks)), kChunks);
    static_cast<void>(owner_.counts());
    try {
      owner_.check();
    } catch (const Error&) {
      continue;
    }
  }
}

TEST_F(ChunkTableTest, TakesAChunkWhoseGiverDiedBeforeItCounted) {
  owner_.set_reserve(0);
  owner_.lend(kChunks, 5);
  ASSERT_EQ(owner_.take_kv(), -1);
  auto* words = reinterpret_cast<std::uint64_t*>(memory_.as<std::byte>() + 2 * kCacheLine);
  words[6] = ChunkWord{.state = ChunkState::kFree, .owner = 0, .epoch = 9}.pack();
  EXPECT_EQ(owner_.take_kv(), 6);
}

}  // namespace
}  // namespace windrow
