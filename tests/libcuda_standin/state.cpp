#include "state.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace windrow::standin {
namespace {

// A process looks once for the daemon in its pipe folder, and runs without MPS where there is none.
// The server queues clients of another user: their cuInit does not return. A client's line in
// `joined` is what the daemon's stand-in reports of it: number and PID namespace, as it sees them.
bool joins_mps_daemon() {
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  if (folder == nullptr) {
    return false;
  }
  const std::string pipes = folder;
  struct stat control{};
  if (::stat((pipes + "/control").c_str(), &control) != 0) {
    return false;
  }
  while (control.st_uid != ::getuid() || ::access((pipes + "/hang").c_str(), F_OK) == 0) {
    ::pause();
  }
  struct stat space{};
  if (::stat("/proc/self/ns/pid", &space) == 0) {
    std::ofstream joined(pipes + "/joined", std::ios::app);
    joined << std::to_string(::getpid()) + " " + std::to_string(space.st_ino) + "\n";
  }
  return true;
}

Counts count() {
  State& s = state();
  Counts counts{};
  for (const auto& [handle, physical] : s.handles) {
    counts.rdma_handles += physical.rdma ? 1 : 0;
  }
  for (const auto& [begin, reservation] : s.reservations) {
    counts.mappings += static_cast<long long>(reservation.mappings.size());
  }
  counts.handles = static_cast<long long>(s.handles.size());
  counts.reservations = static_cast<long long>(s.reservations.size());
  counts.streams = static_cast<long long>(s.streams.size());
  counts.events = static_cast<long long>(s.events.size());
  counts.contexts = s.primary_retained;
  counts.green_contexts = static_cast<long long>(s.greens.size());
  counts.modules = static_cast<long long>(s.modules.size());
  counts.maps = s.maps;
  counts.accesses = s.accesses;
  counts.violations = static_cast<long long>(s.violations.size());
  counts.calls = s.calls;
  return counts;
}

// Says at the end of the process what it left behind. Contexts are the process's own.
struct Farewell {
  ~Farewell() {
    const Counts c = count();
    for (const auto& rule : state().violations) {
      std::fprintf(stderr, "libcuda stand-in: rule broken: %s\n", rule.c_str());
    }
    if (c.handles + c.mappings + c.reservations + c.events + c.modules > 0) {
      std::fprintf(stderr,
                   "libcuda stand-in: leaked %lld handles, %lld mappings, %lld reservations, "
                   "%lld events, %lld modules\n",
                   c.handles, c.mappings, c.reservations, c.events, c.modules);
    }
  }
} farewell;

std::string name_of(unsigned gpu) {
  std::string name = "GPU-";
  const windrow::cuda::Uuid uuid = uuid_of(gpu);
  for (unsigned i = 0; i < sizeof(uuid.bytes); ++i) {
    char text[4];
    std::snprintf(text, sizeof(text), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                  uuid.bytes[i]);
    name += text;
  }
  return name;
}

// As CUDA_VISIBLE_DEVICES has them, up to the first invalid one.
std::vector<unsigned> visible_gpus(unsigned gpus) {
  std::vector<unsigned> found;
  const char* named = std::getenv("CUDA_VISIBLE_DEVICES");
  if (named == nullptr) {
    for (unsigned gpu = 0; gpu < gpus; ++gpu) {
      found.push_back(gpu);
    }
    return found;
  }
  std::stringstream words(named);
  for (std::string word; std::getline(words, word, ',');) {
    unsigned gpu = 0;
    while (gpu < gpus && word != std::to_string(gpu) && word != name_of(gpu)) {
      ++gpu;
    }
    if (gpu == gpus) {
      break;
    }
    found.push_back(gpu);
  }
  return found;
}

}  // namespace

bool is_visible(int device) {
  return device >= 0 && device < static_cast<int>(state().visible.size());
}

