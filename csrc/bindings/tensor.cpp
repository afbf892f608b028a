#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>

#include "bind.h"
#include "windrow/clock.h"

namespace windrow::bindings {

nb::object make_tensor(std::shared_ptr<LeasedMapping> mapping, std::int64_t offset,
                       std::int64_t bytes) {
  const MemorySpace space = mapping->reservation().space();
  auto lease = std::make_unique<Lease>(std::move(mapping), offset, bytes);
  std::byte* data = lease->data();
  const std::size_t size = lease->bytes();
  nb::capsule keeper(lease.release(),
                     [](void* claim) noexcept { delete static_cast<Lease*>(claim); });
  using Tensor = nb::ndarray<std::uint8_t, nb::ndim<1>>;
  return nb::cast(Tensor(data, {size}, keeper, {}, nb::dtype<std::uint8_t>(),
                         space.processors ? nb::device::cpu::value : nb::device::cuda::value,
                         space.processors ? 0 : space.device));
}

std::int64_t deadline_after(double timeout_s) {
  constexpr double kLongest_s = 1e9;
  const double clamped = std::clamp(timeout_s, 0.0, kLongest_s);
  return monotonic_ns() + static_cast<std::int64_t>(clamped * 1e9);
}

}  // namespace windrow::bindings
