#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "windrow/records.h"
#include "windrow/seqlock.h"
#include "windrow/shared_word.h"

namespace windrow {

enum class Writer : std::size_t { kDecode = 0, kWorker = 1 };

// The shared page: how decode and worker speak without a message and without a lock.
//
// It is in the control region, mapped by both; all zero is a fresh page. Decode publishes view
// and grant, the worker publishes the offer; anybody reads. One thread at a time publishes a record
// (the process that owns it sees to that); no call but the waits blocks, and none of the others
// makes a system call, save to wake a sleeper. A process may die anywhere: what the other reads is
// the last whole record (see Seqlock), and the heartbeat stops.
//
// Nothing in here is trusted with memory: a garbled page can stop harvesting, not decode.
class SharedPage {
 public:
  static constexpr std::size_t kCounters = 16;

  // Each sets the writer's heartbeat; the record's own heartbeat_ns is ignored.
  void publish_view(View view);
  void publish_offer(Offer offer);
  // The pause epoch is visible before the grant: a worker may pause early, never late.
  void publish_grant(Grant grant);

  // Whole records; heartbeat_ns is the writer's newest sign of life, at or after the publication.
  [[nodiscard]] View read_view() const;
  [[nodiscard]] Offer read_offer() const;
  [[nodiscard]] Grant read_grant() const;

  [[nodiscard]] std::uint64_t offer_sequence() const { return offer_.sequence(); }
  [[nodiscard]] std::uint64_t grant_sequence() const { return grant_.sequence(); }
  [[nodiscard]] std::int64_t pause_epoch() const {
    return pause_epoch_.load(std::memory_order_acquire);
  }

  // See Seqlock::wait. `deadline_ns` is of CLOCK_MONOTONIC.
  Woken wait_offer(std::uint64_t seen, std::int64_t deadline_ns) {
    return offer_.wait(seen, deadline_ns);
  }
  Woken wait_grant(std::uint64_t seen, std::int64_t deadline_ns) {
    return grant_.wait(seen, deadline_ns);
  }

  // Returns the time it wrote.
  std::int64_t beat(Writer writer);
  // For a caller that has just read the clock.
  void beat(Writer writer, std::int64_t now_ns);
  // The word that decode's heartbeat is stored in, for one who stores it at every step.
  [[nodiscard]] SharedWord<std::int64_t>& decodes_heartbeat();
  // Time since the writer's last sign of life; since boot when it never gave one.
  [[nodiscard]] std::int64_t heartbeat_age_ns(Writer writer) const;

  // Whether the newest grant is still the one with that sequence and decode, which gave it, has
  // shown a sign of life within `stale_ns`.
  [[nodiscard]] bool grant_stands(std::uint64_t sequence, std::int64_t stale_ns) const {
    return grant_sequence() == sequence && heartbeat_age_ns(Writer::kDecode) <= stale_ns;
  }

  // Adds to a counter that lives as long as the arena; returns the new value. Even counters are on
  // decode's line, odd ones on the worker's. Throws std::out_of_range.
  std::int64_t add(std::size_t counter, std::int64_t n);
  // A reader of a value sees what its writer did before it. Throws std::out_of_range.
  [[nodiscard]] std::int64_t counter(std::size_t counter) const;

 private:
  friend struct PageLayout;
  struct alignas(kCacheLine) Line {
    SharedWord<std::int64_t> heartbeat_ns;
    std::array<SharedWord<std::int64_t>, kCounters / 2> counters;
  };

  [[nodiscard]] std::int64_t heartbeat(Writer writer) const;

  Seqlock<View> view_;
  Seqlock<Grant> grant_;
  Seqlock<Offer> offer_;
  alignas(kCacheLine) SharedWord<std::int64_t> pause_epoch_;
  std::array<Line, 2> lines_;
};

// Offsets of the parts of the page, in bytes. Each part begins a cache line and has one writer. A
// change here is a change of the layout: kLayoutVersion grows with it.
struct PageLayout {
  static constexpr std::size_t kView = offsetof(SharedPage, view_);
  static constexpr std::size_t kGrant = offsetof(SharedPage, grant_);
  static constexpr std::size_t kOffer = offsetof(SharedPage, offer_);
  static constexpr std::size_t kPauseEpoch = offsetof(SharedPage, pause_epoch_);
  static constexpr std::size_t kDecodesLine = offsetof(SharedPage, lines_);
  static constexpr std::size_t kWorkersLine = kDecodesLine + sizeof(SharedPage::Line);
  static constexpr std::size_t kHeartbeatInLine = offsetof(SharedPage::Line, heartbeat_ns);
  static constexpr std::size_t kCountersInLine = offsetof(SharedPage::Line, counters);
};
// A peer uses what is in its mapping, where no constructor has run.
static_assert(std::is_trivial_v<SharedPage> && std::is_standard_layout_v<SharedPage>);
static_assert(alignof(SharedPage) == kCacheLine && sizeof(SharedPage) == 1536);
static_assert(PageLayout::kView == 0 && sizeof(Seqlock<View>) == 128 + 192);
static_assert(PageLayout::kGrant == 320 && sizeof(Seqlock<Grant>) == 128 + 256);
static_assert(PageLayout::kOffer == 704 && sizeof(Seqlock<Offer>) == 128 + 384);
static_assert(PageLayout::kPauseEpoch == 1216);
static_assert(PageLayout::kDecodesLine == 1280 && PageLayout::kWorkersLine == 1408);
static_assert(PageLayout::kHeartbeatInLine == 0 && PageLayout::kCountersInLine == 8);

}  // namespace windrow
