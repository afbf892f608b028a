#include "windrow/green_partition.h"

#include <string>

#include "cuda_event.h"
#include "smid_kernel.h"

namespace windrow {
namespace {

// Drivers of 12.x do not say it; their documentation does, for each architecture.
unsigned smallest_of(const CudaContext& context, const cuda::DeviceResource& all) {
  if (all.sm.min_partition != 0) {
    return all.sm.min_partition;
  }
  const int major = context.attribute(cuda::DeviceAttribute::kComputeCapabilityMajor);
  return major >= 9 ? 8 : major == 8 ? 4 : 2;
}

}  // namespace

std::optional<unsigned> smallest_share(const CudaContext& context) {
  cuda::DeviceResource all{};
  const bool has_shares = context.library().has_green() &&
                          context.library().green().cuDeviceGetDevResource(
                              context.device(), &all, cuda::kResourceSm) == cuda::kSuccess;
  return has_shares ? std::optional(smallest_of(context, all)) : std::nullopt;
}

class GreenShares::Share {
 public:
  Share(const CudaContext& context, const cuda::GreenCalls& green,
        std::vector<cuda::DeviceResource> resources)
      : context_(context), green_(green) {
    cuda::ResourceDesc desc = nullptr;
    context_.check(green_.cuDevResourceGenerateDesc(&desc, resources.data(),
                                                    static_cast<unsigned>(resources.size())),
                   "describing a share of SMs");
    context_.check(green_.cuGreenCtxCreate(&green_context_, desc, context_.device(),
                                           cuda::kGreenDefaultStream),
                   "creating a green context");
    const auto made =
        green_.cuGreenCtxStreamCreate(&stream_, green_context_, cuda::kStreamNonBlocking, 0);
    if (made != cuda::kSuccess) {
      green_.cuGreenCtxDestroy(green_context_);
      context_.check(made, "creating a stream in a green context");
    }
    for (const auto& resource : resources) {
      units_ += static_cast<int>(resource.sm.count);
    }
  }
  // Every SM: a stream of the primary context.
  Share(const CudaContext& context, const cuda::GreenCalls& green, int units)
      : context_(context), green_(green), units_(units) {
    const CudaContext::Current current(context_);
    context_.check(context_.calls().cuStreamCreate(&stream_, cuda::kStreamNonBlocking),
                   "creating a stream");
  }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;
  ~Share() {
    const CudaContext::Current current(context_);
    context_.library().check_quietly(context_.calls().cuStreamDestroy(stream_), "cuStreamDestroy");
    if (green_context_ != nullptr) {
      context_.library().check_quietly(green_.cuGreenCtxDestroy(green_context_),
                                       "cuGreenCtxDestroy");
    }
  }

  [[nodiscard]] cuda::Stream stream() const { return stream_; }
  [[nodiscard]] int units() const { return units_; }

 private:
  const CudaContext& context_;
  const cuda::GreenCalls& green_;
  cuda::GreenContext green_context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  int units_ = 0;
};

GreenShares::GreenShares(std::shared_ptr<const CudaContext> context)
    : context_(std::move(context)), green_(context_->library().green()) {
  split();
  if (groups_.size() < 2) {
    throw DriverUnavailable("the GPU's " + std::to_string(total_units_) + " SMs make " +
                            std::to_string(groups_.size()) + " group; two are needed to share it");
  }
  require_events();
}

GreenShares::~GreenShares() = default;

// NVIDIA's text has it that a green context is the primary one with fewer resources: events are the
// device's own (CUDA's runtime, "APIs operating on device resources"), cuGreenCtxRecordEvent asks
// for an event of the same primary context, and cuStreamGetCtx_v2 names that context for a green
// stream. torch relies on it at each step, so a driver that has it otherwise is found out here.
void GreenShares::require_events() {
  const CudaContext::Current current(*context_);
  try {
    CudaEvent(context_, stream(Partition::Side::kFinetune, 1)).wait();
  } catch (const Error& error) {
    throw DriverUnavailable(std::string("this driver keeps events of the primary context from "
                                        "streams of green contexts, as torch uses them: ") +
                            error.what());
  }
}

void GreenShares::split() {
  cuda::DeviceResource all{};
  context_->check(green_.cuDeviceGetDevResource(context_->device(), &all, cuda::kResourceSm),
                  "reading the GPU's SMs");
  const unsigned smallest = smallest_of(*context_, all);
  total_units_ = static_cast<int>(all.sm.count);
  unsigned count = 0;
  const auto split_into = [&](cuda::DeviceResource* groups, cuda::DeviceResource* rest) {
    context_->check(green_.cuDevSmResourceSplitByCount(groups, &count, &all, rest, 0, smallest),
                    "splitting the GPU's SMs");
  };
  split_into(nullptr, nullptr);
  groups_.resize(count);
  cuda::DeviceResource rest{};
  split_into(groups_.data(), &rest);
  groups_.resize(count);
  group_units_ = groups_.empty() ? total_units_ : static_cast<int>(groups_[0].sm.count);
  // Only resources of one alignment may be described together (12.x: all of one split).
  if (rest.type == cuda::kResourceSm && !groups_.empty() &&
      rest.sm.coscheduled_alignment == groups_[0].sm.coscheduled_alignment) {
    rest_ = rest;
  }
}

std::vector<cuda::DeviceResource> GreenShares::resources(Partition::Side side, int groups) const {
  if (side == Partition::Side::kFinetune) {
    return {groups_.end() - groups, groups_.end()};
  }
  std::vector<cuda::DeviceResource> taken(groups_.begin(), groups_.begin() + groups);
  if (rest_) {
    taken.push_back(*rest_);
  }
  return taken;
}

const GreenShares::Share& GreenShares::share(Partition::Side side, int groups) {
  const MutexLock lock(mutex_);
  auto& share = shares_[{side, groups}];
  if (!share && groups == this->groups()) {
    share = std::make_unique<Share>(*context_, green_, total_units_);
  } else if (!share) {
    share = std::make_unique<Share>(*context_, green_, resources(side, groups));
  }
  return *share;
}

cuda::Stream GreenShares::stream(Partition::Side side, int groups) {
  return share(side, groups).stream();
}

int GreenShares::units(Partition::Side side, int groups) {
  return share(side, groups).units();
}

std::uintptr_t GreenPartition::enter(Side side, int groups) {
  require_share(*this, groups);
  return reinterpret_cast<std::uintptr_t>(shares_->stream(side, groups));
}

int GreenPartition::units(Side side, int groups) {
  require_share(*this, groups);
  return shares_->units(side, groups);
}

std::vector<unsigned> GreenPartition::measure(Side side, int groups) {
  require_share(*this, groups);
  return smids_of(driver_, shares_->stream(side, groups), shares_->units(side, groups));
}

}  // namespace windrow
