#include "soak.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <utility>

#include "filled.h"
#include "hands.h"
#include "shared_memory.h"
#include "windrow/arena.h"
#include "windrow/client.h"
#include "windrow/clock.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"
#include "windrow/weights.h"

namespace windrow::testing {
namespace {

constexpr Geometry kArena{.layers = 2,
                          .kv_heads = 2,
                          .head_dim = 32,
                          .dtype_bytes = 4,
                          .block_bytes = 4096,
                          .chunks = 32};
constexpr std::int64_t kReserve = 3;
constexpr std::int64_t kWeightsBytes = 65'536;
constexpr std::int64_t kPatience_ns = 60'000'000'000;
constexpr std::int64_t kLook_ns = 20'000'000;
constexpr std::size_t kWorkers = 2;

// What the processes say to each other; on shared memory, for any of them may be killed.
struct Board {
  struct alignas(64) Seat {
    std::atomic<std::int64_t> epoch;  // of the worker that sits there; 0: nobody
    std::atomic<std::int64_t> dead;   // reaped, and not yet buried by decode
    std::atomic<std::uint64_t> operations;
  };
  std::array<Seat, kWorkers> seats;
  alignas(64) std::atomic<std::uint64_t> owner_operations;
  std::atomic<std::uint64_t> checks;
  std::atomic<bool> owner_dies;  // from now on a worker may find nobody to attach to
  std::atomic<bool> stop;

