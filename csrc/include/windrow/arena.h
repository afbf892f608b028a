#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "windrow/blocks.h"
#include "windrow/chunk_table.h"
#include "windrow/client.h"
#include "windrow/driver.h"
#include "windrow/geometry.h"
#include "windrow/lease.h"
#include "windrow/page.h"
#include "windrow/server.h"

namespace windrow {

// All blocks of a slot, with their table of owners and the shared page.
//
// Decode creates it and is its one owner; workers attach over the socket. Decode maps everything
// once, for good: lending changes who may use a chunk and maps nothing there. A worker does the
// same on the host; on a device it maps what it is lent (see Blocks). One thread at a time (the
// server's thread shares nothing with it but descriptors). After close() every call throws Error;
// pages and tensors that were handed out keep their memory mapped until they are gone.
class Arena {
 public:
  // Throws GeometryError, or Error when the machine does not have the memory.
  [[nodiscard]] static std::unique_ptr<Arena> create(Driver& driver, const Geometry& geometry,
                                                     std::int64_t reserved_chunks);
  // Waits for a server at `socket_path` until the deadline (CLOCK_MONOTONIC). Throws AttachError.
  // The driver is asked for by the name of the owner's, and by "host" for table and page.
  using DriverOf = std::function<Driver&(const std::string& name)>;
  [[nodiscard]] static std::unique_ptr<Arena> attach(const DriverOf& driver_of,
                                                     const std::string& socket_path,
                                                     std::int64_t deadline_ns);
  // With that driver only; an owner with another one is an AttachError.
  [[nodiscard]] static std::unique_ptr<Arena> attach(Driver& driver, const std::string& socket_path,
                                                     std::int64_t deadline_ns);

  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] bool is_owner() const { return side_ == Side::kOwner; }
  [[nodiscard]] Driver& driver() const { return *driver_; }
  [[nodiscard]] ChunkTable& table();
  // Shares ownership of the control mapping.
  [[nodiscard]] std::shared_ptr<SharedPage> page() const;
  [[nodiscard]] std::shared_ptr<LeasedMapping> mapping() const;
  // The same, with that extent of it there to be used. A worker on a device gets lent chunks only:
  // OwnershipError names the first one that is not LENT or DRAINING. Throws std::out_of_range.
  [[nodiscard]] std::shared_ptr<LeasedMapping> mapping_of(std::int64_t offset, std::int64_t bytes);
  // Places of the blocks; outlives the arena as long as somebody holds it.
  [[nodiscard]] std::shared_ptr<const Blocks> blocks() const;
  // Byte of the mapping where a chunk's first block begins. Throws std::out_of_range.
  [[nodiscard]] std::int64_t chunk_offset(std::int64_t chunk) const;
  // Throws std::out_of_range.
  [[nodiscard]] KvView kv_view(std::int64_t layer, bool value) const;

  // Owner.
  void serve(const std::string& socket_path);
  // Duplicates the descriptor, which must be sealed against writes (see SharedWeights). `bytes` is
  // the memory's size; 0: as large as the file.
  void export_named(const std::string& name, int fd, std::size_t bytes = 0);
  [[nodiscard]] std::vector<pid_t> peers() const;

  // Peer: false once the owner has died or closed; a heartbeat that stops may be a pause only.
  [[nodiscard]] bool owner_lives() const;

  // Peer: maps what the owner exported under that name, read-only; once, however often asked.
  [[nodiscard]] std::shared_ptr<LeasedMapping> imported(const std::string& name);

  // Throws Error with the first broken invariant of control region and table.
  void check() const;
  // Throws LiveTensorsError while tensors over the arena live. Idempotent.
  void close();

 private:
  Arena(Driver& driver, const Geometry& geometry, Side side, std::unique_ptr<Blocks> blocks,
        std::unique_ptr<Memory> control, std::unique_ptr<Reservation> mapped_control);
  void require_open() const;
  void require_owner(const char* call) const;
  void require_peer(const char* call) const;

  Driver* driver_;
  Geometry geometry_;
  Side side_;
  std::shared_ptr<Blocks> blocks_;  // null once closed
  std::unique_ptr<Memory> control_memory_;
  std::shared_ptr<LeasedMapping> control_;
  std::unique_ptr<ChunkTable> table_;
  std::map<std::string, SizedFd> exported_;  // until there is a server to hand them to
  std::unique_ptr<ArenaServer> server_;
  std::optional<ArenaClient> client_;  // peer: as long as it is attached
  std::map<std::string, std::shared_ptr<LeasedMapping>> imported_;
};

}  // namespace windrow
