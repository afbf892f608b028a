// A process that dies, at any instruction or system call, leaves a state that the others continue
// from.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <new>
#include <vector>

#include "filled.h"
#include "served_arena.h"
#include "shared_memory.h"
#include "stepper.h"
#include "windrow/chunk_table.h"
#include "windrow/client.h"
#include "windrow/error.h"
#include "windrow/page.h"

namespace windrow::testing {
namespace {

constexpr std::int64_t kChunks = 4;
constexpr std::int64_t kWorker = 9;
const std::size_t kTableBytes = ChunkTable::bytes(kChunks);

// One transition: how the table comes to where it can be made, and by which call.
struct Case {
  const char* name;
  Side side;
  std::function<void(ChunkTable&)> before;  // by the owner
  std::function<void(ChunkTable&)> call;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

void lend_all(ChunkTable& t) {
  t.lend(kChunks, kWorker);
}
void take_all(ChunkTable& t) {
  while (t.take_kv() >= 0) {
  }
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"TakeFree", Side::kOwner, [](auto&) {}, [](auto& t) { t.take_kv(); }},
      {"TakeReserved", Side::kOwner, [](auto& t) { t.set_reserve(kChunks); },
       [](auto& t) { t.take_kv(); }},
      {"ReturnToReserve", Side::kOwner,
       [](auto& t) {
         take_all(t);
         t.set_reserve(1);
       },
       [](auto& t) { t.return_kv(2); }},
      {"ReturnToFree", Side::kOwner, take_all, [](auto& t) { t.return_kv(2); }},
      {"GrowReserve", Side::kOwner, [](auto&) {}, [](auto& t) { t.set_reserve(2); }},
      {"ShrinkReserve", Side::kOwner, [](auto& t) { t.set_reserve(3); },
       [](auto& t) { t.set_reserve(1); }},
      {"Lend", Side::kOwner, [](auto&) {}, [](auto& t) { t.lend(2, kWorker); }},
      {"Revoke", Side::kOwner, lend_all, [](auto& t) { t.revoke(2); }},
      {"Reclaim", Side::kOwner, lend_all, [](auto& t) { t.reclaim(kWorker); }},
      {"GiveBackLentToFree", Side::kPeer, lend_all, [](auto& t) { t.give_back(1, kWorker); }},
      {"GiveBackLentToReserve", Side::kPeer,
       [](auto& t) {
         lend_all(t);
         t.set_reserve(1);
       },
       [](auto& t) { t.give_back(1, kWorker); }},
      {"GiveBackDrainingToFree", Side::kPeer,
       [](auto& t) {
         lend_all(t);
         t.revoke(kChunks);
       },
       [](auto& t) { t.give_back(1, kWorker); }},
      {"GiveBackDrainingToReserve", Side::kPeer,
       [](auto& t) {
         lend_all(t);
         t.revoke(kChunks);
         t.set_reserve(1);
       },
       [](auto& t) { t.give_back(1, kWorker); }},
  };
  return all;
}

// The peer is dead: decode takes everything back and can use every chunk that it does not use yet.
void expect_decode_goes_on(void* memory) {
  ChunkTable owner(memory, kChunks, Side::kOwner);
  owner.check();
  owner.reclaim(kWorker);
  take_all(owner);
  EXPECT_EQ(owner.counts(), (Counts{0, kChunks, 0, 0, 0}));
}

// Decode is dead: until it unmaps, the worker reads sound words and can hand over what it has.
void expect_worker_ends_cleanly(void* memory) {
  ChunkTable peer(memory, kChunks, Side::kPeer);
  peer.check();
  for (const auto state : {ChunkState::kLent, ChunkState::kDraining}) {
    for (const std::int64_t chunk : peer.held_in(state, kWorker)) {
      peer.give_back(chunk, kWorker);
    }
  }
  const Counts counts = peer.counts();
  EXPECT_EQ(counts[static_cast<std::size_t>(ChunkState::kLent)], 0);
  EXPECT_EQ(counts[static_cast<std::size_t>(ChunkState::kDraining)], 0);
}

class Death : public ::testing::TestWithParam<Case> {
 protected:
  // A fresh table just before the call, and the process that makes it.
  void begin() {
    std::memset(memory_.data(), 0, kTableBytes);
    ChunkTable::format(memory_.data(), kChunks, 0);
    ChunkTable owner(memory_.data(), kChunks, Side::kOwner);
    GetParam().before(owner);
  }
  void call() const {
    ChunkTable table(memory_.data(), kChunks, GetParam().side);
    GetParam().call(table);
  }
  static void expect_survived(Side dead, void* memory) {
    dead == Side::kPeer ? expect_decode_goes_on(memory) : expect_worker_ends_cleanly(memory);
  }

