// cuGetProcAddress: the door through which every other call is found.
#include <cstring>

#include "state.h"

#define WINDROW_DECLARE(call, ...) extern "C" windrow::cuda::Result call(__VA_ARGS__);
namespace cuda = windrow::cuda;
using namespace windrow::cuda;
WINDROW_CUDA_CORE_CALLS(WINDROW_DECLARE)
WINDROW_CUDA_GREEN_CALLS(WINDROW_DECLARE)
WINDROW_CUDA_CONTEXT_CALLS(WINDROW_DECLARE)
#undef WINDROW_DECLARE

namespace {

// The release that brought them: not all of the green calls, but a driver without the last of them
// shares nothing.
constexpr int kGreenSince = 12050;
constexpr int kContextSince = 12050;

}  // namespace

extern "C" __attribute__((visibility("default"))) Result cuGetProcAddress_v2(
    const char* symbol, void** found, int version, unsigned long long /*flags*/, int* /*status*/) {
  *found = nullptr;
  if (version > windrow::standin::driver_version()) {
    return kInvalidValue;  // nothing newer than the driver may be asked for
  }
#define WINDROW_FIND(call, ...)              \
  if (std::strcmp(symbol, #call) == 0) {     \
    *found = reinterpret_cast<void*>(&call); \
    return kSuccess;                         \
  }
  WINDROW_CUDA_CORE_CALLS(WINDROW_FIND)
  if (version >= kGreenSince) {
    WINDROW_CUDA_GREEN_CALLS(WINDROW_FIND)
  }
  if (version >= kContextSince) {
    WINDROW_CUDA_CONTEXT_CALLS(WINDROW_FIND)
  }
#undef WINDROW_FIND
  return kNotFound;
}
