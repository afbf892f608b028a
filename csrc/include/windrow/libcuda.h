#pragma once

#include <memory>
#include <string>

#include "windrow/cuda_abi.h"
#include "windrow/error.h"

namespace windrow {

// CUDA's driver library, opened at run time. Immutable after construction: any thread. It stays
// loaded until the last object that uses it is gone.
class Libcuda {
 public:
  // Opens it by a path or by the name that the loader looks for, and calls cuInit. Throws
  // DriverUnavailable with what to do where the library or a GPU is missing, or the driver is too
  // old.
  [[nodiscard]] static std::shared_ptr<const Libcuda> open(const std::string& name);
  Libcuda(const Libcuda&) = delete;
  Libcuda& operator=(const Libcuda&) = delete;
  ~Libcuda();

  [[nodiscard]] const std::string& name() const { return name_; }
  // 13000 for 13.0.
  [[nodiscard]] int version() const { return version_; }
  [[nodiscard]] const cuda::CoreCalls& calls() const { return core_; }
  // Throws DriverUnavailable where the driver lacks green contexts.
  [[nodiscard]] const cuda::GreenCalls& green() const;
  [[nodiscard]] bool has_green() const { return lacks_green_.empty(); }
  // cuCtxRecordEvent; nullptr where the driver lacks it.
  [[nodiscard]] auto record_context() const { return context_.cuCtxRecordEvent; }

  // Throws Error "what: CUDA_ERROR_NAME (description)" unless the result is success; DeviceGone
  // where the process ends and libcuda has ended before.
  void check(cuda::Result result, const std::string& what) const;
  [[nodiscard]] std::string describe(cuda::Result result) const;
  // For destructors, which must not throw: a line on stderr, but for a libcuda that has ended: what
  // it held is gone with it.
  void check_quietly(cuda::Result result, const char* what) const noexcept;

 private:
  explicit Libcuda(std::string name);
  void read_version();
  void* resolve(const char* call) const;
  void resolve_all();

  std::string name_;
  void* library_ = nullptr;
  int version_ = 0;
  cuda::CoreCalls core_;
  cuda::GreenCalls green_;
  cuda::ContextCalls context_;
  std::string lacks_green_;  // first call that is missing
};

inline constexpr const char* kLibcuda = "libcuda.so.1";

// "CUDA 13.0" for 13000.
[[nodiscard]] std::string cuda_version_text(int version);

}  // namespace windrow