  SharedMemory memory_{kTableBytes};
};

// What the others find after a death between two instructions is what is in the memory there; it
// changes at few of them. Each such moment is died at for real.
TEST_P(Death, AtAnyInstructionOfATransitionIsSurvivedByTheOther) {
  for (int moment = 0;; ++moment) {
    begin();
    std::vector<std::byte> seen(kTableBytes);
    std::memcpy(seen.data(), memory_.data(), kTableBytes);
    Stepper process([this] { call(); });
    if (!process.traced()) {
      GTEST_SKIP() << "this machine lets no process trace its child";
    }
    bool there = true;
    for (int changes = 0; changes < moment && there;) {
      there = process.one_instruction();
      if (std::memcmp(seen.data(), memory_.data(), kTableBytes) != 0) {
        std::memcpy(seen.data(), memory_.data(), kTableBytes);
        ++changes;
      }
    }
    process.kill();
    ASSERT_FALSE(process.failed());
    expect_survived(GetParam().side, memory_.data());
    if (!there) {
      EXPECT_GT(moment, 2);  // the swap and its time at least
      return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(In, Death, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(PageDeath, AtAnyInstructionOfAPublicationLeavesAWholeRecord) {
  SharedMemory memory(sizeof(SharedPage));
  auto& page = *new (memory.data()) SharedPage{};
  page.publish_grant(filled<Grant>(1));
  page.publish_grant(filled<Grant>(2));
  Stepper process([&] { page.publish_grant(filled<Grant>(3)); });
  if (!process.traced()) {
    GTEST_SKIP() << "this machine lets no process trace its child";
  }
  while (process.one_instruction()) {
    const Grant grant = page.read_grant();
    ASSERT_TRUE(is_whole(grant));
    ASSERT_GE(grant.action, 2);
    ASSERT_GE(page.pause_epoch(), grant.pause_epoch);  // a pause is never seen late
  }
  EXPECT_FALSE(process.failed());
  EXPECT_EQ(page.read_grant().action, 3);
}

std::ptrdiff_t open_now() {
  const std::filesystem::directory_iterator listing("/proc/self/fd");
  return std::distance(begin(listing), end(listing));
}

class ArenaDeath : public ServedArena {};

TEST_F(ArenaDeath, OfAPeerAtAnySystemCallOfItsAttachLeavesNothingBehind) {
  const auto owner = serve();
  const std::ptrdiff_t before = open_now();  // nobody has connected, so nothing is about to close
  for (int calls = 0;; ++calls) {
    Stepper peer([this] { static_cast<void>(Arena::attach(host_driver(), path_, soon())); });
    if (!peer.traced()) {
      GTEST_SKIP() << "this machine lets no process trace its child";
    }
    bool there = true;
    for (int i = 0; i < calls && there; ++i) {
      there = peer.one_system_call();
    }
    peer.kill();
    ASSERT_FALSE(peer.failed());
    ASSERT_TRUE(owner->peers().empty());
    // Answered after the server has seen the death; what it kept for the dead one is closed.
    static_cast<void>(ArenaClient(path_, soon()).inspect());
    if (!there) {
      EXPECT_GT(calls, 20);
      break;
    }
  }
  const std::int64_t deadline = soon();
  while (open_now() != before && monotonic_ns() < deadline) {
  }
  EXPECT_EQ(open_now(), before);
  EXPECT_EQ(owner->table().counts(), (Counts{7, 0, 0, 1, 0}));
}

TEST_F(ArenaDeath, OfTheOwnerAtAnySystemCallIsToldToAPeerAndLeavesThePathUsable) {
  for (int calls = 0;; ++calls) {
    Stepper owner([this] { static_cast<void>(serve()); });
    if (!owner.traced()) {
      GTEST_SKIP() << "this machine lets no process trace its child";
    }
    bool there = true;
    for (int i = 0; i < calls && there; ++i) {
      there = owner.one_system_call();
    }
    owner.kill();
    ASSERT_FALSE(owner.failed());
    EXPECT_THROW(static_cast<void>(Arena::attach(host_driver(), path_, monotonic_ns())),
                 AttachError);
    if (!there) {
      EXPECT_GT(calls, 20);
      break;
    }
  }
  EXPECT_NO_THROW(serve()->close());
}

}  // namespace
}  // namespace windrow::testing
