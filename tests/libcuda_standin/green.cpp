// Green contexts over a simulated set of SMs, and the one kernel that says on which SM it runs. The
// stand-in runs no code of a GPU: it knows that kernel by its name and writes what it would write.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "captures.h"

namespace windrow::standin {
namespace {

constexpr int kResourcesTellSince = 13000;
constexpr unsigned kMostSms = 512;
const cuda::Function kSmidKernel = reinterpret_cast<cuda::Function>(0x20);

// What a resource says of itself, in the bytes that are the driver's own.
struct Internal {
  std::uint64_t from_device;  // 1: may be split
  unsigned char sms[kMostSms / 8];
};
static_assert(sizeof(Internal) <= sizeof(cuda::DeviceResource::internal));

// Smallest part, and what sizes are a multiple of.
unsigned smallest() {
  const int major = state().capability;
  return major >= 9 ? 8 : major == 8 ? 4 : 2;
}
unsigned alignment() {
  return state().capability >= 9 ? 8 : 2;
}

cuda::DeviceResource resource_of(const std::set<unsigned>& sms, bool from_device) {
  cuda::DeviceResource resource{};
  resource.type = cuda::kResourceSm;
  resource.sm.count = static_cast<unsigned>(sms.size());
  if (driver_version() >= kResourcesTellSince) {
    resource.sm.min_partition = smallest();
    // What is left of a split is less regular than its groups.
    resource.sm.coscheduled_alignment = std::gcd(alignment(), resource.sm.count);
  }
  Internal internal{.from_device = from_device ? 1U : 0U, .sms = {}};
  for (const unsigned sm : sms) {
    internal.sms[sm / 8] |= static_cast<unsigned char>(1U << (sm % 8));
  }
  std::memcpy(resource.internal, &internal, sizeof(internal));
  return resource;
}

Internal internal_of(const cuda::DeviceResource& resource) {
  Internal internal{};
  std::memcpy(&internal, resource.internal, sizeof(internal));
  return internal;
}

std::set<unsigned> sms_of(const cuda::DeviceResource& resource) {
  const Internal internal = internal_of(resource);
  std::set<unsigned> sms;
  for (unsigned sm = 0; sm < kMostSms; ++sm) {
    if ((internal.sms[sm / 8] >> (sm % 8) & 1U) != 0) {
      sms.insert(sm);
    }
  }
  return sms;
}

// Neighbouring ids are in different groups, as they do on a GPU.
std::set<unsigned> group(unsigned index, unsigned groups, unsigned size) {
  std::set<unsigned> sms;
  for (unsigned i = 0; i < size; ++i) {
    sms.insert(i * groups + index);
  }
  return sms;
}

void write_sms(DevicePtr out, unsigned blocks, const std::set<unsigned>& sms) {
  auto* words = reinterpret_cast<unsigned*>(out);
  auto next = sms.begin();
  for (unsigned block = 0; block < blocks; ++block) {
    words[block] = *next;
    if (++next == sms.end()) {
      next = sms.begin();
    }
  }
}

}  // namespace
}  // namespace windrow::standin

using namespace windrow::standin;
namespace cuda = windrow::cuda;

extern "C" {
#pragma GCC visibility push(default)

Result cuDeviceGetDevResource(cuda::Device /*device*/, cuda::DeviceResource* resource, int type) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  if (type != cuda::kResourceSm) {
    return refuse(cuda::kInvalidValue, "a resource that is not of SMs");
  }
  std::set<unsigned> all;
  for (unsigned sm = 0; sm < state().sms; ++sm) {
    all.insert(sm);
  }
  *resource = resource_of(all, true);
  return cuda::kSuccess;
}

Result cuDevSmResourceSplitByCount(cuda::DeviceResource* result, unsigned* n_groups,
                                   const cuda::DeviceResource* input,
                                   cuda::DeviceResource* remaining, unsigned /*flags*/,
                                   unsigned min_count) {
  const std::scoped_lock lock(state().mutex);
  if (const Result entered = enter(); entered != cuda::kSuccess) {
    return entered;
  }
  if (internal_of(*input).from_device == 0) {
    return refuse(cuda::kInvalidValue, "a split of what came from a split");
  }
  if (min_count > input->sm.count) {
    return refuse(cuda::kInvalidValue, "a split into groups larger than what is split");
  }
  const unsigned at_least = std::max(min_count, smallest());
  const unsigned size = (at_least + alignment() - 1) / alignment() * alignment();
  const unsigned groups = input->sm.count / size;
  if (result != nullptr) {
    std::set<unsigned> rest = sms_of(*input);
    *n_groups = std::min(*n_groups, groups);
    for (unsigned i = 0; i < *n_groups; ++i) {
      const auto sms = group(i, groups, size);
      for (const unsigned sm : sms) {
        rest.erase(sm);
      }
      result[i] = resource_of(sms, false);
    }
    if (remaining != nullptr) {
      *remaining = resource_of(rest, false);
      remaining->type = rest.empty() ? 0 : cuda::kResourceSm;
    }
  } else {
    *n_groups = groups;
  }
  return cuda::kSuccess;
}

