#include "windrow/weights.h"

#include <nanobind/stl/unique_ptr.h>

#include "bind.h"
#include "windrow/host_driver.h"

namespace windrow::bindings {

void bind_weights(nb::module_& module) {
  nb::class_<SharedWeights>(module, "SharedWeights",
                            "Sealed memory: written by its maker, read-only for everyone after.")
      .def_static(
          "create",
          [](std::int64_t n_bytes) {
            nb::gil_scoped_release release;
            return std::make_unique<SharedWeights>(host_driver(), n_bytes);
          },
          nb::arg("n_bytes"))
      .def_prop_ro("fd", &SharedWeights::fd)
      .def("tensor",
           [](const SharedWeights& self) {
             return make_tensor(self.mapping(), 0,
                                static_cast<std::int64_t>(self.mapping()->bytes()));
           })
      .def("seal", &SharedWeights::seal);
}

}  // namespace windrow::bindings
