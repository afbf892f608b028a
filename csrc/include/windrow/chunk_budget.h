#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "windrow/stream_epochs.h"

namespace windrow {

// A block by its place in the arena: chunk * blocks per chunk + block of the chunk.
using BlockId = std::int64_t;

// Until when a free block is in use. On `stream` it may be reused at once; on another one when
// `event` is done, for whoever switches streams orders them; by decode, in another process, when
// whatever ran in its epoch has ended on every stream.
struct Fence {
  StreamId stream = 0;
  std::shared_ptr<const Event> event;  // nullptr: none could be recorded, the epoch tells
  StreamEpochs::Epoch epoch = 0;

  [[nodiscard]] bool open_for(StreamId other, StreamEpochs& epochs) const {
    return other == stream || (event ? event->done() : epochs.ended(epoch));
  }
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
  // Takes a take() back: the blocks were not used, and their fences stand.
  void untake(std::span<const BlockId> blocks);
  // What has to end until every free block may be used on `stream`.
  [[nodiscard]] std::vector<std::shared_ptr<const Event>> pending(StreamId stream);

  [[nodiscard]] std::int64_t blocks_per_chunk() const { return blocks_per_chunk_; }
  // Of chunks that do not drain.
  [[nodiscard]] std::int64_t lent_chunks() const { return lent_; }
  [[nodiscard]] std::int64_t draining_chunks() const { return draining_; }
  [[nodiscard]] std::int64_t blocks_in_use() const { return in_use_; }
  // Of the longest run of free blocks with consecutive ids, whoever has just used them.
  [[nodiscard]] std::int64_t longest_run() const;

 private:
  enum class State : std::uint8_t { kAbsent, kLent, kDraining };
  struct Chunk {
    State state = State::kAbsent;
    std::int64_t free = 0;  // blocks
  };
  struct Block {
    bool free = false;
    Fence fence;  // since it was last put
  };

  // Blocks [first, first + blocks).
  struct Run {
    BlockId first = 0;
    std::int64_t blocks = 0;
  };

  // Runs of blocks that `may` accepts, in lent chunks, from the highest ids down.
  template <class May>
  [[nodiscard]] std::vector<Run> runs(May may) const;
  [[nodiscard]] std::vector<BlockId> find_chunks(std::int64_t blocks, StreamId stream) const;
  [[nodiscard]] Chunk& require(std::int64_t chunk);
  [[nodiscard]] bool to_be_had(BlockId block, StreamId stream) const;
  [[nodiscard]] bool quiet(std::int64_t chunk) const;
  [[nodiscard]] std::span<const Block> blocks_of(std::int64_t chunk) const;
  void mark_taken(std::span<const BlockId> blocks);

  std::int64_t blocks_per_chunk_;
  StreamEpochs* epochs_;
  std::vector<Chunk> chunks_;
  std::vector<Block> blocks_;
  std::int64_t lent_ = 0;
  std::int64_t draining_ = 0;
  std::int64_t in_use_ = 0;  // blocks
};

}  // namespace windrow
