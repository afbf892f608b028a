// What the driver's calls cost, a block of 2 MiB each: what an idle alias saves.
#include <memory>
#include <vector>

#include "samples.h"
#include "windrow/cuda_driver.h"
#include "windrow/host_driver.h"
#include "windrow/small_pool.h"

namespace windrow::bench {
namespace {

constexpr std::size_t kBlocks = 64;
constexpr double kNsPerUs = 1e3;

// What lending a chunk costs a worker that has no alias of it: 64 memories with one call of access,
// or one memory.
class ChunkFigures {
 public:
  explicit ChunkFigures(const std::string& layout)
      : mapping_("map a chunk of 64 blocks, " + layout),
        unmapping_("unmap a chunk of 64 blocks, " + layout) {}

  void measure(Driver& driver, const std::vector<Piece>& chunk, bool warm_up) {
    const auto range = driver.reserve(kBlocks * kPoolBlockBytes);
    const double map = time_mean(1, [&] { range->map_run(0, chunk, Access::kReadWrite); });
    const double unmap = time_mean(1, [&] {
      std::size_t at = 0;
      for (const Piece& piece : chunk) {
        range->unmap(at, piece.bytes);
        at += piece.bytes;
      }
    });
    if (!warm_up) {
      mapping_.add(map / kNsPerUs);
      unmapping_.add(unmap / kNsPerUs);
    }
  }
  void print() const {
    mapping_.print();
    unmapping_.print();
  }

 private:
  Figure mapping_;
  Figure unmapping_;
};

std::vector<Piece> pieces_of(const std::vector<std::unique_ptr<Memory>>& memories) {
  std::vector<Piece> pieces;
  for (const auto& memory : memories) {
    pieces.push_back({memory.get(), 0, memory->bytes()});
  }
  return pieces;
}

}  // namespace

void measure_mapping(const std::string& driver_name, int repeats) {
  std::unique_ptr<Driver> cuda;
  if (driver_name == "cuda") {
    cuda = std::make_unique<CudaDriver>(kLibcuda, 0);
  }
  Driver& driver = cuda ? *cuda : host_driver();
  Figure creating("create a block");
  Figure mapping("map a block, access included");
  Figure allowing("set the access of a block");
  Figure unmapping("unmap a block");
  Figure copying("copy a block");
  ChunkFigures per_layer("per-layer");
  ChunkFigures token_major("token-major");
  std::vector<std::unique_ptr<Memory>> whole;
  whole.push_back(driver.create(kBlocks * kPoolBlockBytes, "bench-chunk"));
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
    // The same memory at the same place again: its access only.
    const double allow = time_mean(kBlocks, [&] {
      --next;
      range->map(next * kPoolBlockBytes, *blocks[next], 0, kPoolBlockBytes, Access::kReadWrite);
    });
    next = kBlocks;
    const double copy = time_mean(kBlocks / 2, [&] {
      next -= 2;
      driver
          .copy(range->data() + next * kPoolBlockBytes,
                range->data() + (next + 1) * kPoolBlockBytes, kPoolBlockBytes)
          ->wait();
    });
    const double unmap =
        time_mean(kBlocks, [&] { range->unmap(next++ * kPoolBlockBytes, kPoolBlockBytes); });
    per_layer.measure(driver, pieces_of(blocks), repeat < 0);
    token_major.measure(driver, pieces_of(whole), repeat < 0);
    if (repeat >= 0) {
      allowing.add(allow / kNsPerUs);
      creating.add(create / kNsPerUs);
      mapping.add(map / kNsPerUs);
      unmapping.add(unmap / kNsPerUs);
      copying.add(static_cast<double>(kPoolBlockBytes) / copy);  // bytes a nanosecond: GB/s
    }
  }
  creating.print();
  mapping.print();
  allowing.print();
  unmapping.print();
  copying.print();
  per_layer.print();
  token_major.print();
}

}  // namespace windrow::bench
