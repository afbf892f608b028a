#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "windrow/clock.h"

namespace windrow::bench {

inline constexpr int kWarmUps = 2;

// Nanoseconds of one call each, their own two looks at the clock included (about 40 ns).
template <class Call>
std::vector<double> time_each(std::size_t calls, Call call) {
  std::vector<double> times;
  times.reserve(calls);
  for (std::size_t i = 0; i < calls; ++i) {
    const std::int64_t began = monotonic_ns();
    call();
    times.push_back(static_cast<double>(monotonic_ns() - began));
  }
  return times;
}

// Nanoseconds of a call: the mean over many in a row.
template <class Call>
double time_mean(std::size_t calls, Call call) {
  const std::int64_t began = monotonic_ns();
  for (std::size_t i = 0; i < calls; ++i) {
    call();
  }
  return static_cast<double>(monotonic_ns() - began) / static_cast<double>(calls);
}

inline double quantile(std::vector<double> values, double q) {
  const auto place =
      values.begin() + static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

// One figure of each repeat, written as a line of JSON: {"name": ..., "repeats": [...]}.
class Figure {
 public:
  explicit Figure(std::string name) : name_(std::move(name)) {}
  void add(double value) { repeats_.push_back(value); }
  void print() const {
    std::printf("{\"name\": \"%s\", \"repeats\": [", name_.c_str());
    for (std::size_t i = 0; i < repeats_.size(); ++i) {
      std::printf("%s%.3f", i == 0 ? "" : ", ", repeats_[i]);
    }
    std::printf("]}\n");
    std::fflush(stdout);
  }

 private:
  std::string name_;
  std::vector<double> repeats_;
};

// What main() calls; all print their figures.
void measure_table(int repeats);
void measure_pool(const std::string& trace_file, int repeats);
void measure_large_tensors(const std::string& trace_file, int repeats);
void measure_page(int repeats);
void measure_revokes(int revokes);
void measure_mapping(const std::string& driver, int repeats);

}  // namespace windrow::bench
