// Contract of a partition on every driver: the host's cores, the stand-in's simulated SMs, and a
// GPU's where there is one. And what a failed call leaves: everything as it was.
#include "windrow/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "drivers.h"
#include "windrow/error.h"
#include "windrow/faulty_driver.h"

namespace windrow {
namespace {

using Side = Partition::Side;
using testing::Standin;

class PartitionContract : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    driver_ = testing::driver_of(GetParam());
    if (driver_ == nullptr) {
      GTEST_SKIP() << "no GPU, or no libcuda.so.1";
    }
    units_ = driver_->facts().compute_units;
    if (units_.size() < 2) {
      GTEST_SKIP() << "one core cannot be shared";
    }
  }
  void TearDown() override {
    if (units_.size() >= 2) {
      make()->leave();
    }
    EXPECT_EQ(Standin::violations(), "");
  }

  [[nodiscard]] Driver& driver() const { return *driver_; }
  // As one process makes it; each has its own.
  [[nodiscard]] std::unique_ptr<Partition> make() const { return driver_->partition(units_); }

 private:
  Driver* driver_ = nullptr;
  std::vector<int> units_;
};

bool disjoint(const std::vector<unsigned>& a, const std::vector<unsigned>& b) {
  return std::none_of(a.begin(), a.end(),
                      [&](unsigned unit) { return std::binary_search(b.begin(), b.end(), unit); });
}

TEST_P(PartitionContract, SharesThatAddUpToAllGroupsMeetNowhere) {
  const auto decode = make();
  const auto worker = make();
  for (int groups = 1; groups < decode->groups(); groups += 5) {
    const auto first = decode->measure(Side::kDecode, decode->groups() - groups);
    const auto last = worker->measure(Side::kFinetune, groups);
    EXPECT_TRUE(disjoint(first, last));
    EXPECT_EQ(static_cast<int>(first.size()),
              decode->units(Side::kDecode, decode->groups() - groups));
    EXPECT_EQ(static_cast<int>(last.size()), groups * worker->group_units());
  }
}

TEST_P(PartitionContract, AllGroupsAreEveryUnit) {
  const auto partition = make();
  EXPECT_EQ(partition->units(Side::kDecode, partition->groups()), partition->total_units());
  EXPECT_EQ(static_cast<int>(partition->measure(Side::kDecode, partition->groups()).size()),
            partition->total_units());
}

TEST_P(PartitionContract, EnteringAShareAgainGivesWhatItGaveBefore) {
  const auto partition = make();
  const auto one = partition->enter(Side::kFinetune, 1);
  static_cast<void>(partition->enter(Side::kFinetune, partition->groups()));
  EXPECT_EQ(partition->enter(Side::kFinetune, 1), one);
}

TEST_P(PartitionContract, AShareThatTheDeviceDoesNotHaveIsRefused) {
  const auto partition = make();
  for (const int groups : {-1, 0, partition->groups() + 1}) {
    EXPECT_THROW(static_cast<void>(partition->enter(Side::kFinetune, groups)),
                 std::invalid_argument);
    EXPECT_THROW(static_cast<void>(partition->units(Side::kDecode, groups)), std::invalid_argument);
    EXPECT_THROW(static_cast<void>(partition->measure(Side::kDecode, groups)),
                 std::invalid_argument);
  }
}

TEST_P(PartitionContract, ACallThatIsMadeToFailSaysSoAndEntersNothing) {
  FaultyDriver faulty(driver());
  faulty.plan().fail(DriverCall::kPartition, 1);
  EXPECT_THROW(static_cast<void>(faulty.partition({})), Error);
  const auto partition = faulty.partition({});
  const auto held = Standin::counts();
  const auto cores = host_driver().facts().compute_units;
  faulty.plan().fail(DriverCall::kEnter, 1);
  try {
    static_cast<void>(partition->enter(Side::kFinetune, 1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "injected fault: enter failed");
  }
  EXPECT_EQ(Standin::counts().green_contexts, held.green_contexts);
  EXPECT_EQ(Standin::counts().streams, held.streams);
  EXPECT_EQ(host_driver().facts().compute_units, cores);
  static_cast<void>(partition->enter(Side::kFinetune, 1));
  faulty.plan().fail(DriverCall::kLeave, 1);
  EXPECT_THROW(partition->leave(), Error);
  EXPECT_EQ(faulty.plan().fired(), 3);
}

TEST_P(PartitionContract, ADelayedCallGoesItsWay) {
  FaultyDriver faulty(driver());
  const auto partition = faulty.partition({});
  bool waited = false;
  faulty.plan().before(DriverCall::kEnter, 1, [&] { waited = true; });
  const auto entered = partition->enter(Side::kFinetune, 1);
  EXPECT_TRUE(waited);
  EXPECT_EQ(partition->enter(Side::kFinetune, 1), entered);
}

INSTANTIATE_TEST_SUITE_P(On, PartitionContract, ::testing::ValuesIn(testing::driver_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace windrow