  [[nodiscard]] std::uint64_t operations() const {
    std::uint64_t sum = owner_operations.load(std::memory_order_relaxed);
    for (const Seat& seat : seats) {
      sum += seat.operations.load(std::memory_order_relaxed);
    }
    return sum;
  }
};

template <class Record>
void require_whole(const Record& record) {
  if (!is_whole(record)) {
    throw std::runtime_error("a torn record of the shared page");
  }
}

// In the first token of each chunk, which decode and workers map at places of their own.
template <class Mapped>
Marks marks_in(const Arena& arena, Mapped& blocks) {
  const KvView first = arena.kv_view(0, false);
  return Marks(blocks.data() + first.offset, static_cast<std::size_t>(first.chunk_stride));
}

void run_owner(Board& board, const SoakPlan& plan, unsigned seed, const std::string& path) {
  SharedWeights weights(host_driver(), kWeightsBytes);
  std::memset(weights.mapping()->data(), 7, kWeightsBytes);
  weights.seal();
  const auto arena = Arena::create(host_driver(), kArena, kReserve);
  arena->export_named("weights", weights.fd());
  arena->serve(path);
  const auto page = arena->page();
  const auto blocks = arena->mapping();
  Owner owner(arena->table(), marks_in(*arena, *blocks), seed);
  std::uint64_t checked = board.operations() / plan.check_every;
  for (std::int64_t n = 1; !board.stop.load(std::memory_order_relaxed); ++n) {
    Board::Seat& seat = board.seats[static_cast<std::size_t>(n) % kWorkers];
    if (const std::int64_t dead = seat.dead.load(); dead != 0) {
      owner.bury(dead);
      seat.dead.store(0);
    }
    if (const std::int64_t epoch = seat.epoch.load(); epoch != 0) {
      owner.step(epoch);
      board.owner_operations.fetch_add(1, std::memory_order_relaxed);
    }
    page->publish_view(filled<View>(n));
    page->publish_grant(filled<Grant>(n));
    require_whole(page->read_offer());
    if (const std::uint64_t due = board.operations() / plan.check_every; due != checked) {
      owner.check();
      arena->check();
      checked = due;
      board.checks.fetch_add(1, std::memory_order_relaxed);
    }
  }
  for (Board::Seat& seat : board.seats) {
    if (const std::int64_t dead = seat.dead.load(); dead != 0) {
      owner.bury(dead);
    }
  }
  owner.check_all_come_home();
}

// Not by the patience of attach itself: decode may have been killed meanwhile.
void await_server(const Board& board, const std::string& path) {
  const std::int64_t deadline = monotonic_ns() + kPatience_ns;
  for (;;) {
    try {
      const ArenaClient found(path, monotonic_ns() + kLook_ns);
      return;
    } catch (const AttachError&) {
      if (board.owner_dies.load() || monotonic_ns() > deadline) {
        throw;
      }
    }
  }
}

void run_worker(Board& board, std::size_t index, std::int64_t epoch, const std::string& path) {
  Board::Seat& seat = board.seats[index];
  await_server(board, path);
  const auto arena = Arena::attach(host_driver(), path, monotonic_ns());
  const auto weights = arena->imported("weights");
  if (weights->data()[kWeightsBytes - 1] != std::byte{7}) {
    throw std::runtime_error("decode's weights are not what they were");
  }
  const auto page = arena->page();
  const auto blocks = arena->mapping();
  Borrower borrower(arena->table(), marks_in(*arena, *blocks), epoch);
  seat.epoch.store(epoch);
  while (arena->owner_lives()) {
    for (int i = 0; i < 100; ++i) {
      seat.operations.fetch_add(static_cast<std::uint64_t>(borrower.step()),
                                std::memory_order_relaxed);
      require_whole(page->read_view());
      require_whole(page->read_grant());
      if (index == 0) {  // one writer for each record
        page->publish_offer(filled<Offer>(epoch + i));
      }
    }
  }
}

// Ends by exit, so that a leak is found.
template <class Function>
pid_t start(const char* name, const Board& board, Function run) {
  std::fflush(nullptr);  // else the child would print it once more
  const pid_t pid = ::fork();
  if (pid != 0) {
    return pid;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    run();
  } catch (const AttachError& error) {
    if (!board.owner_dies.load()) {
      std::fprintf(stderr, "%s: %s\n", name, error.what());
      ::_exit(1);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    ::_exit(1);
  }
  std::exit(0);
}

// Three processes, and who kills and replaces them.
class Soak {
 public:
  explicit Soak(const SoakPlan& plan) : plan_(plan), random_(plan.seed) {
    std::string name = "/tmp/windrow-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  Soak(const Soak&) = delete;
  Soak& operator=(const Soak&) = delete;
  ~Soak() {
    for (const pid_t pid : {owner_, workers_[0], workers_[1]}) {
      if (pid > 0) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    }
    ::unlink(path().c_str());
    ::rmdir(folder_.c_str());
  }

  SoakReport run(const std::function<void(const SoakReport&)>& progress) {
    begin();
    std::uint64_t next_kill = plan_.kill_every;
    std::uint64_t next_owner = plan_.owner_every;
    while (board_.operations() < plan_.operations || workers_killed_ < plan_.kills) {
      await(next_kill);
      if (board_.operations() >= next_owner) {
        replace_owner();
        next_owner = board_.operations() + plan_.owner_every;
      }
      replace_worker(random_() % kWorkers);
      next_kill = board_.operations() + 1 + random_() % (2 * plan_.kill_every);
      progress(report());
    }
    end();
    return report();
  }

 private:
  [[nodiscard]] std::string path() const { return folder_ + "/arena.sock"; }

  void begin() {
    board_.owner_dies.store(false);
    const auto seed = static_cast<unsigned>(random_());
    owner_ = start("decode", board_, [&] { run_owner(board_, plan_, seed, path()); });
    for (std::size_t i = 0; i < kWorkers; ++i) {
      seat(i);
    }
  }

  void seat(std::size_t i) {
    const std::int64_t epoch = ++epoch_;
    workers_[i] = start("worker", board_, [&] { run_worker(board_, i, epoch, path()); });
  }

  void replace_worker(std::size_t i) {
    kill_and_reap(workers_[i]);
    board_.seats[i].dead.store(board_.seats[i].epoch.exchange(0));
    ++workers_killed_;
    wait_until([&] { return board_.seats[i].dead.load() == 0; }, "decode to bury a worker");
    seat(i);
  }

  // Decode dies; the workers find that out and end without an error.
  void replace_owner() {
    board_.owner_dies.store(true);
    kill_and_reap(owner_);
    ++owners_killed_;
    for (std::size_t i = 0; i < kWorkers; ++i) {
      expect_clean_end(workers_[i], "worker");
      board_.seats[i].epoch.store(0);
    }
    begin();
  }

  void end() {
    for (std::size_t i = 0; i < kWorkers; ++i) {
      kill_and_reap(workers_[i]);
      board_.seats[i].dead.store(board_.seats[i].epoch.exchange(0));
    }
    board_.stop.store(true);
    expect_clean_end(owner_, "decode");
  }

  void await(std::uint64_t operations) {
    wait_until([&] { return board_.operations() >= operations; }, "operations");
  }

  template <class Condition>
  void wait_until(Condition holds, const char* what) {
    const std::int64_t deadline = monotonic_ns() + kPatience_ns;
    while (!holds()) {
      for (const pid_t pid : {owner_, workers_[0], workers_[1]}) {
        siginfo_t ended{};
        if (::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
            ended.si_pid != 0) {
          throw std::runtime_error("a process ended without being killed");
        }
      }
      if (monotonic_ns() > deadline) {
        throw std::runtime_error(std::string("waited too long for ") + what);
      }
      const timespec moment{.tv_sec = 0, .tv_nsec = 50'000};
      ::nanosleep(&moment, nullptr);
    }
  }

  static void kill_and_reap(pid_t& pid) {
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid, 0), &status, 0);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
      throw std::runtime_error("a process had failed before it was killed");
    }
  }

  static void expect_clean_end(pid_t& pid, const std::string& name) {
    int status = 0;
    ::waitpid(std::exchange(pid, 0), &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      throw std::runtime_error(name + " did not end cleanly");
    }
  }

  [[nodiscard]] SoakReport report() const {
    return {board_.operations(), board_.checks.load(), workers_killed_, owners_killed_};
  }

  SoakPlan plan_;
  std::minstd_rand random_;
  std::string folder_;
  SharedMemory memory_{sizeof(Board)};
  Board& board_{*new (memory_.data()) Board{}};
  pid_t owner_ = 0;
  std::array<pid_t, kWorkers> workers_{};
  std::int64_t epoch_ = 0;
  std::uint64_t workers_killed_ = 0;
  std::uint64_t owners_killed_ = 0;
};

}  // namespace

SoakReport soak(const SoakPlan& plan, const std::function<void(const SoakReport&)>& progress) {
  return Soak(plan).run(progress);
}

}  // namespace windrow::testing
