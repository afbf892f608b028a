#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bind.h"
#include "windrow/arena.h"
#include "windrow/cuda_driver.h"
#include "windrow/cuda_streams.h"
#include "windrow/torch_entry.h"

namespace windrow::bindings {
namespace {

// What Python holds. Shared with the C entry points, which outlive the interpreter: they must not
// keep an object of Python's.
struct Handle {
  std::shared_ptr<DeviceAllocator> shared;
};

// An allocator with the streams of its GPU.
struct OnGpu {
  explicit OnGpu(CudaDriver& driver, std::shared_ptr<const ChunkMemory> memory)
      : streams(driver.context()), allocator(driver, streams, std::move(memory)) {}
  CudaStreams streams;
  DeviceAllocator allocator;
};

Handle over_arena(const Arena& arena) {
  if (auto* gpu = dynamic_cast<CudaDriver*>(&arena.driver())) {
    const auto both = std::make_shared<OnGpu>(*gpu, arena.blocks());
    return {{both, &both->allocator}};
  }
  return {std::make_shared<DeviceAllocator>(arena.driver(), host_streams(), arena.blocks())};
}

// A method of the allocator as one of the handle.
template <class Result, class... Arguments>
auto call(Result (DeviceAllocator::*method)(Arguments...)) {
  return [method](Handle& self, Arguments... arguments) {
    return ((*self.shared).*method)(arguments...);
  };
}

std::uintptr_t allocate(Handle& self, std::size_t n_bytes, StreamId stream) {
  return reinterpret_cast<std::uintptr_t>(self.shared->allocate(n_bytes, stream));
}

void release(Handle& self, std::uintptr_t address) {
  self.shared->free(reinterpret_cast<std::byte*>(address));
}

void record_stream(Handle& self, std::uintptr_t address, StreamId stream) {
  self.shared->record_stream(reinterpret_cast<std::byte*>(address), stream);
}

nb::dict figures_of(const Handle& self) {
  nb::dict figures;
  for (const auto& [name, value] : named(self.shared->stats())) {
    figures[name.c_str()] = value;
  }
  const MappingCalls calls = self.shared->mapping_calls();
  figures["num_device_alloc"] = calls.map;
  figures["num_device_set_access"] = calls.access;
  figures["num_device_free"] = calls.unmap;
  figures["num_device_alloc_saved"] = calls.saved;
  return figures;
}

std::size_t size_for(const std::vector<std::pair<std::int64_t, std::int64_t>>& trace) {
  std::vector<TraceStep> steps;
  steps.reserve(trace.size());
  for (const auto& [id, bytes] : trace) {
    steps.push_back({id, bytes});
  }
  return sized_for(steps);
}

}  // namespace

void bind_allocator(nb::module_& module) {
  module.attr("POOL_BLOCK_BYTES") = kPoolBlockBytes;
  module.def("small_pool_blocks_for", &size_for, nb::arg("trace"));
  nb::class_<Handle>(module, "DeviceAllocator",
                     "Memory for tensors from chunks that decode has lent.")
      .def_static("over", &over_arena, nb::arg("arena"))
      .def("lend", call(&DeviceAllocator::lend), nb::arg("chunk"))
      .def("drain", call(&DeviceAllocator::drain), nb::arg("chunk"))
      .def("shrink_to", call(&DeviceAllocator::shrink_to), nb::arg("chunks"))
      .def("take_quiet", call(&DeviceAllocator::take_quiet))
      .def("allocate", &allocate, nb::arg("n_bytes"), nb::kw_only(), nb::arg("stream") = 0,
           nb::call_guard<nb::gil_scoped_release>())  // it may wait for other streams
      .def("free", &release, nb::arg("address"))
      .def("record_stream", &record_stream, nb::arg("address"), nb::arg("stream"))
      .def("keep_small", call(&DeviceAllocator::keep_small), nb::arg("blocks"), nb::kw_only(),
           nb::arg("stream") = 0)
      .def("wait_freed", call(&DeviceAllocator::wait_freed),
           nb::call_guard<nb::gil_scoped_release>())
      .def("release_cached", call(&DeviceAllocator::release_cached))
      .def(
          "begin_pool",
          [](Handle& self, GraphPoolId pool, StreamId stream) {
            self.shared->begin_pool(pool, [stream](StreamId asked) { return asked == stream; });
          },
          nb::arg("pool"), nb::kw_only(), nb::arg("stream"),
          nb::call_guard<nb::gil_scoped_release>())
      .def("end_pool", call(&DeviceAllocator::end_pool), nb::arg("pool"))
      .def("release_pool", call(&DeviceAllocator::release_pool), nb::arg("pool"))
      .def("back_pool", call(&DeviceAllocator::back_pool), nb::arg("pool"), nb::arg("n_bytes"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("unback_pools", call(&DeviceAllocator::unback_pools),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "pool_bytes",
          [](const Handle& self, GraphPoolId pool) { return self.shared->pool_bytes(pool); },
          nb::arg("pool"))
      .def("backed_bytes", [](const Handle& self) { return self.shared->backed_bytes(); })
      .def("stats", &figures_of)
      .def("fragmentation_bytes",
           [](const Handle& self) { return self.shared->stats().fragmentation_bytes(); })
      .def("describe_budget", [](const Handle& self) { return self.shared->describe_budget(); })
      .def("check", [](const Handle& self) { self.shared->check(); });
  module.def(
      "serve_device",
      [](int device, const Handle* allocator) {
        serve_device(device, allocator == nullptr ? nullptr : allocator->shared);
      },
      nb::arg("device"), nb::arg("allocator").none());
}

}  // namespace windrow::bindings
