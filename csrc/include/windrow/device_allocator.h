#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "windrow/alias_cache.h"
#include "windrow/allocator_stats.h"
#include "windrow/chunk_budget.h"
#include "windrow/chunk_memory.h"
#include "windrow/driver.h"
#include "windrow/graph_pools.h"
#include "windrow/mutex.h"
#include "windrow/small_pool.h"
#include "windrow/streams.h"

namespace windrow {

// A device allocator that lives on lent chunks: the worker's whole torch allocation on CUDA.
//
//   below 2 MiB   a SmallPool for each stream
//   from 2 MiB    whole blocks, of any lent chunks, mapped to consecutive addresses; where the
//   driver
//                 maps a chunk as a whole (token-major on CUDA), pieces of 2 MiB that are side by
//                 side in it
//
// Memory that was freed on a stream is reusable on that stream at once and on others when what ran
// there has ended; where record_stream named more streams, nowhere before all of them are done.
// The budget may grow and shrink at any time: a drained chunk is handed out no more, and leaves
// when its last block is free and whatever was queued before that has ended, on every stream.
//
// While a stream captures (begin_pool to end_pool) it makes no call of the driver: an event behind
// all streams ends every capture of the context, and mapping one in CUDA's strictest mode. Other
// threads that need such a call wait for the end of the capture, a few milliseconds; chunks become
// quiet after it.
//
// Thread: any; one lock, under which nothing waits for the device. Decode never waits for it: it
// holds the lock of this process only.
class DeviceAllocator {
 public:
  // The budget is empty at first. `driver` and `streams` outlive it. Throws GeometryError where
  // blocks do not divide 2 MiB, or chunks that are mapped whole are not a multiple of it; Error
  // where addresses cannot be reserved.
  DeviceAllocator(Driver& driver, Streams& streams, std::shared_ptr<const ChunkMemory> memory);
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;
  // Waits for whatever runs.
  ~DeviceAllocator();

  // The budget; errors as ChunkBudget has them. What drain() asks for is complete when
  // take_quiet() names the chunk: only then may it be given back to decode.
  void lend(std::int64_t chunk);
  void drain(std::int64_t chunk);
  void shrink_to(std::int64_t chunks);
  [[nodiscard]] std::vector<std::int64_t> take_quiet();

  // Memory for use on `stream`, at least 2 KiB-aligned; nullptr for 0 bytes. Throws BudgetError
  // that names the budget where it does not suffice, after waiting for what other streams still
  // use; Error where mapping fails. Nothing has changed then.
  [[nodiscard]] std::byte* allocate(std::size_t bytes, StreamId stream);
  // Throws Error where no live allocation begins there. Where the device cannot tell when a
  // recorded stream is done with it, the memory waits for all streams.
  void free(std::byte* address);
  // The allocation is used on `stream` too. Throws as free().
  void record_stream(const std::byte* address, StreamId stream);

  // Holds so many blocks of 2 MiB for small requests on `stream` (see sized_for); returns how many
  // it could get.
  std::size_t keep_small(std::size_t blocks, StreamId stream);
  // Returns when nothing uses what was freed before this call, on any stream; chunks that were
  // drained and hold no live allocation are quiet then.
  void wait_freed();
  // Gives up everything that is not in use: empty pool blocks, idle aliases. Waits for whatever
  // runs.
  void release_cached();

  // Memory of CUDA graphs (GraphPools), as torch asks for it: from here to end_pool() what streams
  // of `filter` allocate is of that pool, and one more graph of it lives. Throws Error where
  // addresses cannot be reserved, or a capture is on its way.
  void begin_pool(GraphPoolId pool, std::function<bool(StreamId)> filter);
  void end_pool(GraphPoolId pool);
  void release_pool(GraphPoolId pool);
  // See GraphPools; not during a capture.
  [[nodiscard]] bool back_pool(GraphPoolId pool, std::size_t bytes);
  void unback_pools();
  [[nodiscard]] std::size_t pool_bytes(GraphPoolId pool) const;
  // Bytes of lent memory behind all pools.
  [[nodiscard]] std::size_t backed_bytes() const;

  // Whether the address is one of its ranges, used or not.
  [[nodiscard]] bool contains(const void* address) const {
    const MutexLock lock(mutex_);
    return aliases_.contains(address) || graphs_.contains(address);
  }
  [[nodiscard]] AllocatorStats stats() const;
  [[nodiscard]] MappingCalls mapping_calls() const;
  // "budget of 3 chunks of 24.0 MiB, 70.0 MiB of it in use".
  [[nodiscard]] std::string describe_budget() const;
  // Throws Error with the first broken invariant. Walks everything: for tests.
  void check() const;

