// What the driver's calls cost, a block of 2 MiB each: what an idle alias saves.
#include <memory>

#include "samples.h"
#include "windrow/cuda_driver.h"
#include "windrow/host_driver.h"
#include "windrow/small_pool.h"

namespace windrow::bench {
namespace {

constexpr std::size_t kBlocks = 64;
constexpr double kNsPerUs = 1e3;

}  // namespace

void measure_mapping(const std::string& driver_name, int repeats) {
  std::unique_ptr<Driver> cuda;
  if (driver_name == "cuda") {
    cuda = std::make_unique<CudaDriver>(kLibcuda, 0);
  }
  Driver& driver = cuda ? *cuda : host_driver();
  Figure creating("create a block");
  Figure mapping("map a block, access included");
  Figure unmapping("unmap a block");
  Figure copying("copy a block");
  for (int repeat = -1; repeat < repeats; ++repeat) {
    std::vector<std::unique_ptr<Memory>> blocks;
    const auto range = driver.reserve(kBlocks * kPoolBlockBytes);
    const double create = time_mean(
        kBlocks, [&] { blocks.push_back(driver.create(kPoolBlockBytes, "bench-block")); });
    std::size_t next = 0;
    const double map = time_mean(kBlocks, [&] {
      range->map(next * kPoolBlockBytes, *blocks[next], 0, kPoolBlockBytes, Access::kReadWrite);
      ++next;
    });
    const double copy = time_mean(kBlocks / 2, [&] {
      next -= 2;
      driver
          .copy(range->data() + next * kPoolBlockBytes,
                range->data() + (next + 1) * kPoolBlockBytes, kPoolBlockBytes)
          ->wait();
    });
    const double unmap =
        time_mean(kBlocks, [&] { range->unmap(next++ * kPoolBlockBytes, kPoolBlockBytes); });
    if (repeat >= 0) {
      creating.add(create / kNsPerUs);
      mapping.add(map / kNsPerUs);
      unmapping.add(unmap / kNsPerUs);
      copying.add(static_cast<double>(kPoolBlockBytes) / copy);  // bytes a nanosecond: GB/s
    }
  }
  creating.print();
  mapping.print();
  unmapping.print();
  copying.print();
}

}  // namespace windrow::bench
