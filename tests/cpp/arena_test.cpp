// An arena on every driver in both layouts: where its blocks are, and that any call of the driver
// may fail at any step without a leak.
#include "windrow/arena.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <tuple>

#include "drivers.h"
#include "windrow/clock.h"
#include "windrow/faulty_driver.h"
#include "windrow/weights.h"

namespace windrow {
namespace {

using testing::get;
using testing::put;
using testing::Standin;

constexpr std::int64_t kFiveSeconds = 5'000'000'000;

std::int64_t soon() {
  return monotonic_ns() + kFiveSeconds;
}

std::size_t descriptors() {
  std::size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) {
    ++count;
  }
  ::closedir(folder);
  return count;
}

class ArenaTest : public ::testing::TestWithParam<std::tuple<std::string, KvLayout>> {
 protected:
  void SetUp() override {
    inner_ = testing::driver_of(std::get<0>(GetParam()));
    if (inner_ == nullptr) {
      GTEST_SKIP() << "no GPU, or no libcuda.so.1";
    }
    std::string name = "/tmp/windrow-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    path_ = folder_ + "/a.sock";
    descriptors_before_ = descriptors();
    held_before_ = Standin::held();
  }
  void TearDown() override {
    if (inner_ == nullptr) {
      return;
    }
    ::rmdir(folder_.c_str());
    EXPECT_EQ(Standin::violations(), "");
    EXPECT_EQ(Standin::held(), held_before_);
    EXPECT_EQ(descriptors(), descriptors_before_);
  }

  [[nodiscard]] Driver& inner() const { return *inner_; }
  [[nodiscard]] Geometry geometry() const {
    return {.layers = 2,
            .kv_heads = 2,
            .head_dim = 32,
            .dtype_bytes = 4,
            .block_bytes = static_cast<std::int64_t>(inner().granularity()),
            .chunks = 3,
            .layout = std::get<1>(GetParam())};
  }

  // Does `work` over a driver whose n-th call fails, for n = 1, 2, ... until no fault is reached.
  // Each time it must throw Error and leave nothing behind.
  void sweep(const std::function<void(FaultyDriver&)>& work) const {
    const long long held = Standin::held();
    std::int64_t n = 1;
    for (;; ++n) {
      FaultyDriver driver(inner());
      driver.plan().fail_any(n);
      bool threw = false;
      try {
        work(driver);
      } catch (const Error& error) {
        threw = true;
        EXPECT_NE(std::string(error.what()).find("injected fault"), std::string::npos)
            << error.what();
      }
      EXPECT_EQ(threw, driver.plan().fired() == 1) << "call " << n;
      EXPECT_EQ(Standin::held(), held) << "call " << n;
      if (!served_) {
        EXPECT_EQ(descriptors(), descriptors_before_) << "call " << n;
      }
      if (driver.plan().fired() == 0) {
        break;
      }
    }
    EXPECT_GT(n, 2);
  }

