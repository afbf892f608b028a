#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "windrow/chunk_table.h"
#include "windrow/driver.h"
#include "windrow/lease.h"
#include "windrow/page.h"

namespace windrow::bindings {

namespace nb = nanobind;

// Each binds one part of the core into the module; called once, from module.cpp.
void bind_errors(nb::module_& module);
void bind_geometry(nb::module_& module);
void bind_partition(nb::module_& module);
void bind_drivers(nb::module_& module);
void bind_page(nb::module_& module);
void bind_decision(nb::module_& module);
void bind_harvest_step(nb::module_& module);
void bind_arena(nb::module_& module);
void bind_inspection(nb::module_& module);
void bind_weights(nb::module_& module);
void bind_allocator(nb::module_& module);

// Chunks by state, as Python has them.
[[nodiscard]] nb::tuple counts_tuple(const Counts& counts);

// 0: decode, 1: the worker. Throws std::invalid_argument.
[[nodiscard]] Writer writer_of(int writer);

// A Driver object or the name of one. Throws as named_driver does.
[[nodiscard]] Driver& driver_from(nb::handle driver);

// A uint8 tensor over part of a mapping, on the device that the memory is of, with `__dlpack__`;
// torch.from_dlpack takes it without a copy. The mapping lives until the tensor is gone. The DLPack
// read-only flag is not set, for torch refuses tensors that carry it: where the mapping is
// read-only, the kernel ends a process that writes.
[[nodiscard]] nb::object make_tensor(std::shared_ptr<LeasedMapping> mapping, std::int64_t offset,
                                     std::int64_t bytes);

// CLOCK_MONOTONIC `timeout_s` from now; infinite and huge timeouts become about 30 years.
[[nodiscard]] std::int64_t deadline_after(double timeout_s);

}  // namespace windrow::bindings
