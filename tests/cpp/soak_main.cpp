// `make soak`: random operations and random kills for as long as one likes, with progress.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "soak.h"
#include "windrow/clock.h"

namespace {

using windrow::monotonic_ns;
using windrow::testing::SoakPlan;
using windrow::testing::SoakReport;

constexpr std::int64_t kShowEvery_ns = 5'000'000'000;

void show(const SoakReport& report, const SoakPlan& plan, std::int64_t began_ns) {
  const double seconds = static_cast<double>(monotonic_ns() - began_ns) / 1e9;
  std::printf(
      "%.1f of %.1f million operations, %llu checks, %llu workers and %llu owners killed, %.0f s\n",
      static_cast<double>(report.operations) / 1e6, static_cast<double>(plan.operations) / 1e6,
      static_cast<unsigned long long>(report.checks),
      static_cast<unsigned long long>(report.workers_killed),
      static_cast<unsigned long long>(report.owners_killed), seconds);
  std::fflush(stdout);
}

// Throws std::exception where the arguments are none.
SoakPlan plan_from(int count, char** arguments) {
  SoakPlan plan;
  plan.operations = 100'000'000;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string_view name = arguments[i];
    const double value = std::stod(arguments[i + 1]);
    if (name == "--operations") {
      plan.operations = static_cast<std::uint64_t>(value);
    } else if (name == "--seed") {
      plan.seed = static_cast<unsigned>(value);
    } else {
      throw std::invalid_argument(arguments[i]);
    }
  }
  return plan;
}

int run(int count, char** arguments) {
  const SoakPlan plan = plan_from(count, arguments);
  const std::int64_t began_ns = monotonic_ns();
  std::int64_t shown_ns = began_ns;
  const SoakReport report = windrow::testing::soak(plan, [&](const SoakReport& so_far) {
    if (monotonic_ns() - shown_ns > kShowEvery_ns) {
      shown_ns = monotonic_ns();
      show(so_far, plan, began_ns);
    }
  });
  show(report, plan, began_ns);
  std::printf("seed %u: no error\n", plan.seed);
  return EXIT_SUCCESS;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\nusage: windrow_soak [--operations 1e8] [--seed 1]\n", error.what());
    return EXIT_FAILURE;
  }
}