  std::string folder_;
  std::string path_;
  Driver* inner_ = nullptr;
  // A server's end of a connection closes in its own thread, some time after the peer's: then
  // descriptors are counted once, when the owner is gone.
  bool served_ = false;
  std::size_t descriptors_before_ = 0;
  long long held_before_ = 0;
};

TEST_P(ArenaTest, EveryTokenOfEveryLayerHasAPlaceOfItsOwn) {
  const auto arena = Arena::create(inner(), geometry(), 0);
  const std::int64_t slots = geometry().slots_per_chunk();
  std::vector<bool> taken(
      static_cast<std::size_t>(geometry().arena_bytes() / geometry().entry_bytes()));
  for (std::int64_t layer = 0; layer < 2; ++layer) {
    for (const bool value : {false, true}) {
      const KvView view = arena->kv_view(layer, value);
      for (std::int64_t token = 0; token < slots * geometry().chunks; ++token) {
        const std::int64_t at =
            view.offset + token / slots * view.chunk_stride + token % slots * view.slot_stride;
        ASSERT_EQ(at % view.entry_bytes, 0);
        ASSERT_FALSE(taken.at(static_cast<std::size_t>(at / view.entry_bytes)));
        taken[static_cast<std::size_t>(at / view.entry_bytes)] = true;
      }
    }
  }
  EXPECT_EQ(std::count(taken.begin(), taken.end(), false), 0);
  EXPECT_THROW(static_cast<void>(arena->kv_view(2, false)), std::out_of_range);
  EXPECT_THROW(static_cast<void>(arena->kv_view(-1, false)), std::out_of_range);
}

// Whatever the device: an engine's kernel that strides over other layers misses caches and TLB.
TEST_P(ArenaTest, EnginesSeeEachLayerAsOneRowOfTokens) {
  const auto arena = Arena::create(inner(), geometry(), 0);
  const KvView view = arena->kv_view(1, true);
  EXPECT_EQ(view.chunk_stride, geometry().slots_per_chunk() * view.slot_stride);
}

TEST_P(ArenaTest, AnArenaThatAWorkerCannotMapIsRefusedBeforeItIsMade) {
  Geometry many = geometry();
  many.chunks = 8193;  // of four blocks
  if (inner().maps_parts() && many.layout == KvLayout::kPerLayer) {
    EXPECT_THROW(static_cast<void>(Arena::create(inner(), many, 0)), GeometryError);
    many.chunks = 8192;
    EXPECT_NO_THROW(static_cast<void>(Arena::create(inner(), many, 0)));
  }
}

TEST_P(ArenaTest, APeerSeesEveryBlockWhereItsOwnViewSays) {
  const auto owner = Arena::create(inner(), geometry(), 0);
  owner->serve(path_);
  const auto peer = Arena::attach(inner(), path_, soon());
  EXPECT_EQ(peer->geometry().layout, geometry().layout);
  static_cast<void>(owner->table().lend(geometry().chunks, 7));
  const auto seen = peer->mapping_of(0, geometry().arena_bytes());
  std::uint8_t mark = 1;
  for (std::int64_t chunk = 0; chunk < geometry().chunks; ++chunk) {
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      const KvView mine = owner->kv_view(layer, true);
      const KvView its = peer->kv_view(layer, true);
      put(inner(), owner->mapping()->data() + mine.offset + chunk * mine.chunk_stride,
          std::byte{mark});
      EXPECT_EQ(get(inner(), seen->data() + its.offset + chunk * its.chunk_stride),
                std::byte{mark});
      ++mark;
    }
    // To the worker a chunk is one range.
    EXPECT_EQ(peer->chunk_offset(chunk), chunk * geometry().chunk_bytes());
  }
}

// On the host a worker maps the whole arena at once, however many parts of it that takes.
TEST_P(ArenaTest, OnADeviceAWorkerMapsWhatItIsLentAndNothingElse) {
  const auto owner = Arena::create(inner(), geometry(), 1);
  owner->serve(path_);
  const auto kv = owner->table().take_kv();
  FaultyDriver counted(inner());
  const auto maps = [&] { return counted.plan().calls(DriverCall::kMap); };
  const auto peer = Arena::attach(counted, path_, soon());
  const std::int64_t at_start = maps();
  const auto reach = [&](std::int64_t chunk) {
    return peer->mapping_of(peer->chunk_offset(chunk), geometry().chunk_bytes());
  };
  if (inner().maps_parts()) {
    const bool whole = geometry().layout == KvLayout::kTokenMajor;
    EXPECT_EQ(at_start, 1 + (whole ? 1 : geometry().arena_bytes() / geometry().block_bytes))
        << "the control region and the arena";
    EXPECT_NO_THROW(static_cast<void>(reach(kv)));
    return;
  }
  EXPECT_EQ(at_start, 1) << "the control region";
  const std::int64_t chunk = owner->table().lend(1, 7).at(0);
  const std::int64_t memories = geometry().chunk_bytes() / geometry().moving_bytes();
  static_cast<void>(reach(chunk));
  EXPECT_EQ(maps() - at_start, memories);
  for (const auto not_lent : {kv, geometry().chunks - 1}) {  // the last one is reserved
    EXPECT_THROW(static_cast<void>(reach(not_lent)), OwnershipError);
  }
  EXPECT_THROW(static_cast<void>(peer->mapping_of(0, geometry().arena_bytes())), OwnershipError);
  static_cast<void>(owner->table().revoke(1));
  static_cast<void>(reach(chunk));  // what drains is still the worker's
  peer->table().give_back(chunk, 7);
  EXPECT_THROW(static_cast<void>(reach(chunk)), OwnershipError);
  static_cast<void>(owner->table().lend(1, 8));
  static_cast<void>(reach(chunk));
  EXPECT_EQ(maps() - at_start, memories) << "lent a second time, it was mapped still";
}

