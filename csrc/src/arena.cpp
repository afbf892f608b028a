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

std::size_t control_bytes_of(Driver& host, const Geometry& geometry) {
  return control_bytes(geometry.chunks, host.granularity());
}

// Decode's half: the control region, a copy of it and three more once it is served.
constexpr std::size_t kOtherDescriptors = 5;

bool is_cuda(std::string_view driver) {
  return driver.substr(0, 4) == "cuda";
}

// Before anything is made: the kernel would not refuse, but kill the process that serves.
void require_fits(const Driver& driver, const Geometry& geometry) {
  const std::int64_t whole = driver.facts().memory_bytes;
  if (geometry.arena_bytes() > whole) {
    throw GeometryError("an arena of " + std::to_string(geometry.arena_bytes()) +
                        " bytes is more than the device's " + std::to_string(whole) + "; at most " +
                        std::to_string(whole / geometry.chunk_bytes()) + " chunks of " +
                        std::to_string(geometry.chunk_bytes()) + " fit");
  }
  require_mappable(driver, geometry);
  // One for each memory, and its copy for those who attach.
  require_descriptors(2 * memories_of(driver, geometry) + kOtherDescriptors);
}

void require_reserve(const Geometry& geometry, std::int64_t reserved_chunks) {
  if (reserved_chunks < 0 || reserved_chunks > geometry.chunks) {
    throw GeometryError("reserved_chunks is " + std::to_string(reserved_chunks) +
                        "; the arena has " + std::to_string(geometry.chunks) + " chunks");
  }
}

}  // namespace

Arena::Arena(Driver& driver, const Geometry& geometry, Side side, std::unique_ptr<Blocks> blocks,
             std::unique_ptr<Memory> control, std::unique_ptr<Reservation> mapped_control)
    : driver_(&driver),
      geometry_(geometry),
      side_(side),
      blocks_(std::move(blocks)),
      control_memory_(std::move(control)),
      control_(std::make_shared<LeasedMapping>(std::move(mapped_control))),
      table_(std::make_unique<ChunkTable>(control_->data() + kTableOffset, geometry.chunks, side)) {
}

std::unique_ptr<Arena> Arena::create(Driver& driver, const Geometry& geometry,
                                     std::int64_t reserved_chunks) {
  geometry.validate(static_cast<std::int64_t>(driver.granularity()));
  require_reserve(geometry, reserved_chunks);
  require_fits(driver, geometry);
  auto blocks = Blocks::create(driver, geometry);
  Driver& host = driver.host();
  auto control = host.create(control_bytes_of(host, geometry), "windrow-control");
  auto mapped = map_whole(host, *control, Access::kReadWrite);
  format_control(mapped->data(), geometry, reserved_chunks, driver.name());
  return std::unique_ptr<Arena>(new Arena(driver, geometry, Side::kOwner, std::move(blocks),
                                          std::move(control), std::move(mapped)));
}

std::unique_ptr<Arena> Arena::attach(Driver& driver, const std::string& socket_path,
                                     std::int64_t deadline_ns) {
  const auto only = [&driver](const std::string& name) -> Driver& {
    if (name == driver.name()) {
      return driver;
    }
    if (name == driver.host().name()) {
      return driver.host();
    }
    // GPUs are numbered by each process for itself.
    if (is_cuda(name) && is_cuda(driver.name())) {
      return driver;
    }
    throw AttachError("the arena's blocks are on the " + name + " driver; attach with that one");
  };
  return attach(only, socket_path, deadline_ns);
}

