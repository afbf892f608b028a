#include "windrow/arena.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bind.h"
#include "windrow/drivers.h"

namespace windrow::bindings {
namespace {

nb::bytes states_of(Arena& arena) {
  const auto states = arena.table().states();
  return nb::bytes(reinterpret_cast<const char*>(states.data()), states.size());
}

std::string describe(const ChunkInfo& info) {
  return "ChunkInfo(" + std::string(name_of(info.word.state)) +
         ", owner=" + std::to_string(info.word.owner) +
         ", epoch=" + std::to_string(info.word.epoch) + ")";
}

void bind_chunk_info(nb::module_& module) {
  nb::class_<ChunkInfo>(module, "ChunkInfo")
      .def_prop_ro("state", [](const ChunkInfo& i) { return static_cast<int>(i.word.state); })
      .def_prop_ro("owner", [](const ChunkInfo& i) { return i.word.owner; })
      .def_prop_ro("epoch", [](const ChunkInfo& i) { return i.word.epoch; })
      .def_ro("since_ns", &ChunkInfo::since_ns)
      .def("__repr__", &describe);
}

void bind_table(nb::class_<Arena>& arena) {
  arena.def("counts", [](Arena& self) { return counts_tuple(self.table().counts()); })
      .def(
          "chunk", [](Arena& self, std::int64_t chunk) { return self.table().chunk(chunk); },
          nb::arg("chunk"))
      .def("states", &states_of)
      .def("take_kv", [](Arena& self) { return self.table().take_kv(); })
      .def(
          "return_kv", [](Arena& self, std::int64_t chunk) { self.table().return_kv(chunk); },
          nb::arg("chunk"))
      .def(
          "set_reserve",
          [](Arena& self, std::int64_t chunks) { return self.table().set_reserve(chunks); },
          nb::arg("chunks"))
      .def(
          "lend",
          [](Arena& self, std::int64_t chunks, std::int64_t owner) {
            return self.table().lend(chunks, owner);
          },
          nb::arg("chunks"), nb::kw_only(), nb::arg("owner"))
      .def(
          "revoke", [](Arena& self, std::int64_t chunks) { return self.table().revoke(chunks); },
          nb::arg("chunks"))
      .def(
          "reclaim", [](Arena& self, std::int64_t owner) { return self.table().reclaim(owner); },
          nb::arg("owner"))
      .def(
          "take_kv_chunk",
          [](Arena& self, std::int64_t chunk) { self.table().take_kv_chunk(chunk); },
          nb::arg("chunk"))
      .def(
          "lend_chunk",
          [](Arena& self, std::int64_t chunk, std::int64_t owner) {
            self.table().lend_chunk(chunk, owner);
          },
          nb::arg("chunk"), nb::kw_only(), nb::arg("owner"))
      .def(
          "revoke_chunk",
          [](Arena& self, std::int64_t chunk) { return self.table().revoke_chunk(chunk); },
          nb::arg("chunk"))
      .def(
          "held",
          [](Arena& self, std::int64_t owner) {
            return self.table().held_in(ChunkState::kLent, owner);
          },
          nb::arg("owner"))
      .def(
          "draining",
          [](Arena& self, std::int64_t owner) {
            return self.table().held_in(ChunkState::kDraining, owner);
          },
          nb::arg("owner"))
      .def(
          "give_back",
          [](Arena& self, std::int64_t chunk, std::int64_t owner) {
            self.table().give_back(chunk, owner);
          },
          nb::arg("chunk"), nb::kw_only(), nb::arg("owner"));
}

nb::object imported_tensor(Arena& arena, const std::string& name) {
  std::shared_ptr<LeasedMapping> mapping;
  {
    nb::gil_scoped_release release;
    mapping = arena.imported(name);
  }
  const auto bytes = static_cast<std::int64_t>(mapping->bytes());
  return make_tensor(std::move(mapping), 0, bytes);
}

std::unique_ptr<Arena> attach(const std::string& socket_path, double timeout_s, nb::object driver) {
  const std::int64_t deadline = deadline_after(timeout_s);
  if (driver.is_none()) {
    nb::gil_scoped_release release;
    return Arena::attach(named_driver, socket_path, deadline);
  }
  Driver& chosen = driver_from(driver);
  nb::gil_scoped_release release;
  return Arena::attach(chosen, socket_path, deadline);
}

nb::tuple kv_view(const Arena& arena, std::int64_t layer, bool value) {
  const KvView view = arena.kv_view(layer, value);
  return nb::make_tuple(view.offset, view.chunk_stride, view.slot_stride);
}

}  // namespace

nb::tuple counts_tuple(const Counts& counts) {
  return nb::make_tuple(counts[0], counts[1], counts[2], counts[3], counts[4]);
}

void bind_arena(nb::module_& module) {
  bind_chunk_info(module);
  nb::class_<Arena> arena(module, "Arena",
                          "All blocks of a slot, their table of owners, and the shared page.");
  arena
      .def_static(
          "create",
          [](const Geometry& geometry, std::int64_t reserved_chunks, nb::object driver) {
            Driver& chosen = driver_from(driver);
            nb::gil_scoped_release release;
            return Arena::create(chosen, geometry, reserved_chunks);
          },
          nb::arg("geometry"), nb::kw_only(), nb::arg("reserved_chunks"),
          nb::arg("driver") = "host", nb::keep_alive<0, 3>())
      .def_static("attach", &attach, nb::arg("socket_path"), nb::kw_only(),
                  nb::arg("timeout_s") = 5.0, nb::arg("driver") = nb::none(),
                  nb::keep_alive<0, 3>())
      .def_prop_ro("geometry", [](const Arena& self) { return self.geometry(); })
      .def_prop_ro("driver", [](const Arena& self) { return std::string(self.driver().name()); })
      .def_prop_ro("is_owner", &Arena::is_owner)
      .def_prop_ro("page", &Arena::page)
      .def(
          "tensor",
          [](Arena& self, std::int64_t offset, std::int64_t n_bytes) {
            return make_tensor(self.mapping_of(offset, n_bytes), offset, n_bytes);
          },
          nb::arg("offset"), nb::arg("n_bytes"))
      .def("chunk_offset", &Arena::chunk_offset, nb::arg("chunk"))
      .def_prop_ro("block_stride", [](const Arena& self) { return self.blocks()->block_stride(); })
      .def("kv_view", &kv_view, nb::arg("layer"), nb::kw_only(), nb::arg("value"))
      .def("serve", &Arena::serve, nb::arg("socket_path"))
      .def("export", &Arena::export_named, nb::arg("name"), nb::arg("fd"), nb::kw_only(),
           nb::arg("n_bytes") = 0)
      .def("peers", &Arena::peers)
      .def("owner_lives", &Arena::owner_lives)
      .def("imported", &imported_tensor, nb::arg("name"))
      .def("check", &Arena::check)
      .def("close", &Arena::close, nb::call_guard<nb::gil_scoped_release>());
  bind_table(arena);
}

}  // namespace windrow::bindings
