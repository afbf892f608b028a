#include "windrow/alias_cache.h"

#include <algorithm>
#include <utility>

#include "windrow/error.h"
#include "windrow/small_pool.h"

namespace windrow {
namespace {

// Every live byte may have seven idle aliases of other shapes beside it; addresses cost nothing.
constexpr std::size_t kOvercommit = 8;
// Linux gives a process 65,530 mappings; a block in an alias may need one of its own.
constexpr std::size_t kMostIdleBlocks = 16'384;
constexpr std::size_t kMostLookedAt = 16;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t range_bytes(const ChunkMemory& memory) {
  const auto blocks = static_cast<std::size_t>(memory.chunks() * memory.blocks_per_chunk());
  return kOvercommit * round_up(blocks * memory.block_bytes(), kPoolBlockBytes);
}

}  // namespace

AliasCache::AliasCache(Driver& driver, std::shared_ptr<const ChunkMemory> memory,
                       StreamEpochs& epochs)
    : driver_(&driver),
      memory_(std::move(memory)),
      epochs_(&epochs),
      range_(driver_->reserve(range_bytes(*memory_))),
      addresses_(range_->bytes()) {
  if (memory_->one_memory_a_chunk()) {
    homes_.emplace(*range_, *memory_, epochs);
    static_cast<void>(addresses_.take(homes_->bytes()));
  }
}

std::unique_ptr<Alias> AliasCache::reuse(std::size_t blocks, ChunkBudget& budget, StreamId stream) {
  const auto found = by_size_.find(blocks);
  if (found == by_size_.end()) {
    return nullptr;
  }
  auto& candidates = found->second;
  const std::size_t last = candidates.size() - std::min(candidates.size(), kMostLookedAt);
  for (std::size_t i = candidates.size(); i-- > last;) {
    const Idle::iterator place = candidates[i];
    if (budget.take_these((*place)->blocks, stream)) {
      std::unique_ptr<Alias> alias = std::move(*place);
      idle_.erase(place);
      candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(i));
      idle_blocks_ -= blocks;
      calls_.saved += std::ssize(pieces_of(alias->blocks));
      return alias;
    }
  }
  return nullptr;
}

std::unique_ptr<Alias> AliasCache::map(std::vector<BlockId> blocks) {
  auto alias = std::make_unique<Alias>();
  if (at_home(blocks)) {
    alias->address = homes_->hold(blocks, calls_);
    alias->blocks = std::move(blocks);
    return alias;
  }
  while (idle_blocks_ > kMostIdleBlocks && drop_oldest()) {
  }
  const std::size_t bytes = address_bytes(blocks);
  const std::optional<std::size_t> offset = find_addresses(bytes);
  if (!offset) {
    return nullptr;
  }
  const std::vector<Piece> pieces = pieces_of(blocks);
  try {
    range_->map_run(*offset, pieces, Access::kReadWrite);
  } catch (...) {
    addresses_.put(*offset, bytes);
    throw;
  }
  calls_.map += std::ssize(pieces);
  ++calls_.access;
  alias->address = range_->data() + *offset;
  alias->blocks = std::move(blocks);
  return alias;
}

void AliasCache::idle(std::unique_ptr<Alias> alias) {
  if (at_home(alias->blocks)) {
    return homes_->let_go(alias->blocks);
  }
  const std::size_t blocks = alias->blocks.size();
  alias->idle_since = epochs_->now();
  idle_.push_back(std::move(alias));
  by_size_[blocks].push_back(std::prev(idle_.end()));
  idle_blocks_ += blocks;
}

void AliasCache::clear() {
  while (drop_oldest()) {
  }
  if (homes_) {
    homes_->clear(calls_);
  }
}

// Aliases begin where a block of the small pool may begin.
std::size_t AliasCache::address_bytes(const std::vector<BlockId>& blocks) const {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces_of(blocks)) {
    bytes += piece.bytes;
  }
  return round_up(bytes, kPoolBlockBytes);
}

bool AliasCache::at_home(const std::vector<BlockId>& blocks) const {
  return homes_ && blocks.back() - blocks.front() + 1 == std::ssize(blocks);
}

std::optional<std::size_t> AliasCache::find_addresses(std::size_t bytes) {
  for (;;) {
    if (const auto offset = addresses_.take(bytes)) {
      return offset;
    }
    if (idle_.empty()) {
      throw Error("no " + std::to_string(bytes) + " addresses side by side are left");
    }
    if (!drop_oldest()) {
      return std::nullopt;
    }
  }
}

Backing AliasCache::backing(BlockId block) const {
  return memory_->backing(block / memory_->blocks_per_chunk(), block % memory_->blocks_per_chunk());
}

std::size_t AliasCache::run_length(const std::vector<BlockId>& blocks, std::size_t begin) const {
  const Backing first = backing(blocks[begin]);
  std::size_t length = 1;
  while (begin + length < blocks.size()) {
    const Backing next = backing(blocks[begin + length]);
    if (next.memory != first.memory ||
        next.offset != first.offset + length * memory_->block_bytes()) {
      break;
    }
    ++length;
  }
  return length;
}

std::vector<Piece> AliasCache::pieces_of(const std::vector<BlockId>& blocks) const {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < blocks.size();) {
    const std::size_t length = run_length(blocks, at);
    const Backing from = backing(blocks[at]);
    const std::size_t bytes = homes_ ? from.memory->bytes() : length * memory_->block_bytes();
    pieces.push_back({from.memory, from.offset, bytes});
    at += length;
  }
  return pieces;
}

bool AliasCache::drop_oldest() {
  // Unmapping under a running kernel is a fault.
  if (idle_.empty() || !epochs_->ended(idle_.front()->idle_since)) {
    return false;
  }
  // Forgotten first: should unmapping fail, its addresses are lost and nobody can reuse them.
  const Idle::iterator place = idle_.begin();
  const std::unique_ptr<Alias> alias = std::move(*place);
  const std::size_t blocks = alias->blocks.size();
  std::erase(by_size_[blocks], place);
  idle_.erase(place);
  idle_blocks_ -= blocks;
  const auto offset = static_cast<std::size_t>(alias->address - range_->data());
  std::size_t at = offset;
  for (const Piece& piece : pieces_of(alias->blocks)) {
    range_->unmap(at, piece.bytes);
    ++calls_.unmap;
    at += piece.bytes;
  }
  addresses_.put(offset, address_bytes(alias->blocks));
  return true;
}

}  // namespace windrow
