#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "windrow/stream_epochs.h"

namespace windrow {

// A block by its place in the arena: chunk * blocks per chunk + block of the chunk.
using BlockId = std::int64_t;

// Until when a free block is in use. On `stream` it may be reused at once; on another one, and by
// decode in another process, when whatever ran in its epoch has ended on every stream. An event for
// each freed tensor would tell other streams a little sooner: calls of the driver by the hundred in
// every tasklet, for streams that change a few times a second.
struct Fence {
  StreamId stream = 0;
  StreamEpochs::Epoch epoch = 0;

  friend bool operator==(const Fence&, const Fence&) = default;
};

// Which chunks decode has lent us, and which of their blocks are free. It decides and maps nothing.
//
// A chunk is lent, then drained (its free blocks are handed out no more), then gone, when all of
// its blocks are free and nothing that may use them runs on any stream. Thread: one at a time.
class ChunkBudget {
 public:
  // `epochs` outlives it.
  ChunkBudget(std::int64_t chunks, std::int64_t blocks_per_chunk, StreamEpochs& epochs);

  // Throw std::out_of_range for an id that the arena does not have, and Error for a chunk that is
  // lent already, or is not (drain).
  void lend(std::int64_t chunk);
  void drain(std::int64_t chunk);
  // Drains the lowest ids, as the table of owners revokes them, until at most that many chunks are
  // left that do not drain.
  void shrink_to(std::int64_t chunks);
  // Chunks that were drained and are quiet; they are ours no more.
  [[nodiscard]] std::vector<std::int64_t> take_quiet();

  // So many free blocks for use on `stream`, from the highest chunks: decode asks for those last.
  // All or none (empty).
  [[nodiscard]] std::vector<BlockId> take(std::int64_t blocks, StreamId stream);
  // The same with consecutive ids, from the shortest run that has so many, so that long ones stay
  // long; where there is none, whole chunks in any order and the first blocks of one more.
  [[nodiscard]] std::vector<BlockId> take_side_by_side(std::int64_t blocks, StreamId stream);
  // The same for blocks that the caller names. False: one of them is not to be had; none is taken.
  [[nodiscard]] bool take_these(std::span<const BlockId> blocks, StreamId stream);
  void put(std::span<const BlockId> blocks, const Fence& fence);
  // What has to end until every free block may be used on `stream`; nullptr: nothing has to.
  [[nodiscard]] std::shared_ptr<const Event> pending(StreamId stream);

  [[nodiscard]] std::int64_t blocks_per_chunk() const { return blocks_per_chunk_; }
  // Of chunks that do not drain.
  [[nodiscard]] std::int64_t lent_chunks() const { return lent_; }
  [[nodiscard]] std::int64_t draining_chunks() const { return draining_; }
  [[nodiscard]] std::int64_t blocks_in_use() const { return in_use_; }
  // Of the longest run of free blocks with consecutive ids, whichever stream used them last.
  [[nodiscard]] std::int64_t longest_run() const;

 private:
  enum class State : std::uint8_t { kAbsent, kLent, kDraining };
  struct Chunk {
    State state = State::kAbsent;
    std::int64_t free = 0;  // blocks
    // The newest in which one of its blocks was put.
    StreamEpochs::Epoch epoch = 0;
  };
  // Free blocks of one fence, in lent chunks: [first, first + blocks), by the first.
  struct Run {
    std::int64_t blocks = 0;
    Fence fence;
  };
  using Runs = std::map<BlockId, Run>;
  struct Range {
    BlockId first = 0;
    std::int64_t blocks = 0;
  };

  // What `find` finds; where others have used free blocks, again once the device has said what of
  // that has ended.
  template <class Find>
  [[nodiscard]] std::vector<BlockId> find_settled(Find find, StreamId stream);
  [[nodiscard]] std::vector<BlockId> find_any(std::int64_t blocks, StreamId stream) const;
  [[nodiscard]] std::vector<BlockId> find_side_by_side(std::int64_t blocks, StreamId stream) const;
  [[nodiscard]] std::vector<BlockId> find_chunks(std::int64_t blocks, StreamId stream) const;
  // Calls `use` with each stretch of consecutive ids in one chunk, until it says no.
  template <class Use>
  bool each_stretch(std::span<const BlockId> blocks, Use use) const;
  // The run that holds the block, or the first one behind it.
  [[nodiscard]] Runs::const_iterator run_at(BlockId block) const;
  // Whether all of the range is free and may be used on `stream`.
  [[nodiscard]] bool open(Range range, StreamId stream) const;
  [[nodiscard]] bool open(const Fence& fence, StreamId stream) const {
    return fence.stream == stream || fence.epoch <= epochs_->last_ended();
  }
  // The newest epoch of free blocks that may not be used on `stream` yet; 0: there are none.
  [[nodiscard]] StreamEpochs::Epoch newest_closed(StreamId stream) const;
  [[nodiscard]] Chunk& require(std::int64_t chunk);
  [[nodiscard]] Chunk& chunk_of(BlockId block);
  void insert(Range range, const Fence& fence);
  void cut_out(Range range);
  void mark_taken(std::span<const BlockId> blocks);

  std::int64_t blocks_per_chunk_;
  StreamEpochs* epochs_;
  std::vector<Chunk> chunks_;
  Runs free_;
  std::int64_t lent_ = 0;
  std::int64_t draining_ = 0;
  std::int64_t in_use_ = 0;  // blocks
};

}  // namespace windrow
