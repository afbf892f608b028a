#include "windrow/small_pool.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

#include "windrow/error.h"

namespace windrow {
namespace {

constexpr std::size_t kTop = kOrders - 1;
constexpr std::uint8_t kOrderBits = 0x0F;
constexpr std::uint32_t kNoBlock = ~std::uint32_t{0};
constexpr std::size_t kMostCachedBytes = std::size_t{1} << 20;  // of one order

std::size_t order_for(std::size_t bytes) {
  return static_cast<std::size_t>(std::bit_width((bytes - 1) / kLeafBytes));
}

std::size_t bytes_of(std::size_t order) {
  return kLeafBytes << order;
}

}  // namespace

SmallPool::~SmallPool() {
  for (const auto& block : blocks_) {
    if (block->address != nullptr) {
      source_->return_block(block->address);
    }
  }
}

std::byte* SmallPool::allocate(std::size_t bytes) {
  if (bytes == 0 || bytes > kPoolBlockBytes) {
    throw std::invalid_argument("the small pool serves 1 to " + std::to_string(kPoolBlockBytes) +
                                " bytes, not " + std::to_string(bytes));
  }
  const std::size_t order = order_for(bytes);
  Cache& cache = caches_[order];
  const Node node = cache.count > 0 ? cache.nodes[--cache.count] : piece(order);
  if (node == kNone) {
    return nullptr;
  }
  tag(node) = static_cast<std::uint8_t>(kLive | order);
  next(node) = static_cast<std::uint32_t>(bytes);
  rounded_ += static_cast<std::int64_t>(bytes_of(order));
  requested_ += static_cast<std::int64_t>(bytes);
  return address(node);
}

std::size_t SmallPool::free(std::byte* address) {
  const Node node = live_node(address);
  const std::size_t order = tag(node) & kOrderBits;
  const std::size_t bytes = next(node);
  rounded_ -= static_cast<std::int64_t>(bytes_of(order));
  requested_ -= static_cast<std::int64_t>(bytes);
  Cache& cache = caches_[order];
  if (cache.count < std::min(Cache::kMost, kMostCachedBytes / bytes_of(order))) {
    tag(node) = static_cast<std::uint8_t>(kCached | order);
    cache.nodes[cache.count++] = node;
  } else {
    merge(node, order);
    release_empty(keep_);
  }
  return bytes;
}

std::size_t SmallPool::requested(const std::byte* address) const {
  const Node node = live_node(address);
  return blocks_[node / kLeaves]->next[node % kLeaves];
}

std::size_t SmallPool::keep(std::size_t blocks) {
  keep_ = std::max<std::size_t>(blocks, 1);
  while (held_ < keep_ && grow()) {
  }
  return held_;
}

void SmallPool::trim() {
  flush();
  release_empty(0);
}

PoolBytes SmallPool::bytes() const {
  return {static_cast<std::int64_t>(held_ * kPoolBlockBytes), rounded_, requested_};
}

SmallPool::Node SmallPool::live_node(const std::byte* address) const {
  const auto offset = static_cast<std::size_t>(address - base_);  // below the base: huge
  const std::size_t slot = offset / kPoolBlockBytes;
  if (slot < number_of_slot_.size() && number_of_slot_[slot] != kNoBlock) {
    const std::size_t leaf = offset % kPoolBlockBytes / kLeafBytes;
    const std::uint32_t number = number_of_slot_[slot];
    if ((blocks_[number]->tag[leaf] & kLive) != 0 && offset % kLeafBytes == 0) {
      return static_cast<Node>(number * kLeaves + leaf);
    }
  }
  throw Error("no live allocation of the small pool begins at that address; was it freed twice?");
}

// A piece of that order from what is free, else from what can be merged, else from a new block.
SmallPool::Node SmallPool::piece(std::size_t order) {
  Node found = split_smallest(order);
  if (found == kNone) {
    flush();
    found = split_smallest(order);
  }
  if (found == kNone && grow()) {
    found = split_smallest(order);
  }
  return found;
}

SmallPool::Node SmallPool::split_smallest(std::size_t order) {
  const std::uint32_t fitting = filled_ >> order << order;
  if (fitting == 0) {
    return kNone;
  }
  auto found = static_cast<std::size_t>(std::countr_zero(fitting));
  const Node node = heads_[found];
  unlink(node, found);
  while (found > order) {
    --found;
    push(node + (Node{1} << found), found);
  }
  return node;
}

// Frees a piece that is on no list, with every buddy that is free.
void SmallPool::merge(Node node, std::size_t order) {
  tag(node) = kInside;
  while (order < kTop) {
    const Node buddy = node ^ (Node{1} << order);
    if (tag(buddy) != (kFree | order)) {
      break;
    }
    unlink(buddy, order);
    node &= ~(Node{1} << order);
    ++order;
  }
  push(node, order);
}

void SmallPool::flush() {
  for (std::size_t order = 0; order < kOrders; ++order) {
    Cache& cache = caches_[order];
    while (cache.count > 0) {
      merge(cache.nodes[--cache.count], order);
    }
  }
}

void SmallPool::push(Node node, std::size_t order) {
  Block& own = block(node);
  const Node head = heads_[order];
  own.tag[node % kLeaves] = static_cast<std::uint8_t>(kFree | order);
  own.next[node % kLeaves] = head;
  own.previous[node % kLeaves] = kNone;
  if (head != kNone) {
    block(head).previous[head % kLeaves] = node;
  }
  heads_[order] = node;
  filled_ |= std::uint32_t{1} << order;
  empty_ += order == kTop ? 1 : 0;
}

void SmallPool::unlink(Node node, std::size_t order) {
  const Node after = next(node);
  const Node before = block(node).previous[node % kLeaves];
  if (after != kNone) {
    block(after).previous[after % kLeaves] = before;
  }
  if (before != kNone) {
    next(before) = after;
  } else {
    heads_[order] = after;
    if (after == kNone) {
      filled_ &= ~(std::uint32_t{1} << order);
    }
  }
  tag(node) = kInside;
  empty_ -= order == kTop ? 1 : 0;
}

bool SmallPool::grow() {
  if (unused_.empty()) {
    unused_.reserve(blocks_.size() + 1);  // so that giving a block up never allocates
    blocks_.push_back(std::make_unique<Block>());
    unused_.push_back(static_cast<std::uint32_t>(blocks_.size() - 1));
  }
  std::byte* address = source_->take_block();
  if (address == nullptr) {
    return false;
  }
  const std::size_t slot = static_cast<std::size_t>(address - base_) / kPoolBlockBytes;
  if (slot >= number_of_slot_.size()) {
    number_of_slot_.resize(slot + 1, kNoBlock);
  }
  const std::uint32_t number = unused_.back();
  unused_.pop_back();
  number_of_slot_[slot] = number;
  blocks_[number]->address = address;
  ++held_;
  push(static_cast<Node>(number * kLeaves), kTop);
  return true;
}

void SmallPool::give_up(Node node) {
  unlink(node, kTop);
  Block& own = block(node);
  number_of_slot_[static_cast<std::size_t>(own.address - base_) / kPoolBlockBytes] = kNoBlock;
  unused_.push_back(node / kLeaves);
  source_->return_block(std::exchange(own.address, nullptr));
  --held_;
}

void SmallPool::release_empty(std::size_t keep) {
  while (empty_ > 0 && held_ > keep) {
    give_up(heads_[kTop]);
  }
}

void SmallPool::check() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) {
      throw Error(std::string("the small pool is broken: ") + what);
    }
  };
  std::int64_t rounded = 0;
  std::int64_t requested = 0;
  std::array<std::size_t, kOrders> free_pieces{};
  std::array<std::size_t, kOrders> cached_pieces{};
  for (const auto& block : blocks_) {
    for (std::size_t leaf = 0; block->address != nullptr && leaf < kLeaves;) {
      const std::uint8_t tag = block->tag[leaf];
      const std::size_t order = tag & kOrderBits;
      require(order < kOrders && tag != kInside, "a piece has no beginning");
      require(leaf % (std::size_t{1} << order) == 0, "a piece is not aligned");
      if ((tag & kLive) != 0) {
        rounded += static_cast<std::int64_t>(bytes_of(order));
        requested += block->next[leaf];
      }
      const std::size_t buddy = leaf ^ (std::size_t{1} << order);
      require((tag & kFree) == 0 || order == kTop || block->tag[buddy] != tag,
              "two free buddies are not merged");
      free_pieces[order] += (tag & kFree) != 0 ? 1 : 0;
      cached_pieces[order] += (tag & kCached) != 0 ? 1 : 0;
      leaf += std::size_t{1} << order;
    }
  }
  require(rounded == rounded_ && requested == requested_, "its sums are not those of its pieces");
  for (std::size_t order = 0; order < kOrders; ++order) {
    std::size_t listed = 0;
    for (Node node = heads_[order]; node != kNone; ++listed) {
      node = blocks_[node / kLeaves]->next[node % kLeaves];
    }
    require(listed == free_pieces[order], "a free piece is on no list");
    require(caches_[order].count == cached_pieces[order], "a cached piece is on no list");
  }
  require(empty_ == free_pieces[kTop] && unused_.size() + held_ == blocks_.size(),
          "its blocks are counted wrong");
}

}  // namespace windrow
