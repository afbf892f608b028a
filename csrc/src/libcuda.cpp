#include "windrow/libcuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>

namespace windrow {
namespace {

// Which variant of each call cuGetProcAddress gives: those of 12.5, the first with all that we use.
// An older driver refuses to look for anything newer than itself, and is asked for its own.
constexpr int kAbiVersion = 12050;
constexpr int kOldestVersion = 12000;

using GetProcAddress = cuda::Result (*)(const char*, void**, int, unsigned long long, int*);

[[noreturn]] void no_gpu(const std::string& what) {
  throw DriverUnavailable(
      what +
      "; install NVIDIA's driver, give the container a GPU (nvidia.com/gpu), or use the "
      "host driver");
}

}  // namespace

std::string cuda_version_text(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::shared_ptr<const Libcuda> Libcuda::open(const std::string& name) {
  return std::shared_ptr<const Libcuda>(new Libcuda(name));
}

Libcuda::Libcuda(std::string name) : name_(std::move(name)) {
  library_ = ::dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    no_gpu("CUDA's driver library cannot be opened (" + std::string(::dlerror()) + ")");
  }
  try {
    read_version();
    resolve_all();
    if (const auto result = core_.cuInit(0); result != cuda::kSuccess) {
      no_gpu("cuInit says " + describe(result) + " (driver of " + cuda_version_text(version_) +
             ")");
    }
  } catch (...) {
    ::dlclose(library_);
    throw;
  }
}

Libcuda::~Libcuda() {
  ::dlclose(library_);
}

// It may be asked before cuInit.
void Libcuda::read_version() {
  const auto read =
      reinterpret_cast<decltype(core_.cuDriverGetVersion)>(::dlsym(library_, "cuDriverGetVersion"));
  if (read == nullptr || read(&version_) != cuda::kSuccess) {
    throw DriverUnavailable(name_ + " does not tell its version; is it CUDA's driver?");
  }
  if (version_ < kOldestVersion) {
    throw DriverUnavailable("NVIDIA's driver is of " + cuda_version_text(version_) +
                            "; Windrow needs one of CUDA 12.0 or newer (R525), and of 12.5 or "
                            "newer (R555) to share a GPU by green contexts");
  }
}

void* Libcuda::resolve(const char* call) const {
  const auto get = reinterpret_cast<GetProcAddress>(::dlsym(library_, "cuGetProcAddress_v2"));
  void* found = nullptr;
  const int version = std::min(version_, kAbiVersion);
  if (get == nullptr || get(call, &found, version, 0, nullptr) != cuda::kSuccess) {
    return nullptr;
  }
  return found;
}

void Libcuda::resolve_all() {
#define WINDROW_RESOLVE(call, ...)                                                              \
  core_.call = reinterpret_cast<decltype(core_.call)>(resolve(#call));                          \
  if (core_.call == nullptr) {                                                                  \
    throw DriverUnavailable(name_ + " of " + cuda_version_text(version_) +                      \
                            " has no " #call "; Windrow needs a driver of CUDA 12.0 or newer"); \
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
#define WINDROW_RESOLVE(call, ...) \
  context_.call = reinterpret_cast<decltype(context_.call)>(resolve(#call));
  WINDROW_CUDA_CONTEXT_CALLS(WINDROW_RESOLVE)
#undef WINDROW_RESOLVE
}

const cuda::GreenCalls& Libcuda::green() const {
  if (!has_green()) {
    throw DriverUnavailable("NVIDIA's driver is of " + cuda_version_text(version_) +
                            " and has no " + lacks_green_ +
                            "; green contexts need one of CUDA 12.5 or newer (R555)");
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
  if (result == cuda::kDeinitialized) {
    throw DeviceGone(what + ": libcuda has ended");
  }
  if (result != cuda::kSuccess) {
    throw Error(what + ": " + describe(result));
  }
}

void Libcuda::check_quietly(cuda::Result result, const char* what) const noexcept {
  if (result != cuda::kSuccess && result != cuda::kDeinitialized) {
    std::fprintf(stderr, "windrow: %s: CUresult %d\n", what, result);
  }
}

}  // namespace windrow
