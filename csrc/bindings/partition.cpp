#include "windrow/partition.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind.h"

namespace windrow::bindings {
namespace {

Partition::Side side_of(const std::string& side) {
  if (side != "decode" && side != "finetune") {
    throw std::invalid_argument("'" + side + "' is not a side: use decode or finetune");
  }
  return side == "decode" ? Partition::Side::kDecode : Partition::Side::kFinetune;
}

}  // namespace

void bind_partition(nb::module_& module) {
  nb::class_<Partition>(module, "Partition",
                        "A hold on a device's compute units, in groups of one size.")
      .def_prop_ro("total_units", &Partition::total_units)
      .def_prop_ro("group_units", &Partition::group_units)
      .def_prop_ro("groups", &Partition::groups)
      .def(
          "enter",
          [](Partition& self, const std::string& side, int groups) {
            return self.enter(side_of(side), groups);
          },
          nb::arg("side"), nb::arg("groups"))
      .def("leave", &Partition::leave)
      .def(
          "units",
          [](Partition& self, const std::string& side, int groups) {
            return self.units(side_of(side), groups);
          },
          nb::arg("side"), nb::arg("groups"))
      .def(
          "measure",
          [](Partition& self, const std::string& side, int groups) {
            nb::gil_scoped_release release;
            return self.measure(side_of(side), groups);
          },
          nb::arg("side"), nb::arg("groups"))
      .def("exclude", &Partition::exclude, nb::arg("thread_id"))
      .def("keep_in_background", &Partition::keep_in_background, nb::arg("thread_id"));
}

}  // namespace windrow::bindings
