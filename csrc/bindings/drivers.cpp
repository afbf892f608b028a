#include "windrow/drivers.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind.h"
#include "windrow/faulty_driver.h"

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
  all["uuid"] = facts.uuid;
  all["units"] = facts.compute_units.size();
  all["unit_granularity"] = facts.unit_granularity;
  all["memory_bytes"] = facts.memory_bytes;
  all["granularity_bytes"] = driver.granularity();
  all["version"] = facts.version;
  all["is_mps_client"] = facts.is_mps_client;
  return all;
}

void bind_faulty(nb::module_& module) {
  nb::class_<FaultyDriver, Driver>(module, "FaultyDriver",
                                   "A driver whose calls fail as a plan says, for tests.")
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

}  // namespace

Driver& driver_from(nb::handle driver) {
  return nb::isinstance<nb::str>(driver) ? named_driver(nb::cast<std::string>(driver))
                                         : nb::cast<Driver&>(driver);
}

void bind_drivers(nb::module_& module) {
  nb::class_<Driver>(module, "Driver", "What touches a device: memory, addresses, copies, shares.")
      .def_prop_ro("name", &Driver::name)
      .def_prop_ro("facts", &facts_of)
      .def(
          "partition",
          [](Driver& self, const std::vector<int>& units) { return self.partition(units); },
          nb::arg("units") = std::vector<int>{}, nb::keep_alive<0, 1>());
  module.def("driver", &named_driver, nb::arg("name"), nb::rv_policy::reference);
  module.def("gpu_uuids", &gpu_uuids);
  module.def("use_libcuda", &use_libcuda, nb::arg("library"));
  bind_faulty(module);
}

}  // namespace windrow::bindings
