#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "windrow/geometry.h"
#include "windrow/page.h"

namespace windrow {

// Of everything that two processes read from the same memory or say over the socket. Any change of
// a size, an offset or a meaning raises it; a peer of another version is refused.
inline constexpr std::uint32_t kLayoutVersion = 7;
inline constexpr std::uint64_t kMagic = 0x31776F72646E6977;  // "windrow1"

// The head of the control region: the second memfd, which holds the page and the chunk table.
// Written once by the owner before anyone attaches.
struct alignas(kCacheLine) ControlHead {
  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t reserved;
  Geometry geometry;
  std::array<char, 16> driver;  // the owner's, by name: what the blocks are memory of
};
static_assert(sizeof(ControlHead) == 128);

inline constexpr std::size_t kPageOffset = sizeof(ControlHead);
inline constexpr std::size_t kTableOffset = kPageOffset + sizeof(SharedPage);
static_assert(kPageOffset == 128 && kTableOffset == 1664);

// Bytes of a control region, a multiple of the granularity.
[[nodiscard]] std::size_t control_bytes(std::int64_t chunks, std::size_t granularity);

// Makes head, page and table in zeroed memory. One thread, before the region is handed out.
void format_control(std::byte* base, const Geometry& geometry, std::int64_t reserve,
                    std::string_view driver);

// Throws AttachError where the region is not what this build reads. Any thread.
void require_control(const std::byte* base, const Geometry& geometry);

// The name of the driver on which a sound control region's owner made its blocks.
[[nodiscard]] std::string driver_of(const std::byte* base);

}  // namespace windrow