 private:
  // The small requests of one stream. Its blocks are aliases like any large tensor.
  struct StreamPool final : BlockSource {
    StreamPool(DeviceAllocator& of, StreamId its_stream) WINDROW_REQUIRES(of.mutex_)
        : owner(of), stream(its_stream), pool(*this, of.aliases_.base()) {}
    [[nodiscard]] std::byte* take_block() override WINDROW_REQUIRES(owner.mutex_);
    void return_block(std::byte* block) noexcept override WINDROW_REQUIRES(owner.mutex_);

    DeviceAllocator& owner;
    StreamId stream;
    SmallPool pool;
  };
  // An alias in use: a large tensor, or a block of a small pool.
  struct Segment {
    std::unique_ptr<Alias> alias;
    StreamId stream = 0;
    std::size_t requested = 0;   // large
    StreamPool* pool = nullptr;  // small: whose block it is
  };
  struct Size {
    std::size_t requested;
    std::size_t rounded;
    bool is_small;
  };
  using Events = std::vector<std::shared_ptr<const Event>>;
  // Freed, but a recorded stream still uses it.
  struct Deferred {
    Events events;
    StreamEpochs::Epoch epoch = 0;  // of a stream on which no event could be recorded

    [[nodiscard]] bool done(StreamEpochs& epochs) const;
  };

  [[nodiscard]] std::size_t slot(const std::byte* address) const WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::size_t blocks_for(std::size_t bytes) const;
  // Of the allocation there, freed and deferred or not; throws Error where none begins.
  [[nodiscard]] Size size_at(const std::byte* address) const WINDROW_REQUIRES(mutex_);
  // Of a live allocation; throws Error where none begins.
  [[nodiscard]] Size size_of(const std::byte* address) const WINDROW_REQUIRES(mutex_);
  [[nodiscard]] StreamPool& pool_of(StreamId stream) WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::byte* try_allocate(std::size_t bytes, StreamId stream)
      WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::byte* take_segment(std::size_t bytes, StreamId stream, StreamPool* pool)
      WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::unique_ptr<Alias> find_alias(std::size_t blocks, StreamId stream)
      WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<const Event> try_record(StreamId stream) noexcept;
  [[nodiscard]] Deferred deferred_behind(std::span<const StreamId> streams)
      WINDROW_REQUIRES(mutex_);
  void return_segment(std::byte* address) WINDROW_REQUIRES(mutex_);
  void release(std::byte* address) WINDROW_REQUIRES(mutex_);
  void release_done() WINDROW_REQUIRES(mutex_);
  void trim_pools(const StreamPool* except) WINDROW_REQUIRES(mutex_);
  [[nodiscard]] Events pending(StreamId stream) WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::string describe_locked() const WINDROW_REQUIRES(mutex_);
  // Waits until no other thread captures. Throws Error where this one does.
  void await_capture() WINDROW_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t backed_locked() const WINDROW_REQUIRES(mutex_);

  struct Capture {
    GraphPoolId pool;
    std::function<bool(StreamId)> filter;
    std::thread::id thread;
  };

  mutable Mutex mutex_;
  std::condition_variable_any capture_ended_;
  Streams* streams_;
  std::shared_ptr<const ChunkMemory> memory_;
  StreamEpochs epochs_ WINDROW_GUARDED_BY(mutex_);
  ChunkBudget budget_ WINDROW_GUARDED_BY(mutex_);
  AliasCache aliases_ WINDROW_GUARDED_BY(mutex_);
  GraphPools graphs_ WINDROW_GUARDED_BY(mutex_);
  std::optional<Capture> capture_ WINDROW_GUARDED_BY(mutex_);
  // Until idle aliases that may be in use are unmapped.
  bool lacks_addresses_ WINDROW_GUARDED_BY(mutex_) = false;
  // By the slot of 2 MiB in which they begin.
  std::unordered_map<std::size_t, Segment> segments_ WINDROW_GUARDED_BY(mutex_);
  std::unordered_map<const std::byte*, std::vector<StreamId>> recorded_ WINDROW_GUARDED_BY(mutex_);
  std::unordered_map<std::byte*, Deferred> deferred_ WINDROW_GUARDED_BY(mutex_);
  AllocatorStats stats_ WINDROW_GUARDED_BY(mutex_);
  // Last: they return their segments.
  std::unordered_map<StreamId, std::unique_ptr<StreamPool>> pools_ WINDROW_GUARDED_BY(mutex_);
};

}  // namespace windrow
