#pragma once

#include <memory>
#include <string>

#include "windrow/libcuda.h"

namespace windrow {

// One device's primary context, the one that torch uses too, and the stream of our own copies and
// fills. Shared by everything that was made in it; released when the last of them is gone. Any
// thread.
class CudaContext {
 public:
  // Throws DriverUnavailable where the device does not exist or cannot share memory.
  CudaContext(std::shared_ptr<const Libcuda> library, int ordinal);
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;
  ~CudaContext();

  [[nodiscard]] const Libcuda& library() const { return *library_; }
  [[nodiscard]] const cuda::CoreCalls& calls() const { return library_->calls(); }
  [[nodiscard]] cuda::Device device() const { return device_; }
  [[nodiscard]] cuda::Context handle() const { return context_; }
  [[nodiscard]] int ordinal() const { return ordinal_; }
  [[nodiscard]] cuda::Stream copies() const { return copies_; }
  [[nodiscard]] int attribute(cuda::DeviceAttribute which) const;
  // Whether the context is shared by MPS; false where the driver cannot tell.
  [[nodiscard]] bool is_mps_client() const;
  // "1.5 of 80.0 GiB are free".
  [[nodiscard]] std::string describe_memory() const;
  void check(cuda::Result result, const std::string& what) const { library_->check(result, what); }

  // Makes the context the calling thread's own for as long as the object lives. Never rely on the
  // one that is current: NCCL, for one, changes it. Does not throw, for destructors use it too; the
  // calls that follow fail where it could not be had.
  class Current {
   public:
    explicit Current(const CudaContext& context);
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current();

   private:
    const CudaContext& context_;
    bool pushed_;
  };

 private:
  void require_virtual_memory() const;
  void make_stream();

  std::shared_ptr<const Libcuda> library_;
  int ordinal_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::Stream copies_ = nullptr;
};

}  // namespace windrow
