#include "windrow/drivers.h"

#include <charconv>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "windrow/cuda_driver.h"
#include "windrow/host_driver.h"
#include "windrow/libcuda.h"
#include "windrow/mutex.h"

namespace windrow {
namespace {

struct Registry {
  Mutex mutex;
  std::string library WINDROW_GUARDED_BY(mutex) = kLibcuda;
  std::map<std::pair<std::string, int>, std::unique_ptr<CudaDriver>> drivers
      WINDROW_GUARDED_BY(mutex);
};

// Never taken down: arenas may live until the process ends, and so must what they were made with.
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

int ordinal_of(const std::string& name) {
  if (name == "cuda") {
    return 0;
  }
  int ordinal = -1;
  const char* begin = name.c_str() + (name.rfind("cuda:", 0) == 0 ? 5 : name.size());
  const char* end = name.c_str() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, ordinal);
  if (begin == end || stop != end || error != std::errc{}) {
    throw std::invalid_argument("unknown driver '" + name +
                                "': use host, cuda, or cuda:N for GPU N");
  }
  return ordinal;
}

}  // namespace

Driver& named_driver(const std::string& name) {
  if (name == "host") {
    return host_driver();
  }
  const int ordinal = ordinal_of(name);
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  auto& driver = all.drivers[{all.library, ordinal}];
  if (!driver) {
    driver = std::make_unique<CudaDriver>(all.library, ordinal);
  }
  return *driver;
}

std::vector<std::string> gpu_uuids() {
  std::string name;
  {
    Registry& all = registry();
    const MutexLock lock(all.mutex);
    name = all.library;
  }
  const auto library = Libcuda::open(name);
  int devices = 0;
  library->check(library->calls().cuDeviceGetCount(&devices), "counting the GPUs");
  std::vector<std::string> found;
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    cuda::Device device = 0;
    library->check(library->calls().cuDeviceGet(&device, ordinal),
                   "opening GPU " + std::to_string(ordinal));
    found.push_back(uuid_of(*library, device));
  }
  return found;
}

void use_libcuda(const std::string& library) {
  const MutexLock lock(registry().mutex);
  registry().library = library;
}

}  // namespace windrow
