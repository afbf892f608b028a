// Measures the core without Python: windrow_bench TRACE REPEATS REVOKES DRIVER prints a line of
// JSON for each figure; benchmarks/native/rows.py builds it, runs it and knows the goals.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "samples.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: windrow_bench TRACE REPEATS REVOKES host|cuda\n");
    return 2;
  }
  try {
    const int repeats = std::atoi(argv[2]);
    windrow::bench::measure_table(repeats);
    windrow::bench::measure_pool(argv[1], repeats);
    windrow::bench::measure_large_tensors(argv[1], repeats);
    windrow::bench::measure_page(repeats);
    windrow::bench::measure_revokes(std::atoi(argv[3]));
    windrow::bench::measure_mapping(argv[4], repeats);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "windrow_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
