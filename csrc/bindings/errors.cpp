#include "bind.h"
#include "windrow/error.h"

namespace windrow::bindings {

void bind_errors(nb::module_& module) {
  // Derived classes last: nanobind asks the newest translator first.
  nb::exception<Error> base(module, "Error");
  nb::exception<GeometryError>(module, "GeometryError", base);
  nb::exception<AttachError>(module, "AttachError", base);
  nb::exception<OwnershipError>(module, "OwnershipError", base);
  nb::exception<LiveTensorsError>(module, "LiveTensorsError", base);
  nb::exception<DriverUnavailable>(module, "DriverUnavailable", base);
  nb::exception<BudgetError>(module, "BudgetError", base);
}

}  // namespace windrow::bindings
