#include "windrow/libcuda.h"

#include <dlfcn.h>

#include <cstdio>

namespace windrow {
namespace {

// Which variant of each call cuGetProcAddress gives: those of 12.5, the first with all that we use.
constexpr int kAbiVersion = 12050;

using GetProcAddress = cuda::Result (*)(const char*, void**, int, unsigned long long, int*);

[[noreturn]] void no_gpu(const std::string& what) {
  throw DriverUnavailable(
      what +
      "; install NVIDIA's driver, give the container a GPU (nvidia.com/gpu), or use the "
      "host driver");
}

}  // namespace

std::shared_ptr<const Libcuda> Libcuda::open(const std::string& name) {
  return std::shared_ptr<const Libcuda>(new Libcuda(name));
}

Libcuda::Libcuda(std::string name) : name_(std::move(name)) {
  library_ = ::dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    no_gpu("CUDA's driver library cannot be opened (" + std::string(::dlerror()) + ")");
  }
  try {
    resolve_all();
    if (const auto result = core_.cuInit(0); result != cuda::kSuccess) {
      no_gpu("cuInit says " + describe(result));
    }
    check(core_.cuDriverGetVersion(&version_), "reading the version of CUDA's driver");
  } catch (...) {
    ::dlclose(library_);
    throw;
  }
}

Libcuda::~Libcuda() {
  ::dlclose(library_);
}

void* Libcuda::resolve(const char* call) const {
  const auto get = reinterpret_cast<GetProcAddress>(::dlsym(library_, "cuGetProcAddress_v2"));
  void* found = nullptr;
  if (get == nullptr || get(call, &found, kAbiVersion, 0, nullptr) != cuda::kSuccess) {
    return nullptr;
  }
  return found;
}

void Libcuda::resolve_all() {
#define WINDROW_RESOLVE(call, ...)                                                               \
  core_.call = reinterpret_cast<decltype(core_.call)>(resolve(#call));                           \
  if (core_.call == nullptr) {                                                                   \
    throw DriverUnavailable(name_ + " has no " #call "; CUDA's driver 12.0 or newer is needed"); \
  }
  WINDROW_CUDA_CORE_CALLS(WINDROW_RESOLVE)
#undef WINDROW_RESOLVE
#define WINDROW_RESOLVE(call, ...)                                       \
  green_.call = reinterpret_cast<decltype(green_.call)>(resolve(#call)); \
  if (green_.call == nullptr && lacks_green_.empty()) {                  \
    lacks_green_ = #call;                                                \
  }
  WINDROW_CUDA_GREEN_CALLS(WINDROW_RESOLVE)
#undef WINDROW_RESOLVE
}

const cuda::GreenCalls& Libcuda::green() const {
  if (!lacks_green_.empty()) {
    throw DriverUnavailable(name_ + " has no " + lacks_green_ +
                            "; green contexts need CUDA's driver 12.5 or newer");
  }
  return green_;
}

std::string Libcuda::describe(cuda::Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (core_.cuGetErrorName(result, &name) != cuda::kSuccess || name == nullptr) {
    return "CUresult " + std::to_string(result);
  }
  core_.cuGetErrorString(result, &text);
  return std::string(name) + (text == nullptr ? "" : " (" + std::string(text) + ")");
}

void Libcuda::check(cuda::Result result, const std::string& what) const {
  if (result != cuda::kSuccess) {
    throw Error(what + ": " + describe(result));
  }
}

void Libcuda::check_quietly(cuda::Result result, const char* what) const noexcept {
  if (result != cuda::kSuccess) {
    std::fprintf(stderr, "windrow: %s: CUresult %d\n", what, result);
  }
}

}  // namespace windrow
