// What is the GPU's own in a partition, over the stand-in and a real GPU where there is one.
#include "windrow/green_partition.h"

#include <gtest/gtest.h>

#include <array>
#include <stdexcept>

#include "drivers.h"
#include "windrow/cuda_streams.h"

namespace windrow {
namespace {

using Side = Partition::Side;
using testing::Standin;

class GreenPartitionTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    driver_ = testing::driver_of(GetParam());
    if (driver_ == nullptr) {
      GTEST_SKIP() << "no GPU, or no libcuda.so.1";
    }
  }
  Driver* driver_ = nullptr;
};

TEST_P(GreenPartitionTest, AShareIsMadeOnce) {
  const auto partition = driver_->partition({});
  const auto stream = partition->enter(Side::kFinetune, 2);
  EXPECT_EQ(partition->enter(Side::kFinetune, 2), stream);
  EXPECT_NE(partition->enter(Side::kFinetune, 3), stream);
  EXPECT_NE(partition->enter(Side::kDecode, 2), stream);
  partition->leave();
  EXPECT_EQ(partition->enter(Side::kFinetune, 2), stream);
}

// An allocator asks the streams on which its memory was used, until the process ends.
TEST_P(GreenPartitionTest, AStreamOutlivesItsPartitionAndGoesWithTheDriver) {
  const auto before = Standin::counts();
  {
    CudaDriver driver(GetParam() == "gpu" ? kLibcuda : WINDROW_STANDIN, 0);
    const auto stream = driver.partition({})->enter(Side::kFinetune, 2);
    CudaStreams streams(driver.context());
    EXPECT_NO_THROW(streams.record(stream)->wait());
    EXPECT_EQ(driver.partition({})->enter(Side::kFinetune, 2), stream);
    EXPECT_FALSE(driver.partition({})->measure(Side::kFinetune, 2).empty());
  }
  const auto after = Standin::counts();
  EXPECT_EQ(after.green_contexts, before.green_contexts);
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_EQ(after.contexts, before.contexts);
  EXPECT_EQ(after.modules, before.modules);
  EXPECT_EQ(Standin::violations(), "");
}

TEST_P(GreenPartitionTest, SomeSmsOnlyCannotBeChosen) {
  const std::array<int, 2> some{0, 1};
  EXPECT_THROW(static_cast<void>(driver_->partition(some)), std::invalid_argument);
}

struct Architecture {
  const char* capability;
  int group;
};

// Drivers of 12.x tell the number of SMs and nothing else.
class OlderDriver : public ::testing::TestWithParam<Architecture> {
 protected:
  testing::StandinSetting driver_{"WINDROW_STANDIN_CUDA", "12060"};
  testing::StandinSetting device_{"WINDROW_STANDIN_CAPABILITY", GetParam().capability};
};

TEST_P(OlderDriver, SharesAreOfTheSizeThatTheArchitectureWants) {
  CudaDriver driver(WINDROW_STANDIN, 0);
  EXPECT_EQ(driver.facts().unit_granularity, GetParam().group);
  const auto partition = driver.partition({});
  EXPECT_EQ(partition->group_units(), GetParam().group);
  EXPECT_EQ(partition->groups(), 132 / GetParam().group);
  EXPECT_EQ(partition->units(Side::kFinetune, 1), GetParam().group);
  const auto worker = partition->measure(Side::kFinetune, 1);
  const auto decode = partition->measure(Side::kDecode, partition->groups() - 1);
  EXPECT_EQ(worker.size() + decode.size(), 132U) << "what fills no group is decode's";
  EXPECT_EQ(Standin::violations(), "");
}

INSTANTIATE_TEST_SUITE_P(Of, OlderDriver,
                         ::testing::Values(Architecture{"7", 2}, Architecture{"8", 4},
                                           Architecture{"9", 8}, Architecture{"12", 8}),
                         [](const auto& info) {
                           return std::string("capability") + info.param.capability;
                         });

INSTANTIATE_TEST_SUITE_P(On, GreenPartitionTest, ::testing::Values("standin", "gpu"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace windrow