windrow::cuda::Uuid uuid_of(unsigned gpu) {
  windrow::cuda::Uuid uuid{};
  for (unsigned i = 0; i < sizeof(uuid.bytes); ++i) {
    uuid.bytes[i] = static_cast<unsigned char>(0xa0 + i);
  }
  uuid.bytes[sizeof(uuid.bytes) - 1] = static_cast<unsigned char>(0xaf + gpu);
  return uuid;
}

std::size_t setting(const char* name, std::size_t usual) {
  const char* text = std::getenv(name);
  return text == nullptr ? usual : std::strtoull(text, nullptr, 0);
}

int driver_version() {
  return static_cast<int>(setting("WINDROW_STANDIN_CUDA", 13000));
}

State& state() {
  static auto* all = new State;  // outlives Farewell and whatever else ends late
  return *all;
}

Result refuse(Result result, const std::string& rule) {
  state().violations.push_back(rule);
  return result;
}

Result enter() {
  ++state().calls;
  if (state().is_gone) {
    return cuda::kDeinitialized;
  }
  return state().initialized ? cuda::kSuccess
                             : refuse(cuda::kNotInitialized, "a call before cuInit");
}

Result enter_context(const char* call) {
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  return current() != nullptr
             ? cuda::kSuccess
             : refuse(cuda::kInvalidContext,
                      std::string(call) + " without a context current on the thread");
}

}  // namespace windrow::standin

using namespace windrow::standin;

extern "C" {

__attribute__((visibility("default"))) Result cuInit(unsigned flags) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  ++s.calls;
  s.granularity = setting("WINDROW_STANDIN_GRANULARITY", s.granularity);
  s.memory = setting("WINDROW_STANDIN_MEMORY", s.memory);
  s.sms = static_cast<unsigned>(setting("WINDROW_STANDIN_SMS", s.sms));
  s.capability = static_cast<int>(setting("WINDROW_STANDIN_CAPABILITY", 9));
  s.rdma = setting("WINDROW_STANDIN_RDMA", 1) != 0;
  s.narrows = setting("WINDROW_STANDIN_NARROWS", 1) != 0;
  s.reads = setting("WINDROW_STANDIN_READ_ONLY", 1) != 0;
  s.visible = visible_gpus(static_cast<unsigned>(setting("WINDROW_STANDIN_GPUS", 1)));
  // libcuda takes itself down at the process's exit, before what was there before its cuInit.
  if (!s.initialized && std::atexit([] { state().is_gone = true; }) != 0) {
    return windrow::cuda::kOutOfMemory;
  }
  if (!s.initialized) {
    s.is_mps_client = joins_mps_daemon();
  }
  s.initialized = true;
  return flags == 0 ? windrow::cuda::kSuccess : windrow::cuda::kInvalidValue;
}

__attribute__((visibility("default"))) void windrow_standin_counts(Counts* counts) {
  const std::scoped_lock lock(state().mutex);
  *counts = count();
}

// From now on the device has so much memory; returns how much it had.
__attribute__((visibility("default"))) std::size_t windrow_standin_set_memory(std::size_t bytes) {
  const std::scoped_lock lock(state().mutex);
  return std::exchange(state().memory, bytes);
}

// A context of the device that is not its primary one, as cuCtxCreate makes them; not current.
__attribute__((visibility("default"))) windrow::cuda::Context windrow_standin_foreign_context() {
  const std::scoped_lock lock(state().mutex);
  const auto context = new_object<windrow::cuda::Context>();
  state().foreign.insert(context);
  return context;
}

// The rules that were broken since the last call, a line each. Valid until the next call.
__attribute__((visibility("default"))) const char* windrow_standin_take_violations() {
  static std::string text;
  const std::scoped_lock lock(state().mutex);
  text.clear();
  for (const auto& rule : state().violations) {
    text += rule + "\n";
  }
  state().violations.clear();
  return text.c_str();
}
}
