#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "libcuda_standin/standin.h"
#include "windrow/cuda_driver.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"

namespace windrow::testing {

// The stand-in's own account of what the process holds of it.
class Standin {
 public:
  static standin::Counts counts() {
    standin::Counts counts{};
    reinterpret_cast<standin::ReadCounts>(find("windrow_standin_counts"))(&counts);
    return counts;
  }
  // Rules broken since the last call, a line each.
  static std::string violations() {
    return reinterpret_cast<standin::TakeViolations>(find("windrow_standin_take_violations"))();
  }
  // From now on the device has so much memory; returns how much it had.
  static std::size_t set_memory(std::size_t bytes) {
    return reinterpret_cast<standin::SetMemory>(find("windrow_standin_set_memory"))(bytes);
  }
  static cuda::Context foreign_context() {
    return reinterpret_cast<standin::MakeForeignContext>(find("windrow_standin_foreign_context"))();
  }
  // Captures, which the core does not make itself: their calls are looked up here. `mode` as
  // CUstreamCaptureMode has it (0: global, 1: of the thread, 2: relaxed).
  static cuda::Result begin_capture(cuda::Stream stream, int mode) {
    return call<cuda::Stream, int>("cuStreamBeginCapture_v2", stream, mode);
  }
  static cuda::Result end_capture(cuda::Stream stream, void** graph) {
    return call<cuda::Stream, void**>("cuStreamEndCapture", stream, graph);
  }
  static cuda::Result exchange_mode(int* mode) {
    return call<int*>("cuThreadExchangeStreamCaptureMode", mode);
  }
  static cuda::Result launch_graph(void* graph, cuda::Stream stream) {
    return call<void*, cuda::Stream>("cuGraphLaunch", graph, stream);
  }
  static cuda::Result destroy_graph(void* graph) { return call<void*>("cuGraphDestroy", graph); }
  // Things that were made and not taken away, contexts aside.
  static long long held() {
    const auto c = counts();
    return c.handles + c.mappings + c.reservations + c.events + c.modules;
  }

 private:
  template <class... Arguments>
  static cuda::Result call(const char* name, Arguments... arguments) {
    return reinterpret_cast<cuda::Result (*)(Arguments...)>(find(name))(arguments...);
  }
  static void* find(const char* name) {
    static void* library = ::dlopen(WINDROW_STANDIN, RTLD_NOW | RTLD_LOCAL);
    return ::dlsym(library, name);
  }
};

// The stand-in is another device, or has another driver, as long as it lives: it reads its settings
// when it is opened.
class StandinSetting {
 public:
  StandinSetting(const char* name, const char* value) : name_(name) {
    ::setenv(name_, value, 1);
    static_cast<void>(Libcuda::open(WINDROW_STANDIN));
  }
  StandinSetting(const StandinSetting&) = delete;
  StandinSetting& operator=(const StandinSetting&) = delete;
  ~StandinSetting() {
    ::unsetenv(name_);
    static_cast<void>(Libcuda::open(WINDROW_STANDIN));
  }

 private:
  const char* name_;
};

// Drivers that suites run on, by name. "gpu" is a real one; null where this machine has none.
inline const std::vector<std::string>& driver_names() {
  static const std::vector<std::string> names{"host", "standin", "gpu"};
  return names;
}

inline Driver* driver_of(const std::string& name) {
  if (name == "host") {
    return &host_driver();
  }
  if (name == "standin") {
    static CudaDriver driver(WINDROW_STANDIN, 0);
    return &driver;
  }
  try {
    static CudaDriver driver(kLibcuda, 0);
    return &driver;
  } catch (const DriverUnavailable&) {
    return nullptr;
  }
}

// Through a copy, because processors cannot read a GPU's memory.
inline void put(Driver& driver, std::byte* at, std::byte value) {
  driver.copy(at, &value, 1)->wait();
}
inline std::byte get(Driver& driver, const std::byte* at) {
  std::byte value{};
  driver.copy(&value, at, 1)->wait();
  return value;
}

}  // namespace windrow::testing
