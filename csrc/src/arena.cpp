#include "windrow/arena.h"

#include <algorithm>
#include <stdexcept>

#include "windrow/clock.h"
#include "windrow/control.h"
#include "windrow/error.h"
#include "windrow/socket.h"
#include "windrow/weights.h"

namespace windrow {
namespace {

// The server answers from a thread that does nothing else; so long only if its process is stopped.
constexpr std::int64_t kAnswerWithinNs = 5'000'000'000;

std::size_t arena_bytes(const Geometry& geometry) {
  return static_cast<std::size_t>(geometry.arena_bytes());
}

Request request_for(Ask ask, const std::string& name) {
  Request request{};
  request.magic = kMagic;
  request.layout_version = kLayoutVersion;
  request.ask = ask;
  put_text(request.name, name);
  return request;
}

}  // namespace

Arena::Arena(Driver& driver, const Geometry& geometry, Side side, std::unique_ptr<Memory> blocks,
             std::unique_ptr<Memory> control)
    : driver_(&driver),
      geometry_(geometry),
      side_(side),
      blocks_memory_(std::move(blocks)),
      control_memory_(std::move(control)),
      blocks_(
          std::make_shared<LeasedMapping>(map_whole(driver, *blocks_memory_, Access::kReadWrite))),
      control_(std::make_shared<LeasedMapping>(
          map_whole(driver, *control_memory_, Access::kReadWrite))) {}

std::unique_ptr<Arena> Arena::create(Driver& driver, const Geometry& geometry,
                                     std::int64_t reserved_chunks) {
  geometry.validate(static_cast<std::int64_t>(driver.granularity()));
  if (reserved_chunks < 0 || reserved_chunks > geometry.chunks) {
    throw GeometryError("reserved_chunks is " + std::to_string(reserved_chunks) +
                        "; the arena has " + std::to_string(geometry.chunks) + " chunks");
  }
  auto blocks = driver.create(arena_bytes(geometry), "windrow-arena");
  auto control =
      driver.create(control_bytes(geometry.chunks, driver.granularity()), "windrow-control");
  std::unique_ptr<Arena> arena(
      new Arena(driver, geometry, Side::kOwner, std::move(blocks), std::move(control)));
  std::byte* base = arena->control_->data();
  format_control(base, geometry, reserved_chunks);
  arena->table_ = std::make_unique<ChunkTable>(base + kTableOffset, geometry.chunks, Side::kOwner);
  return arena;
}

std::unique_ptr<Arena> Arena::attach(Driver& driver, const std::string& socket_path,
                                     std::int64_t deadline_ns) {
  OwnedFd connection = connect_to(socket_path, deadline_ns);
  send_request(connection.get(), request_for(Ask::kAttach, ""));
  Received received =
      receive_reply(connection.get(), std::max(deadline_ns, monotonic_ns() + kAnswerWithinNs));
  const Geometry geometry = received.reply.geometry;
  try {
    geometry.validate(static_cast<std::int64_t>(driver.granularity()));
    if (received.fds.size() != 2) {
      throw AttachError("the arena's server sent " + std::to_string(received.fds.size()) +
                        " descriptors, not 2");
    }
    auto blocks = driver.import_fd(std::move(received.fds[0]), arena_bytes(geometry));
    auto control = driver.import_fd(std::move(received.fds[1]),
                                    control_bytes(geometry.chunks, driver.granularity()));
    std::unique_ptr<Arena> arena(
        new Arena(driver, geometry, Side::kPeer, std::move(blocks), std::move(control)));
    require_control(arena->control_->data(), geometry);
    arena->table_ = std::make_unique<ChunkTable>(arena->control_->data() + kTableOffset,
                                                 geometry.chunks, Side::kPeer);
    arena->connection_ = std::move(connection);
    return arena;
  } catch (const AttachError&) {
    throw;
  } catch (const Error& error) {
    throw AttachError(std::string("the arena at ") + socket_path +
                      " cannot be mapped: " + error.what());
  }
}

ChunkTable& Arena::table() {
  require_open();
  return *table_;
}

std::shared_ptr<SharedPage> Arena::page() const {
  require_open();
  return {control_, reinterpret_cast<SharedPage*>(control_->data() + kPageOffset)};
}

std::shared_ptr<LeasedMapping> Arena::mapping() const {
  require_open();
  return blocks_;
}

std::int64_t Arena::chunk_offset(std::int64_t chunk) const {
  if (chunk < 0 || chunk >= geometry_.chunks) {
    throw std::out_of_range("chunk " + std::to_string(chunk) + " is none of the arena's " +
                            std::to_string(geometry_.chunks));
  }
  return chunk * geometry_.chunk_bytes();
}

void Arena::serve(const std::string& socket_path) {
  require_open();
  require_owner("serve");
  if (server_) {
    throw AttachError("the arena is served already");
  }
  auto server = std::make_unique<ArenaServer>(socket_path, geometry_, blocks_memory_->export_fd(),
                                              control_memory_->export_fd());
  for (const auto& [name, fd] : exported_) {
    server->add(name, fd.duplicate());
  }
  server_ = std::move(server);
}

void Arena::export_named(const std::string& name, int fd) {
  require_open();
  require_owner("export");
  require_sealed(fd);
  if (name.empty() || name.size() >= sizeof(Request::name)) {
    throw std::invalid_argument("the name '" + name + "' must have 1 to 63 bytes");
  }
  OwnedFd copy = duplicate_fd(fd);
  if (server_) {
    server_->add(name, copy.duplicate());
  }
  exported_.insert_or_assign(name, std::move(copy));
}

std::vector<pid_t> Arena::peers() const {
  require_open();
  require_owner("peers");
  return server_ ? server_->peers() : std::vector<pid_t>{};
}

std::shared_ptr<LeasedMapping> Arena::imported(const std::string& name) {
  require_open();
  if (is_owner()) {
    throw OwnershipError("imported is the worker's call; the owner has the weights themselves");
  }
  auto& mapping = imported_[name];
  if (!mapping) {
    send_request(connection_.get(), request_for(Ask::kNamed, name));
    Received received = receive_reply(connection_.get(), monotonic_ns() + kAnswerWithinNs);
    if (received.fds.size() != 1) {
      throw AttachError("the arena's server sent no descriptor for '" + name + "'");
    }
    mapping = map_sealed(*driver_, std::move(received.fds[0]), received.reply.named_bytes);
  }
  return mapping;
}

void Arena::check() const {
  require_open();
  require_control(control_->data(), geometry_);
  table_->check();
}

void Arena::close() {
  if (!blocks_) {
    return;
  }
  if (const std::string live = blocks_->describe_live(); !live.empty()) {
    throw LiveTensorsError("the arena cannot be closed while tensors over it live (" + live +
                           "); delete them first");
  }
  server_.reset();
  connection_.reset();
  imported_.clear();
  table_.reset();
  blocks_.reset();
  control_.reset();
  blocks_memory_.reset();
  control_memory_.reset();
  exported_.clear();
}

void Arena::require_open() const {
  if (!blocks_) {
    throw Error("the arena is closed");
  }
}

void Arena::require_owner(const char* call) const {
  if (!is_owner()) {
    throw OwnershipError(std::string(call) + " is decode's call; this process only borrows");
  }
}

}  // namespace windrow
