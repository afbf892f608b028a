// Decode and two workers as processes; all of them are killed anywhere and replaced.
#include <gtest/gtest.h>

#include "soak.h"

namespace windrow::testing {
namespace {

TEST(TableProcesses, NoChunkIsLostOrInTwoHandsWhenAnybodyIsKilledAnywhere) {
  const SoakReport report = soak({.operations = 1'000'000}, [](const SoakReport&) {});
  EXPECT_GE(report.checks, report.operations / 2'000);
  EXPECT_GE(report.workers_killed, 100U);
  EXPECT_GE(report.owners_killed, 1U);
}

}  // namespace
}  // namespace windrow::testing
