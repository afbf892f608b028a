// Contract of every driver: the host's, CUDA's over the stand-in for libcuda, and CUDA's on a GPU
// where there is one.
#include "windrow/driver.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include "drivers.h"
#include "windrow/error.h"
#include "windrow/geometry.h"
#include "windrow/weights.h"

namespace windrow {
namespace {

using testing::get;
using testing::put;
using testing::Standin;

class DriverContract : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    driver_ = testing::driver_of(GetParam());
    if (driver_ == nullptr) {
      GTEST_SKIP() << "no GPU, or no libcuda.so.1";
    }
    held_before_ = Standin::held();
  }
  void TearDown() override {
    EXPECT_EQ(Standin::violations(), "");
    EXPECT_EQ(Standin::held(), held_before_);
  }

  [[nodiscard]] Driver& driver() const { return *driver_; }
  [[nodiscard]] std::size_t page() const { return driver().granularity(); }

 private:
  Driver* driver_ = nullptr;
  long long held_before_ = 0;
};

TEST_P(DriverContract, MemoryIsZeroedAndSeenThroughEveryMapping) {
  const auto memory = driver().create(2 * page(), "test");
  const auto first = map_whole(driver(), *memory, Access::kReadWrite);
  const auto second = map_whole(driver(), *memory, Access::kReadOnly);
  EXPECT_EQ(get(driver(), first->data()), std::byte{0});
  EXPECT_EQ(get(driver(), first->data() + 2 * page() - 1), std::byte{0});
  put(driver(), first->data() + 5, std::byte{9});
  EXPECT_EQ(get(driver(), second->data() + 5), std::byte{9});
}

TEST_P(DriverContract, MemoriesAreMappedSideBySideAndUnmappedOneByOne) {
  const auto left = driver().create(page(), "test");
  const auto right = driver().create(page(), "test");
  const auto range = driver().reserve(3 * page());
  range->map(0, *left, 0, page(), Access::kReadWrite);
  range->map(page(), *right, 0, page(), Access::kReadWrite);
  put(driver(), range->data() + page(), std::byte{3});
  range->unmap(page(), page());
  EXPECT_EQ(get(driver(), map_whole(driver(), *right, Access::kReadOnly)->data()), std::byte{3});
  if (range->space().processors) {
    EXPECT_DEATH(range->data()[page()] = std::byte{1}, "");
  }
  range->map(page(), *right, 0, page(), Access::kReadWrite);
  EXPECT_EQ(get(driver(), range->data() + page()), std::byte{3});
}

TEST_P(DriverContract, APartOfAMemoryIsMappedWhereTheDriverSaysSo) {
  const auto memory = driver().create(2 * page(), "test");
  const auto range = driver().reserve(4 * page());
  const auto map_part = [&] { range->map(page(), *memory, page(), page(), Access::kReadWrite); };
  if (!driver().maps_parts()) {
    EXPECT_THROW(map_part(), Error);
    return;
  }
  map_part();
  put(driver(), range->data() + page(), std::byte{3});
  const auto whole = map_whole(driver(), *memory, Access::kReadOnly);
  EXPECT_EQ(get(driver(), whole->data() + page()), std::byte{3});
}

TEST_P(DriverContract, ARunIsMappedSideBySideAndUnmappedPieceByPiece) {
  const auto first = driver().create(page(), "test");
  const auto second = driver().create(2 * page(), "test");
  const auto range = driver().reserve(4 * page());
  const std::array<Piece, 2> run{{{first.get(), 0, page()}, {second.get(), 0, 2 * page()}}};
  const auto accesses = Standin::counts().accesses;
  range->map_run(page(), run, Access::kReadWrite);
  if (GetParam() == "standin") {
    EXPECT_EQ(Standin::counts().accesses, accesses + 1) << "one call for the whole run";
  }
  put(driver(), range->data() + page(), std::byte{1});
  put(driver(), range->data() + 4 * page() - 1, std::byte{2});
  EXPECT_EQ(get(driver(), map_whole(driver(), *second, Access::kReadOnly)->data() + 2 * page() - 1),
            std::byte{2});
  range->unmap(page(), page());
  EXPECT_EQ(get(driver(), range->data() + 4 * page() - 1), std::byte{2});
  range->unmap(2 * page(), 2 * page());
}

