// Shares of SMs over the stand-in's simulated GPU (and a real one where there is one).
#include "windrow/green_partition.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "drivers.h"

namespace windrow {
namespace {

using Side = GreenPartition::Side;
using testing::Standin;

class GreenPartitionTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    driver_ = dynamic_cast<CudaDriver*>(testing::driver_of(GetParam()));
    if (driver_ == nullptr) {
      GTEST_SKIP() << "no GPU, or no libcuda.so.1";
    }
  }
  CudaDriver* driver_ = nullptr;
};

bool disjoint(const std::vector<unsigned>& a, const std::vector<unsigned>& b) {
  return std::none_of(a.begin(), a.end(),
                      [&](unsigned sm) { return std::binary_search(b.begin(), b.end(), sm); });
}

TEST_P(GreenPartitionTest, SharesThatAddUpToAllGroupsMeetNowhere) {
  GreenPartition decode(*driver_);
  GreenPartition worker(*driver_);  // as in another process: a split of its own
  for (int groups = 1; groups < decode.groups(); groups += 5) {
    const auto first = decode.measure(Side::kDecode, decode.groups() - groups);
    const auto last = worker.measure(Side::kFinetune, groups);
    EXPECT_TRUE(disjoint(first, last));
    EXPECT_EQ(static_cast<int>(first.size()),
              decode.units(Side::kDecode, decode.groups() - groups));
    EXPECT_EQ(static_cast<int>(last.size()), groups * worker.group_units());
  }
}

TEST_P(GreenPartitionTest, AllGroupsAreEverySm) {
  GreenPartition partition(*driver_);
  EXPECT_EQ(partition.units(Side::kDecode, partition.groups()), partition.total_units());
  EXPECT_EQ(static_cast<int>(partition.measure(Side::kDecode, partition.groups()).size()),
            partition.total_units());
}

TEST_P(GreenPartitionTest, AShareIsMadeOnceAndGoesWithThePartition) {
  const auto before = Standin::counts();
  {
    GreenPartition partition(*driver_);
    const auto stream = partition.stream(Side::kFinetune, 2);
    EXPECT_EQ(partition.stream(Side::kFinetune, 2), stream);
    EXPECT_NE(partition.stream(Side::kFinetune, 3), stream);
    EXPECT_NE(partition.stream(Side::kDecode, 2), stream);
  }
  const auto after = Standin::counts();
  EXPECT_EQ(after.green_contexts, before.green_contexts);
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_EQ(after.contexts, before.contexts);
  EXPECT_EQ(after.modules, before.modules);
  EXPECT_EQ(Standin::violations(), "");
}

TEST_P(GreenPartitionTest, AShareThatTheDeviceDoesNotHaveIsRefused) {
  GreenPartition partition(*driver_);
  EXPECT_THROW(static_cast<void>(partition.stream(Side::kFinetune, 0)), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(partition.stream(Side::kDecode, partition.groups() + 1)),
               std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(On, GreenPartitionTest, ::testing::Values("standin", "gpu"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace windrow
