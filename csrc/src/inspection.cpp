#include "windrow/inspection.h"

#include "windrow/control.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"

namespace windrow {

// The control region is in the host's memory whatever device the blocks are on.
Inspection::Inspection(const std::string& socket_path, std::int64_t deadline_ns)
    : client_(socket_path, deadline_ns) {
  ArenaClient::Shared shared = client_.inspect();
  geometry_ = shared.geometry;
  Driver& host = host_driver();
  try {
    geometry_.validate(static_cast<std::int64_t>(host.granularity()));
    const auto memory = host.import_fd(std::move(shared.control),
                                       control_bytes(geometry_.chunks, host.granularity()));
    control_ = map_whole(host, *memory, Access::kReadOnly);
    require_control(control_->data(), geometry_);
  } catch (const AttachError&) {
    throw;
  } catch (const Error& error) {
    throw AttachError("the arena at " + socket_path + " cannot be looked at: " + error.what());
  }
  table_ = std::make_unique<const ChunkTable>(control_->data() + kTableOffset, geometry_.chunks,
                                              Side::kPeer);
}

const SharedPage& Inspection::page() const {
  return *reinterpret_cast<const SharedPage*>(control_->data() + kPageOffset);
}

}  // namespace windrow
