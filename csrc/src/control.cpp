#include "windrow/control.h"

#include <cstring>
#include <new>
#include <string>

#include "windrow/chunk_table.h"
#include "windrow/error.h"

namespace windrow {

std::size_t control_bytes(std::int64_t chunks, std::size_t granularity) {
  const std::size_t bytes = kTableOffset + ChunkTable::bytes(chunks);
  return (bytes + granularity - 1) / granularity * granularity;
}

void format_control(std::byte* base, const Geometry& geometry, std::int64_t reserve,
                    std::string_view driver) {
  auto* head = new (base) ControlHead{.magic = kMagic,
                                      .layout_version = kLayoutVersion,
                                      .reserved = 0,
                                      .geometry = geometry,
                                      .driver = {}};
  driver.copy(head->driver.data(), head->driver.size() - 1);
  new (base + kPageOffset) SharedPage{};
  ChunkTable::format(base + kTableOffset, geometry.chunks, reserve);
}

void require_control(const std::byte* base, const Geometry& geometry) {
  const auto& head = *reinterpret_cast<const ControlHead*>(base);
  if (head.magic != kMagic) {
    throw AttachError("the control region is not Windrow's");
  }
  if (head.layout_version != kLayoutVersion) {
    throw AttachError("the control region has layout " + std::to_string(head.layout_version) +
                      ", this build reads " + std::to_string(kLayoutVersion) +
                      "; use the same release on both sides");
  }
  if (head.geometry != geometry) {
    throw AttachError("the control region has another geometry than the socket said");
  }
}

std::string driver_of(const std::byte* base) {
  const auto& name = reinterpret_cast<const ControlHead*>(base)->driver;
  return {name.data(), ::strnlen(name.data(), name.size())};
}

}  // namespace windrow
