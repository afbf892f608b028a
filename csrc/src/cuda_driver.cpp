#include "windrow/cuda_driver.h"

#include <array>
#include <numeric>
#include <stdexcept>

#include "cuda_event.h"
#include "cuda_memory.h"
#include "windrow/green_partition.h"
#include "windrow/host_driver.h"

namespace windrow {
namespace {

cuda::DevicePtr address(const std::byte* pointer) {
  return reinterpret_cast<cuda::DevicePtr>(pointer);
}

std::string hexadecimal(const cuda::Uuid& uuid) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

}  // namespace

std::string uuid_of(const Libcuda& library, cuda::Device device) {
  cuda::Uuid uuid{};
  library.check(library.calls().cuDeviceGetUuid(&uuid, device), "reading the GPU's UUID");
  return hexadecimal(uuid);
}

CudaDriver::CudaDriver(const std::string& library, int ordinal)
    : context_(std::make_shared<const CudaContext>(Libcuda::open(library), ordinal)),
      name_(ordinal == 0 ? "cuda" : "cuda:" + std::to_string(ordinal)) {
  const CudaContext::Current current(*context_);
  const auto properties = allocation_properties(*context_);
  context_->check(context_->calls().cuMemGetAllocationGranularity(&granularity_, &properties,
                                                                  cuda::kGranularityMinimum),
                  "reading the granularity of device memory");
}

Driver& CudaDriver::host() {
  return host_driver();
}

void CudaDriver::require_sealed(int /*fd*/) const {}

DeviceFacts CudaDriver::facts() const {
  std::array<char, 256> name{};
  context_->check(context_->calls().cuDeviceGetName(name.data(), static_cast<int>(name.size()),
                                                    context_->device()),
                  "reading the GPU's name");
  std::size_t memory = 0;
  context_->check(context_->calls().cuDeviceTotalMem(&memory, context_->device()),
                  "reading the GPU's memory");
  DeviceFacts facts{.name = name.data(),
                    .uuid = uuid_of(context_->library(), context_->device()),
                    .compute_units = {}};
  facts.compute_units.resize(
      static_cast<std::size_t>(context_->attribute(cuda::DeviceAttribute::kMultiprocessorCount)));
  std::iota(facts.compute_units.begin(), facts.compute_units.end(), 0);
  facts.memory_bytes = static_cast<std::int64_t>(memory);
  facts.version = context_->library().version();
  facts.is_mps_client = context_->is_mps_client();
  facts.unit_granularity = smallest_share(*context_).value_or(1);
  return facts;
}

std::size_t CudaDriver::rounded(std::size_t bytes) const {
  return (bytes + granularity_ - 1) / granularity_ * granularity_;
}

std::unique_ptr<Reservation> CudaDriver::reserve(std::size_t bytes) {
  return std::make_unique<CudaReservation>(context_, bytes, rounded(bytes));
}

std::unique_ptr<Memory> CudaDriver::create(std::size_t bytes, const char* label) {
  const CudaContext::Current current(*context_);
  const auto properties = allocation_properties(*context_);
  cuda::MemoryHandle handle = 0;
  const auto created = context_->calls().cuMemCreate(&handle, rounded(bytes), &properties, 0);
  const std::string what =
      "creating " + std::to_string(bytes) + " bytes of device memory for " + label;
  if (created == cuda::kOutOfMemory) {
    throw Error(what + ": " + context_->library().describe(created) + "; " +
                context_->describe_memory() + ", ask for less");
  }
  context_->check(created, what);
  auto memory = std::make_unique<CudaMemory>(std::make_shared<const CudaHandle>(context_, handle),
                                             bytes, rounded(bytes));
  clear(*memory);
  return memory;
}

// CUDA does not say what new memory holds, and it may have been another tenant's.
void CudaDriver::clear(const Memory& memory) {
  const auto mapping = map_whole(*this, memory, Access::kReadWrite);
  context_->check(context_->calls().cuMemsetD8Async(address(mapping->data()), 0,
                                                    rounded(memory.bytes()), context_->copies()),
                  "clearing device memory");
  context_->check(context_->calls().cuStreamSynchronize(context_->copies()),
                  "waiting until device memory is cleared");
}

std::unique_ptr<Memory> CudaDriver::import_fd(OwnedFd fd, std::size_t bytes) {
  const CudaContext::Current current(*context_);
  cuda::MemoryHandle handle = 0;
  // The descriptor travels in the place of a pointer.
  void* shared = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get()));
  context_->check(context_->calls().cuMemImportFromShareableHandle(&handle, shared,
                                                                   cuda::kHandlePosixDescriptor),
                  "importing " + std::to_string(bytes) + " bytes of device memory");
  return std::make_unique<CudaMemory>(std::make_shared<const CudaHandle>(context_, handle), bytes,
                                      rounded(bytes));
}

std::unique_ptr<Event> CudaDriver::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const CudaContext::Current current(*context_);
  context_->check(
      context_->calls().cuMemcpyAsync(address(to), address(from), bytes, context_->copies()),
      "copying " + std::to_string(bytes) + " bytes");
  return std::make_unique<CudaEvent>(context_, context_->copies());
}

std::unique_ptr<Partition> CudaDriver::partition(std::span<const int> units) {
  if (!units.empty() && units.size() != facts().compute_units.size()) {
    throw std::invalid_argument("the SMs of a GPU are shared whole: name none of them");
  }
  const MutexLock lock(mutex_);
  if (!shares_) {
    shares_ = std::make_shared<GreenShares>(context_);
  }
  return std::make_unique<GreenPartition>(*this, shares_);
}

}  // namespace windrow
