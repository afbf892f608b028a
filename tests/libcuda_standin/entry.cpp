// cuGetProcAddress: the door through which every other call is found.
#include <cstring>

#include "state.h"

#define WINDROW_DECLARE(call, ...) extern "C" windrow::cuda::Result call(__VA_ARGS__);
namespace cuda = windrow::cuda;
using namespace windrow::cuda;
WINDROW_CUDA_CORE_CALLS(WINDROW_DECLARE)
WINDROW_CUDA_GREEN_CALLS(WINDROW_DECLARE)
#undef WINDROW_DECLARE

extern "C"
    __attribute__((visibility("default"))) Result cuGetProcAddress_v2(const char* symbol,
                                                                      void** found, int /*version*/,
                                                                      unsigned long long /*flags*/,
                                                                      int* /*status*/) {
#define WINDROW_FIND(call, ...)              \
  if (std::strcmp(symbol, #call) == 0) {     \
    *found = reinterpret_cast<void*>(&call); \
    return kSuccess;                         \
  }
  WINDROW_CUDA_CORE_CALLS(WINDROW_FIND)
  WINDROW_CUDA_GREEN_CALLS(WINDROW_FIND)
#undef WINDROW_FIND
  *found = nullptr;
  return kNotFound;
}
