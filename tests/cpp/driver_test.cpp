// What every driver promises; the cuda driver joins by one more line in INSTANTIATE.
#include "windrow/driver.h"

#include <gtest/gtest.h>

#include <cstring>

#include "windrow/error.h"
#include "windrow/geometry.h"
#include "windrow/host_driver.h"

namespace windrow {
namespace {

class DriverContract : public ::testing::TestWithParam<Driver*> {
 protected:
  [[nodiscard]] Driver& driver() const { return *GetParam(); }
  [[nodiscard]] std::size_t page() const { return driver().granularity(); }
};

TEST_P(DriverContract, MemoryIsZeroedAndSeenThroughEveryMapping) {
  const auto memory = driver().create(4 * page(), "test");
  const auto first = map_whole(driver(), *memory, Access::kReadWrite);
  const auto second = map_whole(driver(), *memory, Access::kReadOnly);
  EXPECT_EQ(first->data()[4 * page() - 1], std::byte{0});
  first->data()[5] = std::byte{9};
  EXPECT_EQ(second->data()[5], std::byte{9});
}

TEST_P(DriverContract, AReservationMapsPartsAtOffsetsAndUnmapsThem) {
  const auto memory = driver().create(2 * page(), "test");
  const auto range = driver().reserve(4 * page());
  range->map(page(), *memory, page(), page(), Access::kReadWrite);
  range->data()[page()] = std::byte{3};
  const auto whole = map_whole(driver(), *memory, Access::kReadOnly);
  EXPECT_EQ(whole->data()[page()], std::byte{3});
  range->unmap(page(), page());
  EXPECT_DEATH(range->data()[page()] = std::byte{1}, "");
}

TEST_P(DriverContract, MappingOutsideOfTheReservationThrows) {
  const auto memory = driver().create(2 * page(), "test");
  const auto range = driver().reserve(page());
  EXPECT_THROW(range->map(0, *memory, 0, 2 * page(), Access::kReadWrite), Error);
  EXPECT_THROW(range->unmap(2 * page(), page()), Error);
}

TEST_P(DriverContract, AnExportIsTheSameMemoryAndItsSizeIsChecked) {
  const auto memory = driver().create(page(), "test");
  const auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  mapped->data()[0] = std::byte{1};
  const auto imported = driver().import_fd(memory->export_fd(), page());
  EXPECT_EQ(map_whole(driver(), *imported, Access::kReadOnly)->data()[0], std::byte{1});
  EXPECT_THROW(static_cast<void>(driver().import_fd(memory->export_fd(), 2 * page())), Error);
}

TEST_P(DriverContract, SealedMemoryCannotBeMappedWritable) {
  const auto memory = driver().create(page(), "test");
  memory->seal_writes();
  EXPECT_THROW(static_cast<void>(map_whole(driver(), *memory, Access::kReadWrite)), Error);
  EXPECT_NO_THROW(static_cast<void>(map_whole(driver(), *memory, Access::kReadOnly)));
}

TEST_P(DriverContract, ACopyIsThereWhenItsEventIsDone) {
  const auto memory = driver().create(2 * page(), "test");
  const auto mapped = map_whole(driver(), *memory, Access::kReadWrite);
  std::memset(mapped->data(), 7, page());
  const auto event = driver().copy(mapped->data() + page(), mapped->data(), page());
  event->wait();
  EXPECT_TRUE(event->done());
  EXPECT_EQ(mapped->data()[2 * page() - 1], std::byte{7});
}

TEST_P(DriverContract, FactsNameUnitsAndMemory) {
  const DeviceFacts facts = driver().facts();
  EXPECT_FALSE(facts.compute_units.empty());
  EXPECT_GE(facts.unit_granularity, 1);
  EXPECT_GT(facts.memory_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Host, DriverContract, ::testing::Values(&host_driver()));

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