TEST_P(ArenaTest, MappingALentChunkSurvivesTheFailureOfAnyCall) {
  const auto owner = Arena::create(inner(), geometry(), 0);
  owner->serve(path_);
  const std::int64_t chunk = owner->table().lend(1, 7).at(0);
  FaultyDriver driver(inner());
  const auto peer = Arena::attach(driver, path_, soon());
  const auto reach = [&] {
    return peer->mapping_of(peer->chunk_offset(chunk), geometry().chunk_bytes());
  };
  const std::int64_t memories = geometry().chunk_bytes() / geometry().moving_bytes();
  for (std::int64_t n = 1; !inner().maps_parts() && n <= memories; ++n) {
    driver.plan().fail(DriverCall::kMap, n);
    EXPECT_THROW(static_cast<void>(reach()), Error);
  }
  put(inner(), owner->mapping()->data() + owner->chunk_offset(chunk), std::byte{9});
  EXPECT_EQ(get(inner(), reach()->data() + peer->chunk_offset(chunk)), std::byte{9});
}

TEST_P(ArenaTest, TheMemoryBehindABlockCanBeMappedASecondTime) {
  const auto arena = Arena::create(inner(), geometry(), 0);
  if (inner().maps_parts() || geometry().layout == KvLayout::kTokenMajor) {
    EXPECT_EQ(arena->blocks()->backing(2, 0).memory, arena->blocks()->backing(2, 3).memory);
    return;
  }
  put(inner(), arena->mapping()->data() + arena->blocks()->block_offset(2, 3), std::byte{8});
  const auto backing = arena->blocks()->backing(2, 3);
  const auto alias = map_whole(inner(), *backing.memory, Access::kReadOnly);
  EXPECT_EQ(backing.offset, 0U);
  EXPECT_EQ(get(inner(), alias->data()), std::byte{8});
}

TEST_P(ArenaTest, CreatingSurvivesTheFailureOfAnyCall) {
  sweep([this](FaultyDriver& driver) {
    const auto arena = Arena::create(driver, geometry(), 1);
    arena->check();
    arena->close();
  });
}

TEST_P(ArenaTest, ServingSurvivesTheFailureOfAnyCallAndMayBeTriedAgain) {
  sweep([this](FaultyDriver& driver) {
    FaultyDriver calm(inner());
    auto arena = Arena::create(driver, geometry(), 1);
    const auto before = arena->table().states();
    try {
      arena->serve(path_);
    } catch (const Error&) {
      EXPECT_EQ(arena->table().states(), before);
      arena->serve(path_);
      EXPECT_EQ(Arena::attach(calm, path_, soon())->table().states(), before);
      throw;
    }
  });
}

TEST_P(ArenaTest, AttachingSurvivesTheFailureOfAnyCallAndTheOwnerIsUntouched) {
  const auto owner = Arena::create(inner(), geometry(), 1);
  owner->serve(path_);
  served_ = true;
  const auto before = owner->table().states();
  sweep([&](FaultyDriver& driver) {
    const auto peer = Arena::attach(driver, path_, soon());
    peer->close();
  });
  EXPECT_EQ(owner->table().states(), before);
  owner->check();
}

TEST_P(ArenaTest, ImportingWeightsSurvivesTheFailureOfAnyCall) {
  const auto owner = Arena::create(inner(), geometry(), 1);
  owner->serve(path_);
  SharedWeights weights(inner(), 5000);
  put(inner(), weights.mapping()->data() + 4999, std::byte{7});
  weights.seal();
  owner->export_named("weights", weights.fd(), 5000);
  std::int64_t n = 1;
  for (bool fired = true; fired; ++n) {
    FaultyDriver driver(inner());
    const auto peer = Arena::attach(driver, path_, soon());
    driver.plan().fail_any(n);
    try {
      const auto mapping = peer->imported("weights");
      EXPECT_EQ(get(inner(), mapping->data() + 4999), std::byte{7});
    } catch (const Error&) {
      driver.plan().clear();
      EXPECT_EQ(peer->imported("weights")->bytes(), 5000U);  // the next try works
    }
    fired = driver.plan().fired() == 1;
    peer->check();
  }
  EXPECT_GT(n, 3);
}

