#include "windrow/inspection.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.h"

namespace windrow::bindings {
namespace {

std::vector<ChunkInfo> chunks_of(const Inspection& inspection) {
  std::vector<ChunkInfo> chunks;
  for (std::int64_t i = 0; i < inspection.geometry().chunks; ++i) {
    chunks.push_back(inspection.table().chunk(i));
  }
  return chunks;
}

nb::bytes states_of(const Inspection& inspection) {
  const auto states = inspection.table().states();
  return nb::bytes(reinterpret_cast<const char*>(states.data()), states.size());
}

}  // namespace

void bind_inspection(nb::module_& module) {
  nb::class_<Inspection>(module, "Inspection", "A look at a live arena from another process.")
      .def_static(
          "open",
          [](const std::string& socket_path, double timeout_s) {
            nb::gil_scoped_release release;
            return std::make_unique<Inspection>(socket_path, deadline_after(timeout_s));
          },
          nb::arg("socket_path"), nb::kw_only(), nb::arg("timeout_s") = 5.0)
      .def_prop_ro("geometry", [](const Inspection& self) { return self.geometry(); })
      .def_prop_ro("owner_pid", &Inspection::owner)
      .def("owner_lives", &Inspection::owner_lives)
      .def("counts", [](const Inspection& self) { return counts_tuple(self.table().counts()); })
      .def("chunks", &chunks_of)
      .def("states", &states_of)
      .def(
          "held",
          [](const Inspection& self, std::int64_t owner) {
            return self.table().held_in(ChunkState::kLent, owner);
          },
          nb::arg("owner"))
      .def(
          "draining",
          [](const Inspection& self, std::int64_t owner) {
            return self.table().held_in(ChunkState::kDraining, owner);
          },
          nb::arg("owner"))
      .def("job_epoch", [](const Inspection& self) { return self.page().read_offer().job_epoch; })
      .def(
          "heartbeat_age_ns",
          [](const Inspection& self, int writer) {
            return self.page().heartbeat_age_ns(writer_of(writer));
          },
          nb::arg("writer"))
      .def(
          "counter",
          [](const Inspection& self, std::size_t counter) { return self.page().counter(counter); },
          nb::arg("counter"));
}

}  // namespace windrow::bindings