TEST_P(DriverContract, ARunThatFailsLeavesNothingMapped) {
  const auto memory = driver().create(page(), "test");
  const auto beyond = driver().create(2 * page(), "test");
  const auto range = driver().reserve(2 * page());
  std::array<Piece, 2> run{{{memory.get(), 0, page()}, {beyond.get(), 0, 2 * page()}}};
  EXPECT_THROW(range->map_run(0, run, Access::kReadWrite), Error);
  range->map(0, *beyond, 0, 2 * page(), Access::kReadWrite);
  range->unmap(0, 2 * page());
  if (driver().maps_parts()) {
    return;
  }
  // Found out by CUDA only, when it has mapped the first one.
  const auto smaller = driver().import_fd(beyond->export_fd(), page());
  run[1] = {smaller.get(), 0, page()};
  EXPECT_THROW(range->map_run(0, run, Access::kReadWrite), Error);
  static_cast<void>(Standin::violations());
  range->map(0, *beyond, 0, 2 * page(), Access::kReadWrite);
}

TEST_P(DriverContract, MappingOutsideOfTheReservationThrows) {
  const auto memory = driver().create(2 * page(), "test");
  const auto range = driver().reserve(page());
  EXPECT_THROW(range->map(0, *memory, 0, 2 * page(), Access::kReadWrite), Error);
  EXPECT_THROW(range->unmap(2 * page(), page()), Error);
}

TEST_P(DriverContract, ASizeThatIsNoMultipleOfTheGranularityIsRoundedUp) {
  const auto memory = driver().create(page() + 5, "test");
  EXPECT_EQ(memory->bytes(), page() + 5);
  const auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  EXPECT_EQ(mapped->bytes(), page() + 5);
  put(driver(), mapped->data() + page() + 4, std::byte{4});
  EXPECT_EQ(get(driver(), mapped->data() + page() + 4), std::byte{4});
}

TEST_P(DriverContract, AnExportIsTheSameMemoryAndItsSizeIsChecked) {
  const auto memory = driver().create(page(), "test");
  const auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  put(driver(), mapped->data(), std::byte{1});
  const auto imported = driver().import_fd(memory->export_fd(), page());
  EXPECT_EQ(get(driver(), map_whole(driver(), *imported, Access::kReadOnly)->data()), std::byte{1});
  const auto map_larger = [&] {
    const auto larger = driver().import_fd(memory->export_fd(), 2 * page());
    static_cast<void>(map_whole(driver(), *larger, Access::kReadOnly));
  };
  EXPECT_THROW(map_larger(), Error);
  static_cast<void>(Standin::violations());  // the driver cannot know it before CUDA does
}

TEST_P(DriverContract, AMappingOutlivesItsMemory) {
  auto memory = driver().create(page(), "test");
  const auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  memory.reset();
  put(driver(), mapped->data(), std::byte{6});
  EXPECT_EQ(get(driver(), mapped->data()), std::byte{6});
}

TEST_P(DriverContract, SealedMemoryCannotBeMappedWritable) {
  const auto memory = driver().create(page(), "test");
  const auto before = map_whole(driver(), *memory, Access::kReadWrite);
  memory->seal_writes();
  EXPECT_THROW(static_cast<void>(map_whole(driver(), *memory, Access::kReadWrite)), Error);
  EXPECT_NO_THROW(static_cast<void>(map_whole(driver(), *memory, Access::kReadOnly)));
  put(driver(), before->data(), std::byte{1});  // what was writable stays so
  before->map(0, *memory, 0, page(), Access::kReadOnly);
  EXPECT_EQ(get(driver(), before->data()), std::byte{1});
  if (before->space().processors) {
    EXPECT_DEATH(before->data()[0] = std::byte{2}, "");
  }
}

TEST_P(DriverContract, ACopyIsThereWhenItsEventIsDone) {
  const auto memory = driver().create(2 * page(), "test");
  const auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  put(driver(), mapped->data() + page() - 1, std::byte{7});
  const auto event = driver().copy(mapped->data() + page(), mapped->data(), page());
  event->wait();
  EXPECT_TRUE(event->done());
  EXPECT_EQ(get(driver(), mapped->data() + 2 * page() - 1), std::byte{7});
}

TEST_P(DriverContract, AMappingThatACopyStillUsesIsTakenDownAfterIt) {
  const auto memory = driver().create(2 * page(), "test");
  auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  const auto event = driver().copy(mapped->data() + page(), mapped->data(), page());
  mapped.reset();
  EXPECT_TRUE(event->done());
}

TEST_P(DriverContract, WhatACopyStillUsesIsUnmappedAfterIt) {
  const auto memory = driver().create(2 * page(), "test");
  const auto range = driver().reserve(2 * page());
  range->map(0, *memory, 0, 2 * page(), Access::kReadWrite);
  const auto event = driver().copy(range->data() + page(), range->data(), page());
  range->unmap(0, 2 * page());
  EXPECT_TRUE(event->done());
}

