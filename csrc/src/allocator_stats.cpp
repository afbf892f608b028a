#include "windrow/allocator_stats.h"

#include <tuple>

namespace windrow {
namespace {

void append(NamedFigures& figures, const std::string& name, const Stat& stat) {
  figures.emplace_back(name + ".current", stat.current);
  figures.emplace_back(name + ".peak", stat.peak);
  figures.emplace_back(name + ".allocated", stat.allocated);
  figures.emplace_back(name + ".freed", stat.freed);
}

void append(NamedFigures& figures, const std::string& name, const PooledStat& stat) {
  append(figures, name + ".all", stat.all);
  append(figures, name + ".large_pool", stat.large);
  append(figures, name + ".small_pool", stat.small);
}

}  // namespace

NamedFigures named(const AllocatorStats& stats) {
  NamedFigures figures;
  append(figures, "allocation", stats.allocation);
  append(figures, "requested_bytes", stats.requested_bytes);
  append(figures, "allocated_bytes", stats.allocated_bytes);
  append(figures, "active", stats.active);
  append(figures, "active_bytes", stats.active_bytes);
  append(figures, "segment", stats.segment);
  append(figures, "reserved_bytes", stats.reserved_bytes);
  for (const auto& [pool, reserved, active] :
       {std::tuple{"all", &stats.reserved_bytes.all, &stats.active_bytes.all},
        std::tuple{"large_pool", &stats.reserved_bytes.large, &stats.active_bytes.large},
        std::tuple{"small_pool", &stats.reserved_bytes.small, &stats.active_bytes.small}}) {
    figures.emplace_back(std::string("inactive_split_bytes.") + pool + ".current",
                         reserved->current - active->current);
  }
  figures.emplace_back("num_alloc_retries", stats.alloc_retries);
  figures.emplace_back("num_ooms", stats.ooms);
  figures.emplace_back("num_sync_all_streams", stats.sync_all_streams);
  return figures;
}

}  // namespace windrow
