#include "windrow/geometry.h"

#include <nanobind/stl/string.h>

#include <string>

#include "bind.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"

namespace windrow::bindings {
namespace {

constexpr const char* kPerLayer = "per-layer";
constexpr const char* kTokenMajor = "token-major";

KvLayout layout_of(const std::string& name) {
  if (name != kPerLayer && name != kTokenMajor) {
    throw GeometryError("layout '" + name + "' is none; use per-layer or token-major");
  }
  return name == kTokenMajor ? KvLayout::kTokenMajor : KvLayout::kPerLayer;
}

const char* name_of(KvLayout layout) {
  return layout == KvLayout::kTokenMajor ? kTokenMajor : kPerLayer;
}

std::string describe(const Geometry& g) {
  return "Geometry(layers=" + std::to_string(g.layers) +
         ", kv_heads=" + std::to_string(g.kv_heads) + ", head_dim=" + std::to_string(g.head_dim) +
         ", dtype_bytes=" + std::to_string(g.dtype_bytes) +
         ", block_bytes=" + std::to_string(g.block_bytes) + ", chunks=" + std::to_string(g.chunks) +
         ", layout='" + name_of(g.layout) + "')";
}

}  // namespace

void bind_geometry(nb::module_& module) {
  nb::class_<Geometry>(module, "Geometry",
                       "Sizes of an arena. A chunk is `2 * layers` blocks: K and V of every layer.")
      .def(
          "__init__",
          [](Geometry* self, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
             std::int64_t dtype_bytes, std::int64_t block_bytes, std::int64_t chunks,
             const std::string& layout) {
            const Geometry geometry{layers,      kv_heads, head_dim,         dtype_bytes,
                                    block_bytes, chunks,   layout_of(layout)};
            geometry.validate(static_cast<std::int64_t>(host_driver().granularity()));
            new (self) Geometry(geometry);
          },
          nb::kw_only(), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"),
          nb::arg("dtype_bytes"), nb::arg("block_bytes"), nb::arg("chunks"),
          nb::arg("layout") = kPerLayer)
      .def_ro("layers", &Geometry::layers)
      .def_ro("kv_heads", &Geometry::kv_heads)
      .def_ro("head_dim", &Geometry::head_dim)
      .def_ro("dtype_bytes", &Geometry::dtype_bytes)
      .def_ro("block_bytes", &Geometry::block_bytes)
      .def_ro("chunks", &Geometry::chunks)
      .def_prop_ro("layout", [](const Geometry& g) { return name_of(g.layout); })
      .def_prop_ro("slots_per_chunk", &Geometry::slots_per_chunk, "Tokens that a chunk holds.")
      .def_prop_ro("chunk_bytes", &Geometry::chunk_bytes)
      .def_prop_ro("arena_bytes", &Geometry::arena_bytes)
      .def(
          "__eq__", [](const Geometry& a, const Geometry& b) { return a == b; }, nb::is_operator())
      .def("__hash__",
           [](const Geometry& g) {
             return nb::hash(nb::make_tuple(g.layers, g.block_bytes, g.chunks));
           })
      .def("__repr__", &describe);
}

}  // namespace windrow::bindings
