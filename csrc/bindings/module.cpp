#include <nanobind/nanobind.h>

#include "bind.h"
#include "windrow/chunk_table.h"
#include "windrow/clock.h"
#include "windrow/control.h"

namespace nb = nanobind;

namespace {

nb::tuple transitions() {
  nb::list lines;
  for (const windrow::Transition& t : windrow::kTransitions) {
    const auto text = [](std::string_view part) { return nb::str(part.data(), part.size()); };
    lines.append(nb::make_tuple(text(name_of(t.from)), text(name_of(t.to)),
                                text(t.by_peer ? "worker, decode" : "decode"), text(t.calls),
                                text(t.when), text(t.if_peer_dies)));
  }
  return nb::tuple(lines);
}

// Name, first byte and length of each part of the control region up to the table, and who writes
// it.
nb::tuple layout() {
  using windrow::kPageOffset;
  using L = windrow::PageLayout;
  const std::size_t end = kPageOffset + sizeof(windrow::SharedPage);
  const auto part = [](const char* name, std::size_t from, std::size_t to, const char* writer) {
    return nb::make_tuple(name, from, to - from, writer);
  };
  return nb::make_tuple(
      part("head", 0, kPageOffset, "decode, once"),
      part("view", kPageOffset + L::kView, kPageOffset + L::kGrant, "decode"),
      part("grant", kPageOffset + L::kGrant, kPageOffset + L::kOffer, "decode"),
      part("offer", kPageOffset + L::kOffer, kPageOffset + L::kPauseEpoch, "worker"),
      part("pause epoch", kPageOffset + L::kPauseEpoch, kPageOffset + L::kDecodesLine, "decode"),
      part("decode's heartbeat and counters", kPageOffset + L::kDecodesLine,
           kPageOffset + L::kWorkersLine, "decode"),
      part("worker's heartbeat and counters", kPageOffset + L::kWorkersLine, end, "worker"));
}

}  // namespace

NB_MODULE(_core, module) {
  using windrow::ChunkState;
  // What threads still hold when a process ends, the page above all, would be reported as leaks at
  // the end of each of its logs.
  nb::set_leak_warnings(false);
  module.doc() = "Windrow's native core: the arena and its chunk table, and the shared page.";
  module.attr("LAYOUT_VERSION") = windrow::kLayoutVersion;
  module.attr("FREE") = static_cast<int>(ChunkState::kFree);
  module.attr("KV") = static_cast<int>(ChunkState::kKv);
  module.attr("LENT") = static_cast<int>(ChunkState::kLent);
  module.attr("RESERVED") = static_cast<int>(ChunkState::kReserved);
  module.attr("DRAINING") = static_cast<int>(ChunkState::kDraining);
  module.attr("LAYOUT") = layout();
  module.attr("TRANSITIONS") = transitions();
  module.def("monotonic_ns", &windrow::monotonic_ns, "CLOCK_MONOTONIC, as page and table use it.");
  windrow::bindings::bind_errors(module);
  windrow::bindings::bind_geometry(module);
  windrow::bindings::bind_partition(module);
  windrow::bindings::bind_drivers(module);
  windrow::bindings::bind_page(module);
  windrow::bindings::bind_decision(module);
  windrow::bindings::bind_arena(module);
  windrow::bindings::bind_harvest_step(module);
  windrow::bindings::bind_inspection(module);
  windrow::bindings::bind_weights(module);
  windrow::bindings::bind_allocator(module);
}
