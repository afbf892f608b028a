#pragma once

#include <cstddef>

// The part of CUDA's driver interface that the core uses, declared by ourselves from its
// documentation: libcuda is opened at run time, so one wheel serves machines with and without a
// GPU, and building it needs no package of NVIDIA's. `tests/contract/test_cuda_abi.py` compiles
// this header beside NVIDIA's own cuda.h, where there is one, and compares every size and value.
//
// Names in `cuda` are CUDA's without their prefix; the comment names the original where that is not
// plain.
namespace windrow::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using DevicePtr = unsigned long long;
using MemoryHandle = unsigned long long;  // CUmemGenericAllocationHandle
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using GreenContext = struct CUgreenCtx_st*;
using ResourceDesc = struct CUdevResourceDesc_st*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;  // the process ends, and libcuda has ended before
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidImage = 200;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kInvalidResourceConfiguration = 915;
inline constexpr Result kStreamDetached = 917;

enum class DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kVirtualMemorySupported = 102,
  kPosixDescriptorSupported = 103,
  kRdmaOfVirtualMemorySupported = 110,
  kMpsEnabled = 133,  // whether contexts of this process are shared by MPS
};

inline constexpr int kAllocationPinned = 1;
inline constexpr int kHandlePosixDescriptor = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kAccessRead = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kPointerMemoryType = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kMemoryTypeDevice = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kGreenDefaultStream = 1;
inline constexpr int kResourceSm = 1;  // CU_DEV_RESOURCE_TYPE_SM

struct Uuid {  // CUuuid
  unsigned char bytes[16];
};

struct Location {
  int type;
  int id;
};

struct AllocationProperties {  // CUmemAllocationProp
  int type;
  int handle_types;
  Location location;
  void* windows_metadata;
  unsigned char compression;
  unsigned char rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};

struct AccessDesc {  // CUmemAccessDesc
  Location location;
  int flags;
};

// CUdevResource. 12.4 to 13.0 gave the union 48 bytes; since 13.1 it has 40 and a pointer follows.
// 12.x knows only `count` and leaves the other fields as they are.
struct DeviceResource {
  int type;
  unsigned char internal[92];
  struct Sm {
    unsigned count;
    unsigned min_partition;
    unsigned coscheduled_alignment;
    unsigned char rest[36];
  } sm;
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(AccessDesc) == 12);
static_assert(sizeof(DeviceResource) == 144 && offsetof(DeviceResource, sm) == 96);

// Every call: name, then the types of its arguments. All return a Result.
#define WINDROW_CUDA_CORE_CALLS(X)                                                            \
  X(cuInit, unsigned)                                                                         \
  X(cuDriverGetVersion, int*)                                                                 \
  X(cuGetErrorName, Result, const char**)                                                     \
  X(cuGetErrorString, Result, const char**)                                                   \
  X(cuDeviceGetCount, int*)                                                                   \
  X(cuDeviceGet, Device*, int)                                                                \
  X(cuDeviceGetName, char*, int, Device)                                                      \
  X(cuDeviceTotalMem, std::size_t*, Device)                                                   \
  X(cuDeviceGetUuid, Uuid*, Device)                                                           \
  X(cuDeviceGetAttribute, int*, DeviceAttribute, Device)                                      \
  X(cuDevicePrimaryCtxRetain, Context*, Device)                                               \
  X(cuDevicePrimaryCtxRelease, Device)                                                        \
  X(cuCtxPushCurrent, Context)                                                                \
  X(cuCtxPopCurrent, Context*)                                                                \
  X(cuMemGetInfo, std::size_t*, std::size_t*)                                                 \
  X(cuMemGetAllocationGranularity, std::size_t*, const AllocationProperties*, int)            \
  X(cuMemAddressReserve, DevicePtr*, std::size_t, std::size_t, DevicePtr, unsigned long long) \
  X(cuMemAddressFree, DevicePtr, std::size_t)                                                 \
  X(cuMemCreate, MemoryHandle*, std::size_t, const AllocationProperties*, unsigned long long) \
  X(cuMemRelease, MemoryHandle)                                                               \
  X(cuMemMap, DevicePtr, std::size_t, std::size_t, MemoryHandle, unsigned long long)          \
  X(cuMemUnmap, DevicePtr, std::size_t)                                                       \
  X(cuMemSetAccess, DevicePtr, std::size_t, const AccessDesc*, std::size_t)                   \
  X(cuMemExportToShareableHandle, void*, MemoryHandle, int, unsigned long long)               \
  X(cuMemImportFromShareableHandle, MemoryHandle*, void*, int)                                \
  X(cuPointerGetAttribute, void*, int, DevicePtr)                                             \
  X(cuMemcpyAsync, DevicePtr, DevicePtr, std::size_t, Stream)                                 \
  X(cuMemsetD8Async, DevicePtr, unsigned char, std::size_t, Stream)                           \
  X(cuMemcpyDtoHAsync, void*, DevicePtr, std::size_t, Stream)                                 \
  X(cuStreamCreate, Stream*, unsigned)                                                        \
  X(cuStreamSynchronize, Stream)                                                              \
  X(cuStreamDestroy, Stream)                                                                  \
  X(cuEventCreate, Event*, unsigned)                                                          \
  X(cuEventRecord, Event, Stream)                                                             \
  X(cuEventQuery, Event)                                                                      \
  X(cuEventSynchronize, Event)                                                                \
  X(cuEventDestroy, Event)

// Those of green contexts and of the kernel that looks which SMs they are; drivers older than 12.5
// lack some.
#define WINDROW_CUDA_GREEN_CALLS(X)                                                       \
  X(cuDeviceGetDevResource, Device, DeviceResource*, int)                                 \
  X(cuDevSmResourceSplitByCount, DeviceResource*, unsigned*, const DeviceResource*,       \
    DeviceResource*, unsigned, unsigned)                                                  \
  X(cuDevResourceGenerateDesc, ResourceDesc*, DeviceResource*, unsigned)                  \
  X(cuGreenCtxCreate, GreenContext*, ResourceDesc, Device, unsigned)                      \
  X(cuGreenCtxDestroy, GreenContext)                                                      \
  X(cuGreenCtxStreamCreate, Stream*, GreenContext, unsigned, int)                         \
  X(cuModuleLoadData, Module*, const void*)                                               \
  X(cuModuleUnload, Module)                                                               \
  X(cuModuleGetFunction, Function*, Module, const char*)                                  \
  X(cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
    unsigned, Stream, void**, void**)

// Since 12.5: an event behind all that runs in a context, green contexts of its device included.
#define WINDROW_CUDA_CONTEXT_CALLS(X) X(cuCtxRecordEvent, Context, Event)

#define WINDROW_CUDA_POINTER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
struct CoreCalls {
  WINDROW_CUDA_CORE_CALLS(WINDROW_CUDA_POINTER)
};
struct GreenCalls {
  WINDROW_CUDA_GREEN_CALLS(WINDROW_CUDA_POINTER)
};
struct ContextCalls {
  WINDROW_CUDA_CONTEXT_CALLS(WINDROW_CUDA_POINTER)
};
#undef WINDROW_CUDA_POINTER

}  // namespace windrow::cuda
