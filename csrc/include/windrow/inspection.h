#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "windrow/chunk_table.h"
#include "windrow/client.h"
#include "windrow/driver.h"
#include "windrow/geometry.h"
#include "windrow/page.h"

namespace windrow {

// A look at a live arena from another process: geometry, table of owners and shared page, mapped
// read-only. Borrows nothing, is not a peer, and can break nothing. What it shows is of now, and
// each chunk is read separately. One thread at a time.
class Inspection {
 public:
  // Waits for a server until the deadline (CLOCK_MONOTONIC). Throws AttachError.
  Inspection(const std::string& socket_path, std::int64_t deadline_ns);

  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] pid_t owner() const { return client_.owner(); }
  [[nodiscard]] bool owner_lives() const { return client_.owner_lives(); }
  [[nodiscard]] const ChunkTable& table() const { return *table_; }
  [[nodiscard]] const SharedPage& page() const;

 private:
  ArenaClient client_;
  Geometry geometry_;
  std::unique_ptr<Reservation> control_;
  std::unique_ptr<const ChunkTable> table_;
};

}  // namespace windrow
