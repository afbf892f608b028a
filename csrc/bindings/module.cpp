#include <nanobind/nanobind.h>

#include "bind.h"
#include "windrow/chunk_table.h"
#include "windrow/clock.h"
#include "windrow/control.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  using windrow::ChunkState;
  module.doc() = "Windrow's native core: the arena and its chunk table, and the shared page.";
  module.attr("LAYOUT_VERSION") = windrow::kLayoutVersion;
  module.attr("FREE") = static_cast<int>(ChunkState::kFree);
  module.attr("KV") = static_cast<int>(ChunkState::kKv);
  module.attr("LENT") = static_cast<int>(ChunkState::kLent);
  module.attr("RESERVED") = static_cast<int>(ChunkState::kReserved);
  module.attr("DRAINING") = static_cast<int>(ChunkState::kDraining);
  module.def("monotonic_ns", &windrow::monotonic_ns, "CLOCK_MONOTONIC, as page and table use it.");
  windrow::bindings::bind_errors(module);
  windrow::bindings::bind_geometry(module);
  windrow::bindings::bind_page(module);
  windrow::bindings::bind_arena(module);
  windrow::bindings::bind_weights(module);
}