TEST_P(DriverContract, FactsNameUnitsAndMemory) {
  const DeviceFacts facts = driver().facts();
  EXPECT_FALSE(facts.compute_units.empty());
  EXPECT_GE(facts.unit_granularity, 1);
  EXPECT_GT(facts.memory_bytes, 0);
}

TEST_P(DriverContract, MemoryForTablesIsThatOfProcessors) {
  const auto memory = driver().host().create(4096, "test");
  const auto mapped = map_whole(driver().host(), *memory, Access::kReadWrite);
  EXPECT_TRUE(mapped->space().processors);
  mapped->data()[0] = std::byte{1};
}

INSTANTIATE_TEST_SUITE_P(On, DriverContract, ::testing::ValuesIn(testing::driver_names()),
                         [](const auto& info) { return info.param; });

TEST(CudaDriverTest, AMachineWithoutLibcudaIsToldWhatToDo) {
  try {
    const CudaDriver driver("libcuda-that-is-not-there.so", 0);
    FAIL();
  } catch (const DriverUnavailable& error) {
    EXPECT_NE(std::string(error.what()).find("install NVIDIA's driver"), std::string::npos);
  }
}

TEST(CudaDriverTest, AGpuThatIsNotThereIsNamed) {
  EXPECT_THROW(CudaDriver(WINDROW_STANDIN, 7), DriverUnavailable);
  EXPECT_THROW(CudaDriver(WINDROW_STANDIN, -1), DriverUnavailable);
}

TEST(CudaDriverTest, MoreMemoryThanTheGpuHasIsAnErrorThatNamesIt) {
  CudaDriver driver(WINDROW_STANDIN, 0);
  const auto held = Standin::held();
  try {
    static_cast<void>(driver.create(std::size_t{1} << 45, "test"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("OUT_OF_MEMORY"), std::string::npos);
  }
  EXPECT_EQ(Standin::held(), held);
}

TEST(CudaDriverTest, MemoryThatRunsOutMidwayLeavesNothingAndSaysHowMuchIsFree) {
  CudaDriver driver(WINDROW_STANDIN, 0);
  const auto counts = Standin::counts();
  const auto had = Standin::set_memory(std::size_t{6} << 20);
  std::vector<std::unique_ptr<Memory>> memories;
  try {
    for (;;) {
      memories.push_back(driver.create(std::size_t{2} << 20, "test"));
      ASSERT_LE(memories.size(), 3U);
    }
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("0.0 of 0.0 GiB are free"), std::string::npos)
        << error.what();
  }
  memories.clear();
  Standin::set_memory(had);
  EXPECT_EQ(Standin::counts().handles, counts.handles);
  EXPECT_EQ(Standin::counts().mappings, counts.mappings);
}

TEST(CudaDriverTest, ADriverWithoutGreenContextsHasMemoryAndSaysWhatSharesNeed) {
  const testing::StandinSetting old("WINDROW_STANDIN_CUDA", "12020");
  CudaDriver driver(WINDROW_STANDIN, 0);
  const DeviceFacts facts = driver.facts();
  EXPECT_EQ(facts.version, 12020);
  EXPECT_EQ(facts.unit_granularity, 1);
  const auto memory = driver.create(1, "test");
  const auto mapped = map_whole(driver, *memory, Access::kReadWrite);
  put(driver, mapped->data(), std::byte{3});
  EXPECT_EQ(get(driver, mapped->data()), std::byte{3});
  try {
    static_cast<void>(driver.partition({}));
    FAIL();
  } catch (const DriverUnavailable& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("of CUDA 12.2"), std::string::npos) << said;
    EXPECT_NE(said.find("12.5 or newer"), std::string::npos) << said;
  }
}

TEST(CudaDriverTest, ADriverThatIsTooOldIsToldByItsVersion) {
  ::setenv("WINDROW_STANDIN_CUDA", "11080", 1);
  try {
    const CudaDriver driver(WINDROW_STANDIN, 0);
    ADD_FAILURE();
  } catch (const DriverUnavailable& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("of CUDA 11.8"), std::string::npos) << said;
    EXPECT_NE(said.find("12.0 or newer"), std::string::npos) << said;
  }
  ::unsetenv("WINDROW_STANDIN_CUDA");
}

TEST(CudaDriverTest, MemoryIsFitForRdmaWhereTheGpuSupportsIt) {
  CudaDriver driver(WINDROW_STANDIN, 0);
  const auto before = Standin::counts().rdma_handles;
  const auto fit = driver.create(1, "test");
  EXPECT_EQ(Standin::counts().rdma_handles, before + 1);
  const testing::StandinSetting without("WINDROW_STANDIN_RDMA", "0");
  const auto plain = driver.create(1, "test");
  EXPECT_EQ(Standin::counts().rdma_handles, before + 1);
  EXPECT_EQ(Standin::violations(), "");
}

