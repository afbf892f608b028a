#include "windrow/chunk_budget.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "windrow/error.h"

namespace windrow {

ChunkBudget::ChunkBudget(std::int64_t chunks, std::int64_t blocks_per_chunk, StreamEpochs& epochs)
    : blocks_per_chunk_(blocks_per_chunk),
      epochs_(&epochs),
      chunks_(static_cast<std::size_t>(chunks)),
      blocks_(static_cast<std::size_t>(chunks * blocks_per_chunk)) {}

void ChunkBudget::lend(std::int64_t chunk) {
  Chunk& lent = require(chunk);
  if (lent.state != State::kAbsent) {
    throw Error("chunk " + std::to_string(chunk) + " is in the allocator's budget already");
  }
  lent = {State::kLent, blocks_per_chunk_};
  for (std::int64_t i = 0; i < blocks_per_chunk_; ++i) {
    blocks_[static_cast<std::size_t>(chunk * blocks_per_chunk_ + i)] = {.free = true, .fence = {}};
  }
  ++lent_;
}

void ChunkBudget::drain(std::int64_t chunk) {
  Chunk& lent = require(chunk);
  if (lent.state == State::kAbsent) {
    throw Error("chunk " + std::to_string(chunk) + " is not in the allocator's budget");
  }
  if (lent.state == State::kLent) {
    lent.state = State::kDraining;
    --lent_;
    ++draining_;
  }
}

void ChunkBudget::shrink_to(std::int64_t chunks) {
  for (std::int64_t id = 0; id < std::ssize(chunks_) && lent_ > std::max<std::int64_t>(chunks, 0);
       ++id) {
    if (chunks_[static_cast<std::size_t>(id)].state == State::kLent) {
      drain(id);
    }
  }
}

std::vector<std::int64_t> ChunkBudget::take_quiet() {
  std::vector<std::int64_t> gone;
  for (std::int64_t id = 0; id < std::ssize(chunks_) && draining_ > 0; ++id) {
    if (quiet(id)) {
      gone.push_back(id);
      chunks_[static_cast<std::size_t>(id)] = {};
      --draining_;
    }
  }
  return gone;
}

std::vector<BlockId> ChunkBudget::take(std::int64_t blocks, StreamId stream) {
  std::vector<BlockId> found;
  found.reserve(static_cast<std::size_t>(blocks));
  for (std::size_t chunk = chunks_.size(); chunk-- > 0 && std::ssize(found) < blocks;) {
    if (chunks_[chunk].state != State::kLent || chunks_[chunk].free == 0) {
      continue;
    }
    const auto first = static_cast<BlockId>(chunk) * blocks_per_chunk_;
    for (BlockId id = first; id < first + blocks_per_chunk_ && std::ssize(found) < blocks; ++id) {
      if (to_be_had(id, stream)) {
        found.push_back(id);
      }
    }
  }
  if (std::ssize(found) < blocks) {
    return {};
  }
  mark_taken(found);
  return found;
}

std::vector<BlockId> ChunkBudget::take_side_by_side(std::int64_t blocks, StreamId stream) {
  Run best;
  for (const Run& run : runs([&](BlockId id) { return to_be_had(id, stream); })) {
    if (run.blocks >= blocks && (best.blocks == 0 || run.blocks < best.blocks)) {
      best = run;
    }
  }
  std::vector<BlockId> found;
  if (best.blocks > 0) {
    found.resize(static_cast<std::size_t>(blocks));
    std::iota(found.begin(), found.end(), best.first + best.blocks - blocks);
  } else if (blocks > blocks_per_chunk_) {
    found = find_chunks(blocks, stream);
  }
  mark_taken(found);
  return found;
}

bool ChunkBudget::take_these(std::span<const BlockId> blocks, StreamId stream) {
  const bool all = std::ranges::all_of(blocks, [&](BlockId id) { return to_be_had(id, stream); });
  if (all) {
    mark_taken(blocks);
  }
  return all;
}

void ChunkBudget::put(std::span<const BlockId> blocks, const Fence& fence) {
  for (const BlockId id : blocks) {
    blocks_[static_cast<std::size_t>(id)].fence = fence;
  }
  untake(blocks);
}

void ChunkBudget::untake(std::span<const BlockId> blocks) {
  for (const BlockId id : blocks) {
    blocks_[static_cast<std::size_t>(id)].free = true;
    ++chunks_[static_cast<std::size_t>(id / blocks_per_chunk_)].free;
  }
  in_use_ -= std::ssize(blocks);
}

std::int64_t ChunkBudget::longest_run() const {
  std::int64_t longest = 0;
  for (const Run& run :
       runs([&](BlockId id) { return blocks_[static_cast<std::size_t>(id)].free; })) {
    longest = std::max(longest, run.blocks);
  }
  return longest;
}

template <class May>
std::vector<ChunkBudget::Run> ChunkBudget::runs(May may) const {
  std::vector<Run> found;
  for (std::size_t chunk = chunks_.size(); chunk-- > 0;) {
    if (chunks_[chunk].state != State::kLent || chunks_[chunk].free == 0) {
      continue;
    }
    const auto first = static_cast<BlockId>(chunk) * blocks_per_chunk_;
    for (BlockId id = first + blocks_per_chunk_ - 1; id >= first; --id) {
      if (!may(id)) {
        continue;
      }
      if (!found.empty() && found.back().first == id + 1) {
        found.back() = {id, found.back().blocks + 1};
      } else {
        found.push_back({id, 1});
      }
    }
  }
  return found;
}

// Nothing is taken yet.
std::vector<BlockId> ChunkBudget::find_chunks(std::int64_t blocks, StreamId stream) const {
  std::vector<BlockId> found;
  for (std::size_t chunk = chunks_.size(); chunk-- > 0 && std::ssize(found) < blocks;) {
    if (chunks_[chunk].state != State::kLent || chunks_[chunk].free < blocks_per_chunk_) {
      continue;
    }
    const auto first = static_cast<BlockId>(chunk) * blocks_per_chunk_;
    const BlockId end = first + std::min(blocks_per_chunk_, blocks - std::ssize(found));
    const std::size_t before = found.size();
    for (BlockId id = first; id < end && to_be_had(id, stream); ++id) {
      found.push_back(id);
    }
    if (std::ssize(found) - static_cast<std::int64_t>(before) < end - first) {
      found.resize(before);
    }
  }
  return std::ssize(found) < blocks ? std::vector<BlockId>{} : found;
}

std::vector<std::shared_ptr<const Event>> ChunkBudget::pending(StreamId stream) {
  std::vector<std::shared_ptr<const Event>> events;
  bool is_unknown = false;
  for (std::size_t id = 0; id < blocks_.size(); ++id) {
    const Fence& fence = blocks_[id].fence;
    const Chunk& chunk = chunks_[id / static_cast<std::size_t>(blocks_per_chunk_)];
    if (chunk.state != State::kLent || !blocks_[id].free || fence.open_for(stream, *epochs_)) {
      continue;
    }
    is_unknown = is_unknown || fence.event == nullptr;
    // A tensor's blocks have one event, and lie together.
    if (fence.event != nullptr && (events.empty() || events.back() != fence.event)) {
      events.push_back(fence.event);
    }
  }
  if (is_unknown) {
    events.push_back(epochs_->close());
  }
  return events;
}

ChunkBudget::Chunk& ChunkBudget::require(std::int64_t chunk) {
  if (chunk < 0 || chunk >= std::ssize(chunks_)) {
    throw std::out_of_range("chunk " + std::to_string(chunk) + " is none of the arena's " +
                            std::to_string(chunks_.size()));
  }
  return chunks_[static_cast<std::size_t>(chunk)];
}

bool ChunkBudget::to_be_had(BlockId id, StreamId stream) const {
  const Block& block = blocks_[static_cast<std::size_t>(id)];
  return chunks_[static_cast<std::size_t>(id / blocks_per_chunk_)].state == State::kLent &&
         block.free && block.fence.open_for(stream, *epochs_);
}

bool ChunkBudget::quiet(std::int64_t chunk) const {
  const Chunk& drained = chunks_[static_cast<std::size_t>(chunk)];
  return drained.state == State::kDraining && drained.free == blocks_per_chunk_ &&
         std::ranges::all_of(blocks_of(chunk), [this](const Block& block) {
           return epochs_->ended(block.fence.epoch);
         });
}

std::span<const ChunkBudget::Block> ChunkBudget::blocks_of(std::int64_t chunk) const {
  return std::span(blocks_).subspan(static_cast<std::size_t>(chunk * blocks_per_chunk_),
                                    static_cast<std::size_t>(blocks_per_chunk_));
}

void ChunkBudget::mark_taken(std::span<const BlockId> blocks) {
  for (const BlockId id : blocks) {
    blocks_[static_cast<std::size_t>(id)].free = false;
    --chunks_[static_cast<std::size_t>(id / blocks_per_chunk_)].free;
  }
  in_use_ += std::ssize(blocks);
}

}  // namespace windrow