std::unique_ptr<Arena> Arena::attach(const DriverOf& driver_of, const std::string& socket_path,
                                     std::int64_t deadline_ns) {
  ArenaClient client(socket_path, deadline_ns);
  try {
    ArenaClient::Shared shared = client.attach();
    const Geometry& geometry = shared.geometry;
    Driver& host = driver_of("host");
    geometry.validate(1);
    auto control = host.import_fd(std::move(shared.control), control_bytes_of(host, geometry));
    auto mapped = map_whole(host, *control, Access::kReadWrite);
    require_control(mapped->data(), geometry);
    Driver& driver = driver_of(windrow::driver_of(mapped->data()));
    geometry.validate(static_cast<std::int64_t>(driver.granularity()));
    auto blocks = Blocks::import(driver, geometry, std::move(shared.blocks));
    std::unique_ptr<Arena> arena(new Arena(driver, geometry, Side::kPeer, std::move(blocks),
                                           std::move(control), std::move(mapped)));
    arena->table_->check();
    arena->client_.emplace(std::move(client));
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
  return blocks_->mapping();
}

std::shared_ptr<LeasedMapping> Arena::mapping_of(std::int64_t offset, std::int64_t bytes) {
  require_open();
  const std::int64_t whole = geometry_.arena_bytes();
  if (offset < 0 || bytes < 1 || offset > whole || bytes > whole - offset) {
    throw std::out_of_range(std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                            " are not inside of the arena's " + std::to_string(whole));
  }
  if (blocks_->maps_on_demand()) {
    const std::int64_t first = offset / geometry_.chunk_bytes();
    const std::int64_t last = (offset + bytes - 1) / geometry_.chunk_bytes();
    for (std::int64_t chunk = first; chunk <= last; ++chunk) {
      const ChunkState state = table_->chunk(chunk).word.state;
      if (state != ChunkState::kLent && state != ChunkState::kDraining) {
        throw OwnershipError("chunk " + std::to_string(chunk) + " is " +
                             std::string(name_of(state)) +
                             "; a worker on a device reaches lent chunks only");
      }
    }
    blocks_->map_chunks(first, last);
  }
  return blocks_->mapping();
}

std::shared_ptr<const Blocks> Arena::blocks() const {
  require_open();
  return blocks_;
}

std::int64_t Arena::chunk_offset(std::int64_t chunk) const {
  require_open();
  if (chunk < 0 || chunk >= geometry_.chunks) {
    throw std::out_of_range("chunk " + std::to_string(chunk) + " is none of the arena's " +
                            std::to_string(geometry_.chunks));
  }
  return blocks_->block_offset(chunk, 0);
}

KvView Arena::kv_view(std::int64_t layer, bool value) const {
  require_open();
  if (layer < 0 || layer >= geometry_.layers) {
    throw std::out_of_range("layer " + std::to_string(layer) + " is none of the arena's " +
                            std::to_string(geometry_.layers));
  }
  return blocks_->kv_view(layer, value);
}

void Arena::serve(const std::string& socket_path) {
  require_open();
  require_owner("serve");
  if (server_) {
    throw AttachError("the arena is served already");
  }
  require_descriptors(memories_of(*driver_, geometry_));
  // Given to the server before it listens: a worker may ask for them at once.
  std::map<std::string, SizedFd> named;
  for (const auto& [name, exported] : exported_) {
    named.emplace(name, SizedFd{exported.fd.duplicate(), exported.bytes});
  }
  server_ = std::make_unique<ArenaServer>(socket_path, geometry_, control_memory_->export_fd(),
                                          blocks_->export_fds(), std::move(named));
}

void Arena::export_named(const std::string& name, int fd, std::size_t bytes) {
  require_open();
  require_owner("export");
  driver_->require_sealed(fd);
  if (name.empty() || name.size() >= sizeof(Request::name)) {
    throw std::invalid_argument("the name '" + name + "' must have 1 to 63 bytes");
  }
  SizedFd exported{duplicate_fd(fd), bytes == 0 ? file_bytes(fd) : bytes};
  if (server_) {
    server_->add(name, {exported.fd.duplicate(), exported.bytes});
  }
  exported_.insert_or_assign(name, std::move(exported));
}

std::vector<pid_t> Arena::peers() const {
  require_open();
  require_owner("peers");
  return server_ ? server_->peers() : std::vector<pid_t>{};
}

bool Arena::owner_lives() const {
  require_open();
  require_peer("owner_lives");
  return client_->owner_lives();
}

std::shared_ptr<LeasedMapping> Arena::imported(const std::string& name) {
  require_open();
  require_peer("imported");
  auto& mapping = imported_[name];
  if (!mapping) {
    ArenaClient::Named named = client_->named(name);
    mapping = map_sealed(*driver_, std::move(named.fd), named.bytes);
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
  if (const std::string live = blocks_->mapping()->describe_live(); !live.empty()) {
    throw LiveTensorsError("the arena cannot be closed while tensors over it live (" + live +
                           "); delete them first");
  }
  server_.reset();
  client_.reset();
  imported_.clear();
  table_.reset();
  blocks_.reset();
  control_.reset();
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

void Arena::require_peer(const char* call) const {
  if (is_owner()) {
    throw OwnershipError(std::string(call) + " is the worker's call; this process is the owner");
  }
}

}  // namespace windrow
