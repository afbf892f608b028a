#include "windrow/device_allocator.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <unordered_set>
#include <utility>

#include "windrow/error.h"

namespace windrow {
namespace {

bool is_small(std::size_t bytes) {
  return bytes < kPoolBlockBytes;
}

std::int64_t signed_bytes(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

std::string mebibytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// In blocks that tensors can take. Before anything is made of it.
std::shared_ptr<const ChunkMemory> in_blocks(const Driver& driver,
                                             std::shared_ptr<const ChunkMemory> memory) {
  const std::size_t block = memory->block_bytes();
  if (!driver.maps_parts() && memory->backing(0, 0).memory->bytes() != block) {
    return std::make_shared<PiecesOfChunks>(std::move(memory));
  }
  if (kPoolBlockBytes % block != 0) {
    throw GeometryError("blocks of " + std::to_string(block) +
                        " bytes do not divide the small pool's 2 MiB");
  }
  return memory;
}

}  // namespace

DeviceAllocator::DeviceAllocator(Driver& driver, Streams& streams,
                                 std::shared_ptr<const ChunkMemory> memory)
    : streams_(&streams),
      memory_(in_blocks(driver, std::move(memory))),
      epochs_(streams),
      budget_(memory_->chunks(), memory_->blocks_per_chunk(), epochs_),
      aliases_(driver, memory_, epochs_),
      graphs_(driver, memory_, epochs_) {}

DeviceAllocator::~DeviceAllocator() {
  try {
    epochs_.close()->wait();
  } catch (const DeviceGone&) {
    // Nothing runs any more.
  } catch (const Error& error) {
    std::fprintf(stderr, "windrow: lent memory is unmapped without waiting for the device: %s\n",
                 error.what());
  }
}

void DeviceAllocator::lend(std::int64_t chunk) {
  const MutexLock lock(mutex_);
  budget_.lend(chunk);
}

void DeviceAllocator::drain(std::int64_t chunk) {
  const MutexLock lock(mutex_);
  budget_.drain(chunk);
  trim_pools(nullptr);
}

void DeviceAllocator::shrink_to(std::int64_t chunks) {
  const MutexLock lock(mutex_);
  budget_.shrink_to(chunks);
  trim_pools(nullptr);
}

std::vector<std::int64_t> DeviceAllocator::take_quiet() {
  const MutexLock lock(mutex_);
  if (capture_) {
    return {};  // whether anything has ended can be asked only afterwards
  }
  if (budget_.draining_chunks() > 0) {
    release_done();
    trim_pools(nullptr);
  }
  graphs_.settle();
  return budget_.take_quiet();
}

std::byte* DeviceAllocator::allocate(std::size_t bytes, StreamId stream) {
  if (bytes == 0) {
    return nullptr;
  }
  for (bool is_retry = false;; is_retry = true) {
    Events waited_for;
    {
      const MutexLock lock(mutex_);
      if (capture_ && capture_->filter(stream)) {
        std::byte* const address = graphs_.take(capture_->pool, bytes);
        stats_.allocation.add(false, 1);
        stats_.requested_bytes.add(false, signed_bytes(bytes));
        return address;
      }
      await_capture();
      release_done();
      if (std::byte* address = try_allocate(bytes, stream); address != nullptr) {
        const Size size = size_at(address);
        stats_.allocation.add(size.is_small, 1);
        stats_.requested_bytes.add(size.is_small, signed_bytes(size.requested));
        stats_.allocated_bytes.add(size.is_small, signed_bytes(size.rounded));
        stats_.active.add(size.is_small, 1);
        stats_.active_bytes.add(size.is_small, signed_bytes(size.rounded));
        return address;
      }
      stats_.alloc_retries += is_retry ? 0 : 1;
      waited_for = pending(stream);
      if (waited_for.empty()) {
        ++stats_.ooms;
        throw BudgetError("out of memory: " + std::to_string(bytes) + " bytes do not fit into " +
                          describe_locked() +
                          "; use a smaller micro-batch or window, or wait until decode lends more");
      }
      ++stats_.sync_all_streams;
    }
    for (const auto& event : waited_for) {
      event->wait();
    }
  }
}

void DeviceAllocator::free(std::byte* address) {
  const MutexLock lock(mutex_);
  if (graphs_.contains(address)) {
    const std::size_t bytes = graphs_.give(address);
    stats_.allocation.add(false, -1);
    stats_.requested_bytes.add(false, -signed_bytes(bytes));
    return;
  }
  const Size size = size_of(address);
  if (const auto recorded = recorded_.find(address); recorded != recorded_.end()) {
    deferred_.emplace(address, deferred_behind(recorded->second));
    recorded_.erase(recorded);
  } else {
    release(address);
  }
  stats_.allocation.add(size.is_small, -1);
  stats_.requested_bytes.add(size.is_small, -signed_bytes(size.requested));
  stats_.allocated_bytes.add(size.is_small, -signed_bytes(size.rounded));
}

void DeviceAllocator::record_stream(const std::byte* address, StreamId stream) {
  const MutexLock lock(mutex_);
  if (graphs_.contains(address)) {
    static_cast<void>(graphs_.requested(address));
    return;  // nobody else gets it
  }
  static_cast<void>(size_of(address));
  if (segments_.at(slot(address)).stream == stream) {
    return;
  }
  epochs_.uses(stream);
  auto& streams = recorded_[address];
  if (std::ranges::find(streams, stream) == streams.end()) {
    streams.push_back(stream);
  }
}

std::size_t DeviceAllocator::keep_small(std::size_t blocks, StreamId stream) {
  const MutexLock lock(mutex_);
  await_capture();
  return pool_of(stream).pool.keep(blocks);
}

void DeviceAllocator::wait_freed() {
  for (bool is_last = false; !is_last;) {
    std::shared_ptr<const Event> everything;
    {
      const MutexLock lock(mutex_);
      await_capture();
      release_done();
      trim_pools(nullptr);
      // What recorded streams still use is freed when they are done, in a later epoch.
      is_last = deferred_.empty();
      everything = epochs_.close();
    }
    everything->wait();
  }
}

void DeviceAllocator::release_cached() {
  wait_freed();
  const MutexLock lock(mutex_);
  await_capture();
  aliases_.clear();
  graphs_.clear();
}

void DeviceAllocator::begin_pool(GraphPoolId pool, std::function<bool(StreamId)> filter) {
  const MutexLock lock(mutex_);
  await_capture();
  graphs_.open(pool);
  capture_ = {pool, std::move(filter), std::this_thread::get_id()};
}

void DeviceAllocator::end_pool(GraphPoolId pool) {
  const MutexLock lock(mutex_);
  if (!capture_ || capture_->pool != pool) {
    throw Error("no capture of that pool is on its way");
  }
  capture_.reset();
  capture_ended_.notify_all();
}

void DeviceAllocator::release_pool(GraphPoolId pool) {
  const MutexLock lock(mutex_);
  graphs_.release(pool);
}

bool DeviceAllocator::back_pool(GraphPoolId pool, std::size_t bytes) {
  const MutexLock lock(mutex_);
  await_capture();
  const std::int64_t before = backed_locked();
  const bool is_backed = graphs_.back(pool, bytes, budget_);
  stats_.reserved_bytes.add(false, backed_locked() - before);
  return is_backed;
}

void DeviceAllocator::unback_pools() {
  const MutexLock lock(mutex_);
  await_capture();
  const std::int64_t before = backed_locked();
  graphs_.unback(budget_);
  stats_.reserved_bytes.add(false, backed_locked() - before);
}

std::size_t DeviceAllocator::pool_bytes(GraphPoolId pool) const {
  const MutexLock lock(mutex_);
  return graphs_.bytes_of(pool);
}

std::size_t DeviceAllocator::backed_bytes() const {
  const MutexLock lock(mutex_);
  return static_cast<std::size_t>(backed_locked());
}

std::int64_t DeviceAllocator::backed_locked() const {
  return signed_bytes(graphs_.blocks().size() * memory_->block_bytes());
}

void DeviceAllocator::await_capture() {
  if (capture_ && capture_->thread == std::this_thread::get_id()) {
    throw Error("memory of a stream that does not capture is asked for in the middle of a capture");
  }
  while (capture_) {
    capture_ended_.wait(mutex_);
  }
}

AllocatorStats DeviceAllocator::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

MappingCalls DeviceAllocator::mapping_calls() const {
  const MutexLock lock(mutex_);
  MappingCalls calls = aliases_.calls();
  calls.map += graphs_.calls().map;
  calls.access += graphs_.calls().access;
  calls.unmap += graphs_.calls().unmap;
  return calls;
}

std::string DeviceAllocator::describe_budget() const {
  const MutexLock lock(mutex_);
  return describe_locked();
}

void DeviceAllocator::check() const {
  const MutexLock lock(mutex_);
  std::unordered_set<BlockId> used;
  std::int64_t reserved = 0;
  for (const auto& [slot, segment] : segments_) {
    reserved += signed_bytes(segment.alias->blocks.size() * memory_->block_bytes());
    for (const BlockId block : segment.alias->blocks) {
      if (!used.insert(block).second) {
        throw Error("the allocator is broken: a block is in two segments");
      }
    }
  }
  for (const BlockId block : graphs_.blocks()) {
    if (!used.insert(block).second) {
      throw Error("the allocator is broken: a block of graphs is in a segment");
    }
  }
  reserved += backed_locked();
  if (std::ssize(used) != budget_.blocks_in_use() ||
      reserved != stats_.reserved_bytes.all.current) {
    throw Error("the allocator is broken: its segments are not what its budget says");
  }
  for (const auto& [stream, pool] : pools_) {
    pool->pool.check();
  }
}

std::byte* DeviceAllocator::StreamPool::take_block() {
  return owner.take_segment(kPoolBlockBytes, stream, this);
}

void DeviceAllocator::StreamPool::return_block(std::byte* block) noexcept {
  owner.return_segment(block);
}

bool DeviceAllocator::Deferred::done(StreamEpochs& epochs) const {
  return std::ranges::all_of(events, [](const auto& event) { return event->done(); }) &&
         epochs.ended(epoch);
}

std::size_t DeviceAllocator::slot(const std::byte* address) const {
  return static_cast<std::size_t>(address - aliases_.base()) / kPoolBlockBytes;
}

std::size_t DeviceAllocator::blocks_for(std::size_t bytes) const {
  return (bytes + memory_->block_bytes() - 1) / memory_->block_bytes();
}

DeviceAllocator::Size DeviceAllocator::size_of(const std::byte* address) const {
  if (deferred_.contains(const_cast<std::byte*>(address))) {
    throw Error("no live allocation begins at that address; was it freed twice?");
  }
  return size_at(address);
}

DeviceAllocator::Size DeviceAllocator::size_at(const std::byte* address) const {
  const auto found = segments_.find(slot(address));
  if (found != segments_.end()) {
    const Segment& segment = found->second;
    if (segment.pool != nullptr) {
      const std::size_t requested = segment.pool->pool.requested(address);
      return {requested, std::max(kLeafBytes, std::bit_ceil(requested)), true};
    }
    if (segment.alias->address == address) {
      return {segment.requested, segment.alias->blocks.size() * memory_->block_bytes(), false};
    }
  }
  throw Error("no live allocation begins at that address; was it freed twice?");
}

DeviceAllocator::StreamPool& DeviceAllocator::pool_of(StreamId stream) {
  auto& pool = pools_[stream];
  if (!pool) {
    pool = std::make_unique<StreamPool>(*this, stream);
  }
  return *pool;
}

// nullptr where the budget does not suffice as things are now.
std::byte* DeviceAllocator::try_allocate(std::size_t bytes, StreamId stream) {
  if (is_small(bytes)) {
    return pool_of(stream).pool.allocate(bytes);
  }
  return take_segment(bytes, stream, nullptr);
}

std::byte* DeviceAllocator::take_segment(std::size_t bytes, StreamId stream, StreamPool* pool) {
  const std::size_t blocks = blocks_for(bytes);
  auto alias = find_alias(blocks, stream);
  if (!alias) {
    trim_pools(pool);
    alias = find_alias(blocks, stream);
  }
  if (!alias) {
    return nullptr;
  }
  epochs_.uses(stream);
  std::byte* address = alias->address;
  segments_[slot(address)] = {std::move(alias), stream, bytes, pool};
  stats_.segment.add(pool != nullptr, 1);
  stats_.reserved_bytes.add(pool != nullptr, signed_bytes(blocks * memory_->block_bytes()));
  return address;
}

std::unique_ptr<Alias> DeviceAllocator::find_alias(std::size_t blocks, StreamId stream) {
  lacks_addresses_ = false;
  if (auto alias = aliases_.reuse(blocks, budget_, stream)) {
    return alias;
  }
  const auto wanted = static_cast<std::int64_t>(blocks);
  std::vector<BlockId> taken = memory_->one_memory_a_chunk()
                                   ? budget_.take_side_by_side(wanted, stream)
                                   : budget_.take(wanted, stream);
  if (taken.empty()) {
    return nullptr;
  }
  try {
    auto alias = aliases_.map(taken);
    lacks_addresses_ = alias == nullptr;
    if (lacks_addresses_) {
      budget_.put(taken, {stream, epochs_.now()});
    }
    return alias;
  } catch (...) {
    budget_.put(taken, {stream, epochs_.now()});
    throw;
  }
}

// nullptr where the device does not give one; then the epoch decides.
std::shared_ptr<const Event> DeviceAllocator::try_record(StreamId stream) noexcept {
  try {
    return streams_->record(stream);
  } catch (const DeviceGone&) {
    return nullptr;  // torch frees what is left when the process ends
  } catch (const std::exception& error) {
    std::fprintf(stderr, "windrow: freed memory waits for all streams: %s\n", error.what());
    return nullptr;
  }
}

DeviceAllocator::Deferred DeviceAllocator::deferred_behind(std::span<const StreamId> streams) {
  Deferred deferred;
  for (const StreamId stream : streams) {
    if (auto event = capture_ ? nullptr : try_record(stream)) {
      deferred.events.push_back(std::move(event));
    } else {
      deferred.epoch = epochs_.now();
    }
  }
  return deferred;
}

void DeviceAllocator::return_segment(std::byte* address) {
  const auto found = segments_.find(slot(address));
  Segment& segment = found->second;
  const std::size_t bytes = segment.alias->blocks.size() * memory_->block_bytes();
  stats_.segment.add(segment.pool != nullptr, -1);
  stats_.reserved_bytes.add(segment.pool != nullptr, -signed_bytes(bytes));
  budget_.put(segment.alias->blocks, {segment.stream, epochs_.now()});
  auto alias = std::move(segment.alias);
  segments_.erase(found);
  aliases_.idle(std::move(alias));
}

// What was freed and is used by no recorded stream any more.
void DeviceAllocator::release(std::byte* address) {
  const Size size = size_at(address);
  if (StreamPool* pool = segments_.at(slot(address)).pool; pool != nullptr) {
    pool->pool.free(address);
  } else {
    return_segment(address);
  }
  stats_.active.add(size.is_small, -1);
  stats_.active_bytes.add(size.is_small, -signed_bytes(size.rounded));
}

void DeviceAllocator::release_done() {
  for (auto deferred = deferred_.begin(); deferred != deferred_.end();) {
    if (deferred->second.done(epochs_)) {
      release(deferred->first);
      deferred = deferred_.erase(deferred);
    } else {
      ++deferred;
    }
  }
}

void DeviceAllocator::trim_pools(const StreamPool* except) {
  for (const auto& [stream, pool] : pools_) {
    if (pool.get() != except) {
      pool->pool.trim();
    }
  }
}

// What has to end before a request on `stream` is tried again; nothing where that will not help.
DeviceAllocator::Events DeviceAllocator::pending(StreamId stream) {
  Events events;
  if (auto event = budget_.pending(stream)) {
    events.push_back(std::move(event));
  }
  for (const auto& [address, deferred] : deferred_) {
    events.insert(events.end(), deferred.events.begin(), deferred.events.end());
    if (!epochs_.ended(deferred.epoch)) {
      events.push_back(epochs_.close());
    }
  }
  if (lacks_addresses_) {
    events.push_back(epochs_.close());
  }
  return events;
}

std::string DeviceAllocator::describe_locked() const {
  const std::size_t block = memory_->block_bytes();
  const auto chunks = static_cast<std::size_t>(budget_.lent_chunks());
  const auto per_chunk = static_cast<std::size_t>(budget_.blocks_per_chunk());
  std::string text = "the budget of " + std::to_string(chunks) + " chunks of " +
                     mebibytes(per_chunk * block) + ", of which " +
                     mebibytes(static_cast<std::size_t>(budget_.blocks_in_use()) * block) +
                     " are in use";
  if (budget_.draining_chunks() > 0) {
    text += " (" + std::to_string(budget_.draining_chunks()) + " more chunks drain)";
  }
  if (memory_->one_memory_a_chunk()) {
    text += "; at most " + mebibytes(static_cast<std::size_t>(budget_.longest_run()) * block) +
            " of the rest are side by side";
  }
  return text;
}

}  // namespace windrow