TEST_P(ArenaTest, SealingSurvivesTheFailureOfAnyCall) {
  sweep([](FaultyDriver& driver) {
    SharedWeights weights(driver, 5000);
    weights.seal();
  });
}

TEST_P(ArenaTest, ALostDescriptorIsAnErrorForThePeerAndNoneForTheOwner) {
  FaultyDriver driver(inner());
  driver.plan().lose_export(2);
  auto owner = Arena::create(driver, geometry(), 1);
  EXPECT_THROW(
      {
        owner->serve(path_);
        static_cast<void>(Arena::attach(inner(), path_, soon()));
      },
      Error);
  owner->check();
}

TEST_P(ArenaTest, APeerThatIsKilledAtAnyCallLeavesTheOwnerAsItWas) {
  if (std::get<0>(GetParam()) == "gpu") {
    GTEST_SKIP() << "CUDA cannot be used after a fork";
  }
  const auto owner = Arena::create(inner(), geometry(), 1);
  owner->serve(path_);
  const auto before = owner->table().states();
  for (std::int64_t n = 1; n < 8; ++n) {
    const pid_t child = ::fork();
    if (child == 0) {
      FaultyDriver driver(inner());
      driver.plan().before(DriverCall::kMap, n, [] { ::kill(::getpid(), SIGKILL); });
      static_cast<void>(Arena::attach(driver, path_, soon()));
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(owner->peers().empty());
    EXPECT_EQ(owner->table().states(), before);
    if (WIFEXITED(status)) {
      EXPECT_GT(n, 1);
      return;  // it made fewer calls
    }
  }
}

TEST_P(ArenaTest, AnOwnerOfAnotherDriverIsNamed) {
  const auto owner = Arena::create(inner(), geometry(), 1);
  owner->serve(path_);
  const std::string other = inner().maps_parts() ? "standin" : "host";
  try {
    static_cast<void>(Arena::attach(*testing::driver_of(other), path_, soon()));
    // CUDA's driver brings the host's along for tables, so host arenas are attached with it.
    EXPECT_EQ(inner().name(), "host");
  } catch (const AttachError& error) {
    EXPECT_NE(std::string(error.what()).find("are on the cuda driver"), std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(On, ArenaTest,
                         ::testing::Combine(::testing::ValuesIn(testing::driver_names()),
                                            ::testing::Values(KvLayout::kPerLayer,
                                                              KvLayout::kTokenMajor)),
                         [](const auto& info) {
                           return std::get<0>(info.param) +
                                  (std::get<1>(info.param) == KvLayout::kPerLayer ? "PerLayer"
                                                                                  : "TokenMajor");
                         });

TEST(FaultPlanTest, CountsTheCallsOfEachKindAndFiresOnce) {
  FaultyDriver driver(host_driver());
  driver.plan().fail(DriverCall::kCreate, 2);
  const auto first = driver.create(4096, "test");
  EXPECT_THROW(static_cast<void>(driver.create(4096, "test")), Error);
  EXPECT_NO_THROW(static_cast<void>(driver.create(4096, "test")));
  EXPECT_EQ(driver.plan().calls(DriverCall::kCreate), 3);
  EXPECT_EQ(driver.plan().calls(), 3);
  EXPECT_EQ(driver.plan().fired(), 1);
  EXPECT_THROW(driver.plan().fail_any(0), std::invalid_argument);
}

TEST(FaultPlanTest, AnActionRunsBeforeItsCallWhichThenGoesItsWay) {
  FaultyDriver driver(host_driver());
  int seen = 0;
  driver.plan().before(DriverCall::kReserve, 2, [&] { seen = 1; });
  const auto first = driver.reserve(4096);
  EXPECT_EQ(seen, 0);
  EXPECT_NE(driver.reserve(4096), nullptr);
  EXPECT_EQ(seen, 1);
}

}  // namespace
}  // namespace windrow