TEST(CudaDriverTest, AGpuHasItsUuidAndTheHostNone) {
  EXPECT_EQ(CudaDriver(WINDROW_STANDIN, 0).facts().uuid, "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf");
  EXPECT_EQ(host_driver().facts().uuid, "");
}

TEST(CudaDriverTest, AProcessIsAnMpsClientWhereItsContextIs) {
  CudaDriver driver(WINDROW_STANDIN, 0);
  EXPECT_FALSE(driver.facts().is_mps_client);
  const testing::StandinSetting mps("WINDROW_STANDIN_MPS", "1");
  EXPECT_TRUE(driver.facts().is_mps_client);
  EXPECT_FALSE(host_driver().facts().is_mps_client);
}

// By what a driver answers that does not give, or take, such an access.
class RefusedAccess : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(With, RefusedAccess,
                         ::testing::Values(cuda::kInvalidValue, cuda::kNotPermitted,
                                           cuda::kNotSupported));

TEST_P(RefusedAccess, MemoryStaysWritableForItsMakerWhereTheDriverTakesNoAccessAway) {
  const testing::StandinSetting stubborn("WINDROW_STANDIN_NARROWS", "0");
  const testing::StandinSetting answer("WINDROW_STANDIN_REFUSES_WITH",
                                       std::to_string(GetParam()).c_str());
  CudaDriver driver(WINDROW_STANDIN, 0);
  SharedWeights weights(driver, 4096);
  std::byte* const at = weights.mapping()->reservation().data();
  put(driver, at, std::byte{1});
  ::testing::internal::CaptureStderr();
  weights.seal();
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("stay writable"), std::string::npos);
  put(driver, at, std::byte{2});
  OwnedFd fd(::fcntl(weights.fd(), F_DUPFD_CLOEXEC, 0));
  const auto reader = map_sealed(driver, std::move(fd), 4096);
  EXPECT_EQ(get(driver, reader->reservation().data()), std::byte{2});
  EXPECT_EQ(Standin::violations(), "");
}

TEST_P(RefusedAccess, WeightsAreSharedAllTheSameWhereTheDriverKnowsNoReadOnlyMappings) {
  const testing::StandinSetting blunt("WINDROW_STANDIN_READ_ONLY", "0");
  const testing::StandinSetting answer("WINDROW_STANDIN_REFUSES_WITH",
                                       std::to_string(GetParam()).c_str());
  CudaDriver driver(WINDROW_STANDIN, 0);
  SharedWeights weights(driver, 4096);
  put(driver, weights.mapping()->reservation().data(), std::byte{1});
  ::testing::internal::CaptureStderr();
  weights.seal();
  OwnedFd fd(::fcntl(weights.fd(), F_DUPFD_CLOEXEC, 0));
  const auto reader = map_sealed(driver, std::move(fd), 4096);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("stay writable"), said.rfind("stay writable")) << "both sides say it";
  EXPECT_EQ(get(driver, reader->reservation().data()), std::byte{1});
  EXPECT_EQ(Standin::violations(), "");
}

TEST(CudaDriverTest, TheContextGoesWithTheLastThingThatWasMadeInIt) {
  const auto before = Standin::counts();
  {
    auto driver = std::make_unique<CudaDriver>(WINDROW_STANDIN, 0);
    const auto memory = driver->create(1, "test");
    driver.reset();
    EXPECT_EQ(Standin::counts().contexts, before.contexts + 1);
  }
  EXPECT_EQ(Standin::counts().contexts, before.contexts);
  EXPECT_EQ(Standin::counts().streams, before.streams);
  EXPECT_EQ(Standin::violations(), "");
}

TEST(GeometryTest, RefusesSizesThatMakeNoArena) {
  const Geometry sound{2, 2, 32, 4, 4096, 8};
  EXPECT_NO_THROW(sound.validate(4096));
  EXPECT_EQ(sound.slots_per_chunk(), 16);
  EXPECT_EQ(sound.chunk_bytes(), 4 * 4096);
  for (const Geometry& wrong :
       {Geometry{0, 2, 32, 4, 4096, 8}, Geometry{2, 2, 32, 4, 4097, 8},
        Geometry{2, 3, 32, 4, 4096, 8}, Geometry{2, 2, 32, 4, 4096, -1},
        Geometry{1LL << 40, 2, 32, 4, 4096, 1 << 20}, Geometry{2, 2, 32, 4, 4096, 1LL << 40}}) {
    EXPECT_THROW(wrong.validate(4096), GeometryError);
  }
}

}  // namespace
}  // namespace windrow
