#include "windrow/weights.h"

#include <nanobind/stl/unique_ptr.h>

#include "bind.h"

namespace windrow::bindings {

void bind_weights(nb::module_& module) {
  nb::class_<SharedWeights>(module, "SharedWeights",
                            "Sealed memory: written by its maker, read-only for everyone after.")
      .def_static(
          "create",
          [](std::int64_t n_bytes, nb::object driver) {
            Driver& chosen = driver_from(driver);
            nb::gil_scoped_release release;
            return std::make_unique<SharedWeights>(chosen, n_bytes);
          },
          nb::arg("n_bytes"), nb::kw_only(), nb::arg("driver") = "host", nb::keep_alive<0, 2>())
      .def_prop_ro("fd", &SharedWeights::fd)
      .def("tensor",
           [](const SharedWeights& self) {
             return make_tensor(self.mapping(), 0,
                                static_cast<std::int64_t>(self.mapping()->bytes()));
           })
      .def("seal", &SharedWeights::seal);
}

}  // namespace windrow::bindings