Result cuDevResourceGenerateDesc(cuda::ResourceDesc* desc, cuda::DeviceResource* resources,
                                 unsigned count) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  std::set<unsigned> all;
  for (unsigned i = 0; i < count; ++i) {
    if (resources[i].sm.coscheduled_alignment != resources[0].sm.coscheduled_alignment) {
      return refuse(cuda::kInvalidResourceConfiguration,
                    "a description of resources of different alignment");
    }
    for (const unsigned sm : sms_of(resources[i])) {
      if (resources[i].type != cuda::kResourceSm || !all.insert(sm).second) {
        return refuse(cuda::kInvalidResourceConfiguration,
                      "a description of resources that overlap or are not of SMs");
      }
    }
  }
  if (all.empty()) {
    return refuse(cuda::kInvalidResourceConfiguration, "a description of no SMs");
  }
  *desc = new_object<cuda::ResourceDesc>();
  state().descs[*desc] = std::move(all);
  return cuda::kSuccess;
}

Result cuGreenCtxCreate(cuda::GreenContext* context, cuda::ResourceDesc desc,
                        cuda::Device /*device*/, unsigned flags) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  if (flags != cuda::kGreenDefaultStream || s.descs.count(desc) == 0) {
    return refuse(cuda::kInvalidValue, "a green context without a default stream or a description");
  }
  *context = new_object<cuda::GreenContext>();
  s.greens[*context] = s.descs[desc];
  ++s.primary_retained;
  return cuda::kSuccess;
}

Result cuGreenCtxDestroy(cuda::GreenContext context) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  if (s.greens.erase(context) == 0) {
    return refuse(cuda::kInvalidContext, "an invalid green context destroyed");
  }
  --s.primary_retained;
  for (auto& [key, stream] : s.streams) {
    stream->detached = stream->detached || stream->green == context;
  }
  return cuda::kSuccess;
}

Result cuGreenCtxStreamCreate(cuda::Stream* stream, cuda::GreenContext green, unsigned flags,
                              int /*priority*/) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const Result result = enter(); result != cuda::kSuccess) {
    return result;
  }
  if (flags != cuda::kStreamNonBlocking || s.greens.count(green) == 0) {
    return refuse(cuda::kInvalidValue,
                  "a stream of no green context, or one that is not non-blocking");
  }
  *stream = add_stream(primary(), s.greens[green], green);
  return cuda::kSuccess;
}

Result cuModuleLoadData(cuda::Module* module, const void* image) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuModuleLoadData"); result != cuda::kSuccess) {
    return result;
  }
  if (const Result result = require_no_capture("cuModuleLoadData"); result != cuda::kSuccess) {
    return result;
  }
  const std::string text = static_cast<const char*>(image);
  if (text.find(".version") == std::string::npos || text.find(".target") == std::string::npos) {
    return refuse(cuda::kInvalidImage, "a module that is not PTX");
  }
  *module = new_object<cuda::Module>();
  state().modules.insert(*module);
  return cuda::kSuccess;
}

Result cuModuleUnload(cuda::Module module) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuModuleUnload"); result != cuda::kSuccess) {
    return result;
  }
  return state().modules.erase(module) == 1
             ? cuda::kSuccess
             : refuse(cuda::kInvalidHandle, "an invalid module unloaded");
}

Result cuModuleGetFunction(cuda::Function* function, cuda::Module module, const char* name) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuModuleGetFunction"); result != cuda::kSuccess) {
    return result;
  }
  *function = kSmidKernel;
  return state().modules.count(module) == 1 && std::strcmp(name, "windrow_smid") == 0
             ? cuda::kSuccess
             : cuda::kNotFound;
}

Result cuLaunchKernel(cuda::Function function, unsigned blocks, unsigned, unsigned, unsigned,
                      unsigned, unsigned, unsigned, cuda::Stream stream, void** parameters,
                      void** /*extra*/) {
  const std::scoped_lock lock(state().mutex);
  if (const Result result = enter_context("cuLaunchKernel"); result != cuda::kSuccess) {
    return result;
  }
  StreamState* on = find_stream(stream, "cuLaunchKernel");
  if (on == nullptr || function != kSmidKernel) {
    return cuda::kInvalidHandle;
  }
  const DevicePtr out = *static_cast<DevicePtr*>(parameters[0]);
  const std::size_t bytes = blocks * sizeof(unsigned);
  if (const Result result = require_access(out, bytes, cuda::kAccessReadWrite, "a kernel over");
      result != cuda::kSuccess) {
    return result;
  }
  const std::set<unsigned> sms = on->sms;
  return enqueue(stream, "cuLaunchKernel",
                 {.run = [=] { write_sms(out, blocks, sms); }, .touches = {{out, bytes}}});
}

#pragma GCC visibility pop
}
