#include "windrow/chunk_budget.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "windrow/error.h"

namespace windrow {

template <class Use>
bool ChunkBudget::each_stretch(std::span<const BlockId> blocks, Use use) const {
  for (std::size_t at = 0; at < blocks.size();) {
    const BlockId first = blocks[at];
    const BlockId chunk_end = (first / blocks_per_chunk_ + 1) * blocks_per_chunk_;
    std::int64_t length = 0;
    while (at < blocks.size() && first + length < chunk_end && blocks[at] == first + length) {
      ++length;
      ++at;
    }
    if (!use(Range{first, length})) {
      return false;
    }
  }
  return true;
}

ChunkBudget::ChunkBudget(std::int64_t chunks, std::int64_t blocks_per_chunk, StreamEpochs& epochs)
    : blocks_per_chunk_(blocks_per_chunk),
      epochs_(&epochs),
      chunks_(static_cast<std::size_t>(chunks)) {}

void ChunkBudget::lend(std::int64_t chunk) {
  Chunk& lent = require(chunk);
  if (lent.state != State::kAbsent) {
    throw Error("chunk " + std::to_string(chunk) + " is in the allocator's budget already");
  }
  lent = {State::kLent, blocks_per_chunk_};
  insert({chunk * blocks_per_chunk_, blocks_per_chunk_}, {});
  ++lent_;
}

void ChunkBudget::drain(std::int64_t chunk) {
  Chunk& lent = require(chunk);
  if (lent.state == State::kAbsent) {
    throw Error("chunk " + std::to_string(chunk) + " is not in the allocator's budget");
  }
  if (lent.state == State::kLent) {
    lent.state = State::kDraining;
    cut_out({chunk * blocks_per_chunk_, blocks_per_chunk_});
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
    Chunk& chunk = chunks_[static_cast<std::size_t>(id)];
    if (chunk.state == State::kDraining && chunk.free == blocks_per_chunk_ &&
        epochs_->ended(chunk.epoch)) {
      gone.push_back(id);
      chunk = {};
      --draining_;
    }
  }
  return gone;
}

std::vector<BlockId> ChunkBudget::take(std::int64_t blocks, StreamId stream) {
  auto found = find_settled([&] { return find_any(blocks, stream); }, stream);
  mark_taken(found);
  return found;
}

std::vector<BlockId> ChunkBudget::take_side_by_side(std::int64_t blocks, StreamId stream) {
  auto found = find_settled([&] { return find_side_by_side(blocks, stream); }, stream);
  mark_taken(found);
  return found;
}

bool ChunkBudget::take_these(std::span<const BlockId> blocks, StreamId stream) {
  if (!each_stretch(blocks, [&](const Range& range) { return open(range, stream); })) {
    return false;
  }
  mark_taken(blocks);
  return true;
}

void ChunkBudget::put(std::span<const BlockId> blocks, const Fence& fence) {
  each_stretch(blocks, [&](const Range& range) {
    Chunk& chunk = chunk_of(range.first);
    chunk.free += range.blocks;
    chunk.epoch = std::max(chunk.epoch, fence.epoch);
    if (chunk.state == State::kLent) {
      insert(range, fence);
    }
    return true;
  });
  in_use_ -= std::ssize(blocks);
}

std::shared_ptr<const Event> ChunkBudget::pending(StreamId stream) {
  return newest_closed(stream) == 0 ? nullptr : epochs_->close();
}

std::int64_t ChunkBudget::longest_run() const {
  std::int64_t longest = 0;
  Range joined;
  for (const auto& [first, run] : free_) {
    const bool goes_on = first == joined.first + joined.blocks;
    joined = goes_on ? Range{joined.first, joined.blocks + run.blocks} : Range{first, run.blocks};
    longest = std::max(longest, joined.blocks);
  }
  return longest;
}

template <class Find>
std::vector<BlockId> ChunkBudget::find_settled(Find find, StreamId stream) {
  std::vector<BlockId> found = find();
  const StreamEpochs::Epoch closed = newest_closed(stream);
  if (closed == 0) {
    return found;
  }
  const StreamEpochs::Epoch before = epochs_->last_ended();
  static_cast<void>(epochs_->ended(closed));
  return epochs_->last_ended() == before ? found : find();
}

std::vector<BlockId> ChunkBudget::find_any(std::int64_t blocks, StreamId stream) const {
  std::vector<BlockId> found;
  found.reserve(static_cast<std::size_t>(blocks));
  for (std::size_t chunk = chunks_.size(); chunk-- > 0 && std::ssize(found) < blocks;) {
    if (chunks_[chunk].state != State::kLent || chunks_[chunk].free == 0) {
      continue;
    }
    const auto begin = static_cast<BlockId>(chunk) * blocks_per_chunk_;
    const BlockId end = begin + blocks_per_chunk_;
    for (auto run = run_at(begin); run != free_.end() && run->first < end; ++run) {
      if (!open(run->second.fence, stream)) {
        continue;
      }
      const BlockId last = std::min(end, run->first + run->second.blocks);
      for (BlockId id = std::max(begin, run->first); id < last && std::ssize(found) < blocks;
           ++id) {
        found.push_back(id);
      }
    }
  }
  return std::ssize(found) < blocks ? std::vector<BlockId>{} : found;
}

std::vector<BlockId> ChunkBudget::find_side_by_side(std::int64_t blocks, StreamId stream) const {
  Range best;
  Range joined;
  const auto compare = [&] {
    if (joined.blocks >= blocks && (best.blocks == 0 || joined.blocks < best.blocks)) {
      best = joined;
    }
  };
  for (auto run = free_.rbegin(); run != free_.rend(); ++run) {
    if (!open(run->second.fence, stream)) {
      continue;
    }
    if (run->first + run->second.blocks == joined.first) {
      joined = {run->first, joined.blocks + run->second.blocks};
      continue;
    }
    compare();
    joined = {run->first, run->second.blocks};
  }
  compare();
  std::vector<BlockId> found;
  if (best.blocks > 0) {
    found.resize(static_cast<std::size_t>(blocks));
    std::iota(found.begin(), found.end(), best.first + best.blocks - blocks);
  } else if (blocks > blocks_per_chunk_) {
    found = find_chunks(blocks, stream);
  }
  return found;
}

std::vector<BlockId> ChunkBudget::find_chunks(std::int64_t blocks, StreamId stream) const {
  std::vector<BlockId> found;
  for (std::size_t chunk = chunks_.size(); chunk-- > 0 && std::ssize(found) < blocks;) {
    if (chunks_[chunk].state != State::kLent || chunks_[chunk].free < blocks_per_chunk_) {
      continue;
    }
    const Range part{static_cast<BlockId>(chunk) * blocks_per_chunk_,
                     std::min(blocks_per_chunk_, blocks - std::ssize(found))};
    for (BlockId id = part.first; open(part, stream) && id < part.first + part.blocks; ++id) {
      found.push_back(id);
    }
  }
  return std::ssize(found) < blocks ? std::vector<BlockId>{} : found;
}

ChunkBudget::Runs::const_iterator ChunkBudget::run_at(BlockId block) const {
  auto run = free_.upper_bound(block);
  if (run != free_.begin()) {
    const auto before = std::prev(run);
    run = before->first + before->second.blocks > block ? before : run;
  }
  return run;
}

bool ChunkBudget::open(Range range, StreamId stream) const {
  BlockId at = range.first;
  const BlockId end = range.first + range.blocks;
  for (auto run = run_at(at); at < end; ++run) {
    if (run == free_.end() || run->first > at || !open(run->second.fence, stream)) {
      return false;
    }
    at = run->first + run->second.blocks;
  }
  return true;
}

StreamEpochs::Epoch ChunkBudget::newest_closed(StreamId stream) const {
  StreamEpochs::Epoch newest = 0;
  for (const auto& [first, run] : free_) {
    newest = open(run.fence, stream) ? newest : std::max(newest, run.fence.epoch);
  }
  return newest;
}

ChunkBudget::Chunk& ChunkBudget::require(std::int64_t chunk) {
  if (chunk < 0 || chunk >= std::ssize(chunks_)) {
    throw std::out_of_range("chunk " + std::to_string(chunk) + " is none of the arena's " +
                            std::to_string(chunks_.size()));
  }
  return chunks_[static_cast<std::size_t>(chunk)];
}

ChunkBudget::Chunk& ChunkBudget::chunk_of(BlockId block) {
  return chunks_[static_cast<std::size_t>(block / blocks_per_chunk_)];
}

// Joins it with neighbours that may be used when it may: of the same stream, or of streams whose
// work has ended.
void ChunkBudget::insert(Range range, const Fence& fence) {
  const auto joins = [&](const Fence& other) {
    return other.stream == fence.stream ||
           std::max(other.epoch, fence.epoch) <= epochs_->last_ended();
  };
  Run made{range.blocks, fence};
  auto next = free_.lower_bound(range.first);
  if (next != free_.end() && next->first == range.first + range.blocks &&
      joins(next->second.fence)) {
    made.blocks += next->second.blocks;
    made.fence.epoch = std::max(made.fence.epoch, next->second.fence.epoch);
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    Run& before = std::prev(next)->second;
    const BlockId first = std::prev(next)->first;
    if (first + before.blocks == range.first && joins(before.fence)) {
      before.blocks += made.blocks;
      before.fence = {fence.stream, std::max(made.fence.epoch, before.fence.epoch)};
      return;
    }
  }
  free_.emplace_hint(next, range.first, made);
}

// Whatever is free of it.
void ChunkBudget::cut_out(Range range) {
  const BlockId end = range.first + range.blocks;
  auto run = free_.lower_bound(range.first);
  if (run != free_.begin() && std::prev(run)->first + std::prev(run)->second.blocks > range.first) {
    --run;
  }
  while (run != free_.end() && run->first < end) {
    const auto [first, cut] = *run;
    if (first < range.first) {
      run->second.blocks = range.first - first;
      ++run;
    } else {
      run = free_.erase(run);
    }
    if (const BlockId last = first + cut.blocks; last > end) {
      free_.emplace_hint(run, end, Run{last - end, cut.fence});
      return;
    }
  }
}

void ChunkBudget::mark_taken(std::span<const BlockId> blocks) {
  each_stretch(blocks, [&](const Range& range) {
    cut_out(range);
    chunk_of(range.first).free -= range.blocks;
    return true;
  });
  in_use_ += std::ssize(blocks);
}

}  // namespace windrow
