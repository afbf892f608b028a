#include "windrow/drivers.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind.h"
#include "windrow/faulty_driver.h"
#include "windrow/green_partition.h"

namespace windrow::bindings {
namespace {

DriverCall call_of(const std::string& name) {
  for (std::size_t i = 0; i < kDriverCalls; ++i) {
    if (name_of(static_cast<DriverCall>(i)) == name) {
      return static_cast<DriverCall>(i);
    }
  }
  throw std::invalid_argument("a driver has no call '" + name + "'");
}

nb::dict facts_of(const Driver& driver) {
  const DeviceFacts facts = driver.facts();
  nb::dict all;
  all["name"] = facts.name;
  all["units"] = facts.compute_units.size();
  all["unit_granularity"] = facts.unit_granularity;
  all["memory_bytes"] = facts.memory_bytes;
  all["granularity_bytes"] = driver.granularity();
  return all;
}

void bind_faulty(nb::module_& module) {
  nb::class_<FaultyDriver, Driver>(module, "FaultyDriver",
                                   "A driver whose calls go wrong as they are told, for tests.")
      .def(
          "__init__",
          [](FaultyDriver* self, nb::object inner) { new (self) FaultyDriver(driver_from(inner)); },
          nb::arg("inner"), nb::keep_alive<1, 2>())
      .def(
          "fail",
          [](FaultyDriver& self, const std::string& call, std::int64_t n) {
            self.plan().fail(call_of(call), n);
          },
          nb::arg("call"), nb::arg("n"))
      .def(
          "fail_any", [](FaultyDriver& self, std::int64_t n) { self.plan().fail_any(n); },
          nb::arg("n"))
      .def(
          "lose_export", [](FaultyDriver& self, std::int64_t n) { self.plan().lose_export(n); },
          nb::arg("n"))
      .def(
          "before",
          [](FaultyDriver& self, const std::string& call, std::int64_t n,
             std::function<void()> action) {
            self.plan().before(call_of(call), n, std::move(action));
          },
          nb::arg("call"), nb::arg("n"), nb::arg("action"))
      .def("clear", [](FaultyDriver& self) { self.plan().clear(); })
      .def_prop_ro("calls", [](FaultyDriver& self) { return self.plan().calls(); })
      .def_prop_ro("fired", [](FaultyDriver& self) { return self.plan().fired(); });
}

GreenPartition::Side side_of(const std::string& side) {
  if (side != "decode" && side != "finetune") {
    throw std::invalid_argument("there is no side '" + side + "': use decode or finetune");
  }
  return side == "decode" ? GreenPartition::Side::kDecode : GreenPartition::Side::kFinetune;
}

void bind_green(nb::module_& module) {
  nb::class_<GreenPartition>(module, "GreenPartition",
                             "The SMs of one GPU in groups, shared by green contexts.")
      .def(
          "__init__",
          [](GreenPartition* self, const std::string& driver) {
            new (self) GreenPartition(dynamic_cast<CudaDriver&>(named_driver(driver)));
          },
          nb::arg("driver"))
      .def_prop_ro("total_units", &GreenPartition::total_units)
      .def_prop_ro("group_units", &GreenPartition::group_units)
      .def_prop_ro("groups", &GreenPartition::groups)
      .def(
          "stream",
          [](GreenPartition& self, const std::string& side, int groups) {
            return self.stream(side_of(side), groups);
          },
          nb::arg("side"), nb::arg("groups"))
      .def(
          "units",
          [](GreenPartition& self, const std::string& side, int groups) {
            return self.units(side_of(side), groups);
          },
          nb::arg("side"), nb::arg("groups"))
      .def(
          "measure",
          [](GreenPartition& self, const std::string& side, int groups) {
            nb::gil_scoped_release release;
            return self.measure(side_of(side), groups);
          },
          nb::arg("side"), nb::arg("groups"));
}

}  // namespace

Driver& driver_from(nb::handle driver) {
  return nb::isinstance<nb::str>(driver) ? named_driver(nb::cast<std::string>(driver))
                                         : nb::cast<Driver&>(driver);
}

void bind_drivers(nb::module_& module) {
  nb::class_<Driver>(module, "Driver", "What touches a device: memory, addresses, copies.")
      .def_prop_ro("name", &Driver::name)
      .def_prop_ro("facts", &facts_of);
  module.def("driver", &named_driver, nb::arg("name"), nb::rv_policy::reference);
  module.def("use_libcuda", &use_libcuda, nb::arg("library"));
  bind_faulty(module);
  bind_green(module);
}

}  // namespace windrow::bindings
