#include "windrow/host_partition.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "windrow/error.h"

namespace windrow {
namespace {

constexpr const char* kTasks = "/proc/self/task";

// Threads of gRPC's core have no object to know them by, but a name.
constexpr std::array<std::string_view, 5> kBackgroundNames{"grpc", "event_engine", "resolver",
                                                           "default-exec", "timer_manager"};

cpu_set_t mask_of(std::span<const int> cores) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : cores) {
    CPU_SET(static_cast<unsigned>(core), &mask);
  }
  return mask;
}

std::string thread_name(int thread) {
  std::ifstream file(std::filesystem::path(kTasks) / std::to_string(thread) / "comm");
  std::string name;
  std::getline(file, name);
  return name;  // empty: it ended
}

// Threads on their way to other cores.
class Move {
 public:
  // Does nothing for a thread that has ended. Throws Error.
  void put(int thread, const cpu_set_t& cores) {
    cpu_set_t before;
    if (::sched_getaffinity(thread, sizeof(before), &before) != 0 ||
        ::sched_setaffinity(thread, sizeof(cores), &cores) != 0) {
      if (errno == ESRCH) {
        return;
      }
      throw errno_error("moving thread " + std::to_string(thread) +
                        " to other cores (they must be online and in the process's cpuset)");
    }
    moved_.push_back({.thread = thread, .before = before, .after = {}});
  }

  // Every thread goes back to where it was.
  void undo() noexcept {
    for (Moved& moved : moved_) {
      ::sched_getaffinity(moved.thread, sizeof(moved.after), &moved.after);
      ::sched_setaffinity(moved.thread, sizeof(moved.before), &moved.before);
    }
  }

  // After undo(): a thread that started from a moved one goes to where that one was.
  void undo_child(int thread) const noexcept {
    cpu_set_t mask;
    if (::sched_getaffinity(thread, sizeof(mask), &mask) != 0) {
      return;
    }
    const auto parent = std::ranges::find_if(
        moved_, [&](const Moved& moved) { return CPU_EQUAL(&moved.after, &mask); });
    if (parent != moved_.end()) {
      ::sched_setaffinity(thread, sizeof(parent->before), &parent->before);
    }
  }

 private:
  struct Moved {
    int thread;
    cpu_set_t before;
    cpu_set_t after;  // as the kernel has it; empty before undo()
  };
  std::vector<Moved> moved_;
};

std::vector<int> without(std::vector<int> threads, const std::set<int>& known) {
  std::erase_if(threads, [&](int thread) { return known.contains(thread); });
  return threads;
}

}  // namespace

std::vector<int> threads_of_this_process() {
  std::vector<int> ids;
  std::error_code error;
  std::filesystem::directory_iterator entry(kTasks, error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    ids.push_back(std::stoi(entry->path().filename().string()));
    entry.increment(error);
  }
  if (error) {
    throw Error("listing this process's threads: " + error.message());
  }
  return ids;
}

HostPartition::HostPartition(std::span<const int> cores, ListThreads threads)
    : threads_(std::move(threads)) {
  const std::set<int> ascending(cores.begin(), cores.end());
  cores_.assign(ascending.begin(), ascending.end());
  if (cores_.size() < 2) {
    throw DriverUnavailable(std::to_string(cores_.size()) +
                            " core(s) cannot be shared; two are needed");
  }
  if (cores_.front() < 0 || cores_.back() >= CPU_SETSIZE) {
    throw std::invalid_argument("cores have numbers from 0 to " + std::to_string(CPU_SETSIZE - 1));
  }
}

std::uintptr_t HostPartition::enter(Side side, int groups) {
  move_threads(share(side, groups), std::span(cores_).last(1));
  return 0;
}

void HostPartition::leave() {
  move_threads(cores_, cores_);
  background_.clear();
}

int HostPartition::units(Side side, int groups) {
  return static_cast<int>(share(side, groups).size());
}

std::vector<unsigned> HostPartition::measure(Side side, int groups) {
  const auto cores = share(side, groups);
  std::vector<unsigned> seen;
  seen.reserve(cores.size());  // nothing may throw in the probe
  const auto probe = [&] {
    for (std::size_t i = 0; i < cores.size(); ++i) {
      const cpu_set_t alone = mask_of(cores.subspan(i, 1));
      if (::sched_setaffinity(0, sizeof(alone), &alone) == 0) {
        seen.push_back(static_cast<unsigned>(::sched_getcpu()));
      }
    }
  };
  try {
    std::thread(probe).join();
  } catch (const std::system_error& error) {
    throw Error(std::string("starting a thread that measures a share: ") + error.what());
  }
  return seen;
}

void HostPartition::keep_in_background(int thread) {
  Move().put(thread, mask_of(std::span(cores_).last(1)));
  background_.insert(thread);
}

std::span<const int> HostPartition::share(Side side, int groups) const {
  require_share(*this, groups);
  const auto n = static_cast<std::size_t>(groups);
  return side == Side::kDecode ? std::span(cores_).first(n) : std::span(cores_).last(n);
}

void HostPartition::move_threads(std::span<const int> compute, std::span<const int> background) {
  const cpu_set_t compute_mask = mask_of(compute);
  const cpu_set_t background_mask = mask_of(background);
  Move move;
  std::set<int> seen = excluded_;
  try {
    for (auto found = without(threads_(), seen); !found.empty();
         found = without(threads_(), seen)) {
      for (const int thread : found) {
        seen.insert(thread);
        move.put(thread, is_background(thread) ? background_mask : compute_mask);
      }
    }
  } catch (...) {
    move.undo();
    for (const int thread : without(threads_(), seen)) {
      move.undo_child(thread);
    }
    throw;
  }
}

bool HostPartition::is_background(int thread) {
  if (background_.contains(thread)) {
    return true;
  }
  if (thread == ::getpid()) {
    return false;  // it bears the program's name, whatever that is
  }
  const std::string name = thread_name(thread);
  const bool known = std::ranges::any_of(
      kBackgroundNames, [&](std::string_view prefix) { return name.starts_with(prefix); });
  if (known) {
    background_.insert(thread);
  }
  return known;
}

}  // namespace windrow
