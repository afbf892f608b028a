// What the shared page costs its users, and how soon a revoke is seen in another process.
#include "windrow/page.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>

#include "samples.h"
#include "windrow/error.h"

namespace windrow::bench {
namespace {

constexpr std::size_t kCalls = 20'000;
constexpr std::int64_t kForeverNs = std::int64_t{1} << 62;
// Long enough for a futex waiter to be asleep on any scheduler.
constexpr timespec kFallAsleep{.tv_sec = 0, .tv_nsec = 300'000};

// The page, and where the child says when it saw what.
struct Shared {
  SharedPage page;
  alignas(kCacheLine) std::atomic<std::int64_t> ready;
  alignas(kCacheLine) std::atomic<std::int64_t> epoch_seen;
  std::atomic<std::int64_t> seen_ns;
};

class SharedMapping {
 public:
  SharedMapping()
      : base_(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0)) {
    if (base_ == MAP_FAILED) {
      throw errno_error("mapping a page");
    }
  }
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping() { ::munmap(base_, sizeof(Shared)); }
  // All zero is a fresh page.
  [[nodiscard]] Shared& operator*() const { return *static_cast<Shared*>(base_); }

 private:
  void* base_;
};

void report(Shared& shared, std::int64_t epoch) {
  shared.seen_ns.store(monotonic_ns(), std::memory_order_relaxed);
  shared.epoch_seen.store(epoch, std::memory_order_release);
}

// The child: sees epoch 1, 2, ... and ends at -1.
void spin(Shared& shared) {
  shared.ready.store(1);
  for (std::int64_t seen = 0;;) {
    const std::int64_t epoch = shared.page.pause_epoch();
    if (epoch != seen) {
      report(shared, seen = epoch);
      if (epoch < 0) {
        return;
      }
    }
  }
}

void sleep(Shared& shared) {
  std::uint64_t sequence = shared.page.grant_sequence();
  shared.ready.store(1);
  for (;;) {
    shared.page.wait_grant(sequence, kForeverNs);
    const std::uint64_t now = shared.page.grant_sequence();
    if (now != sequence) {
      sequence = now;
      const std::int64_t epoch = shared.page.pause_epoch();
      report(shared, epoch);
      if (epoch < 0) {
        return;
      }
    }
  }
}

Figure time_revokes(const char* name, void (*waiter)(Shared&), int revokes, bool asleep) {
  const SharedMapping mapping;
  Shared& shared = *mapping;
  const pid_t child = ::fork();
  if (child < 0) {
    throw errno_error("starting a waiter");
  }
  if (child == 0) {
    waiter(shared);
    ::_exit(0);
  }
  Figure figure(name);
  while (shared.ready.load() == 0) {
  }
  for (std::int64_t epoch = 1; epoch <= revokes + 1; ++epoch) {
    if (asleep) {
      ::nanosleep(&kFallAsleep, nullptr);
    }
    Grant grant{};
    grant.pause_epoch = epoch <= revokes ? epoch : -1;
    const std::int64_t began = monotonic_ns();
    shared.page.publish_grant(grant);
    while (shared.epoch_seen.load(std::memory_order_acquire) != grant.pause_epoch) {
    }
    if (epoch <= revokes) {
      figure.add(static_cast<double>(shared.seen_ns.load() - began));
    }
  }
  ::waitpid(child, nullptr, 0);
  return figure;
}

}  // namespace

void measure_page(int repeats) {
  const SharedMapping mapping;
  SharedPage& page = (*mapping).page;
  Figure publishing("publish a view");
  Figure granting("publish a grant");
  Figure reading("read a grant");
  Figure checking("check the pause epoch");
  View view{};
  Grant grant{};
  volatile std::int64_t sink = 0;
  for (int repeat = -kWarmUps; repeat < repeats; ++repeat) {
    const double publish = time_mean(kCalls, [&] {
      ++view.step;
      page.publish_view(view);
    });
    const double publish_grant = time_mean(kCalls, [&] {
      ++grant.n_tasklets;
      page.publish_grant(grant);
    });
    const double read = time_mean(kCalls, [&] { sink = page.read_grant().n_tasklets; });
    const double check = time_mean(kCalls, [&] { sink = page.pause_epoch(); });
    if (repeat >= 0) {
      publishing.add(publish);
      granting.add(publish_grant);
      reading.add(read);
      checking.add(check);
    }
  }
  publishing.print();
  granting.print();
  reading.print();
  checking.print();
}

void measure_revokes(int revokes) {
  time_revokes("a revoke is seen, spinning", &spin, revokes, false).print();
  time_revokes("a revoke is seen, futex", &sleep, revokes, true).print();
}

}  // namespace windrow::bench
