#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "windrow/fd.h"
#include "windrow/partition.h"

namespace windrow {

enum class Access { kReadOnly, kReadWrite };

// What a device has to share.
struct DeviceFacts {
  std::string name;
  // Of the GPU, or of the MIG slice that the process has of it: 32 hexadecimal digits; empty on the
  // host.
  std::string uuid;
  std::vector<int> compute_units;     // cores on the host, SMs on a GPU; ids, ascending
  std::int64_t unit_granularity = 1;  // a partition takes a multiple of this many
  std::int64_t memory_bytes = 0;      // in all, of all processes
  int version = 0;                    // of CUDA's driver, 13000 for 13.0; 0 on the host
  // Whether this process and others run on the device at the same time: a GPU's context is shared
  // by MPS. A process that could not connect to the daemon runs on without it.
  bool is_mps_client = false;
};

// Who can read an address: every processor, or the device of that number only.
struct MemorySpace {
  bool processors = true;
  int device = 0;
};

// Physical memory with an exportable handle. Owned; freed when it and its mappings are gone.
class Memory {
 public:
  virtual ~Memory() = default;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  // A descriptor that another process can import. Throws Error.
  [[nodiscard]] virtual OwnedFd export_fd() const = 0;
  // From now on no new writable mapping of it is made; those that exist stay. For good. The host's
  // kernel holds every process to it; CUDA knows nothing like it, so there it binds this object
  // only and an importer has to keep to read-only mappings of its own accord.
  virtual void seal_writes() = 0;
};

// A memory, or part of one, among others that are mapped side by side.
struct Piece {
  const Memory* memory;
  std::size_t offset;
  std::size_t bytes;
};

// A range of addresses, at first backed by nothing. Unmaps and frees itself; nothing may point into
// it then. One thread at a time.
class Reservation {
 public:
  virtual ~Reservation() = default;
  [[nodiscard]] virtual std::byte* data() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  // Backs [offset, offset + bytes) with memory from `memory_offset` on; offsets are multiples of
  // the granularity, and so are sizes, save that of a range that ends where the reservation ends.
  // Resident when it returns: no first touch is paid later. The same memory again at the same place
  // changes its access. Throws Error.
  virtual void map(std::size_t offset, const Memory& memory, std::size_t memory_offset,
                   std::size_t bytes, Access access) = 0;
  // Backs consecutive addresses from `offset` on with those pieces, each as map() would: all or
  // none. Where access is a call of its own (CUDA), all of them get it by one. Each piece is
  // unmapped alone. Throws Error.
  virtual void map_run(std::size_t offset, std::span<const Piece> pieces, Access access);
  // A range that was mapped by one call, or by one piece of a run.
  virtual void unmap(std::size_t offset, std::size_t bytes) = 0;
  // Of what is mapped first in it. Throws Error where nothing is.
  [[nodiscard]] virtual MemorySpace space() const { return {}; }
};

// A point in a stream of work. Any thread.
class Event {
 public:
  virtual ~Event() = default;
  [[nodiscard]] virtual bool done() const = 0;
  virtual void wait() const = 0;
};

// Everything of the core that touches a device. What is above it (arena, weights, shares of a
// device) knows only this, so that one contract suite runs on every driver and a decorator can make
// any call of it fail.
//
// Thread: as the object it returns; the driver itself keeps no state between calls and may be
// called from any thread. Errors: Error, with the failed call in the message; a call that throws
// has changed nothing.
class Driver {
 public:
  virtual ~Driver() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual DeviceFacts facts() const = 0;
  // What offsets within memory and mappings are multiples of, in bytes.
  [[nodiscard]] virtual std::size_t granularity() const = 0;
  // Whether a mapping may cover part of a memory. Where not (CUDA), whatever is to be mapped or
  // handed over alone is a memory of its own.
  [[nodiscard]] virtual bool maps_parts() const { return true; }
  // The driver of memory that processors write: tables and pages that two processes share.
  [[nodiscard]] virtual Driver& host() { return *this; }
  // Throws Error unless no process can map the descriptor's memory writable any more. Where
  // the device has no seals to look at, there is nothing to check.
  virtual void require_sealed(int fd) const = 0;
  [[nodiscard]] virtual std::unique_ptr<Reservation> reserve(std::size_t bytes) = 0;
  // Zeroed memory of a fixed size. `label` shows in the system's own listings.
  [[nodiscard]] virtual std::unique_ptr<Memory> create(std::size_t bytes, const char* label) = 0;
  // Memory that another process exported, of exactly that many bytes.
  [[nodiscard]] virtual std::unique_ptr<Memory> import_fd(OwnedFd fd, std::size_t bytes) = 0;
  // Starts a copy; both ranges are mapped, or the caller's own memory, until the event is done.
  [[nodiscard]] virtual std::unique_ptr<Event> copy(std::byte* to, const std::byte* from,
                                                    std::size_t bytes) = 0;
  // A hold on those compute units, of facts(); none named: on all. A GPU is shared whole. Throws
  // DriverUnavailable where the device cannot be shared, std::invalid_argument for units that
  // cannot be chosen.
  [[nodiscard]] virtual std::unique_ptr<Partition> partition(std::span<const int> units) = 0;
};

// Maps the whole of a memory at an address of the driver's choice.
[[nodiscard]] std::unique_ptr<Reservation> map_whole(Driver& driver, const Memory& memory,
                                                     Access access);

}  // namespace windrow
