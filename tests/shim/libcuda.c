/* libcuda.so.1 for a process with the shim of cudart: the stand-in of tests/libcuda_standin, linked
 * behind this file, and what torch and Triton ask of the driver beyond what Windrow does.
 *
 * Device memory says that it is device memory here (the stand-in by itself says that processors can
 * read it), so tensors over an arena are CUDA tensors. Triton's kernels are loaded and launched; they
 * compute nothing.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static atomic_llong launches;

/* The stand-in's own of what is defined here as well. */
static void* of_standin(const char* name) {
  return dlsym(dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL), name);
}

API long long windrow_shim_triton_launches(void) {
  return launches;
}

static CUcontext primary(void) {
  return (CUcontext)0x10;
}

static int from_environment(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text != NULL && *text != '\0' ? atoi(text) : otherwise;
}

API CUresult cuDriverGetVersion(int* version) {
  *version = from_environment("WINDROW_SHIM_DRIVER", CUDA_VERSION);
  return CUDA_SUCCESS;
}
/* torch asks before its first use of a device whether its context is there. */
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = primary();
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
  (void)context;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  (void)limit;
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  (void)limit, (void)value;
  return CUDA_SUCCESS;
}
/* Modules: what Triton compiled must be a program for a GPU, an ELF file. */
/* Windrow's own module is text, and the stand-in's to run. */
static struct CUmod_st {
  char of_triton;
} compiled;

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (memcmp(image, "\177ELF", 4) != 0) {
    return ((CUresult (*)(CUmodule*, const void*))of_standin("cuModuleLoadData"))(module, image);
  }
  *module = &compiled;
  return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule module) {
  return module == &compiled ? CUDA_SUCCESS
                             : ((CUresult (*)(CUmodule))of_standin("cuModuleUnload"))(module);
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  typedef CUresult (*Call)(CUfunction*, CUmodule, const char*);
  if (module != &compiled) {
    return ((Call)of_standin("cuModuleGetFunction"))(function, module, name);
  }
  *function = (CUfunction)&compiled;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  (void)function;
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  (void)function, (void)config;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void** parameters,
                              void** extra) {
  (void)how, (void)function, (void)parameters, (void)extra;
  ++launches;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction function, const CUlaunchConfig* how) {
  (void)function, (void)how;
  *n = 1;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = from_environment("WINDROW_SHIM_CAPABILITY", 8);
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      *value = 48 << 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 227 << 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      *value = 65536;
      break;
    default:
      return ((CUresult (*)(int*, int, int))of_standin("cuDeviceGetAttribute"))(value, attribute,
                                                                              device);
  }
  return CUDA_SUCCESS;
}
/* Of a tensor's address, as Triton asks; all that it is given lies on the device. */
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    *(unsigned*)value = CU_MEMORYTYPE_DEVICE;
  } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *(CUdeviceptr*)value = at;
  } else {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

/* New memory is cleared as a whole; nobody reads it back where host time is measured. */
API CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
  typedef CUresult (*Set)(CUdeviceptr, unsigned char, size_t, CUstream);
  if (from_environment("WINDROW_SHIM_UNFILLED", 0)) {
    return CUDA_SUCCESS;
  }
  return ((Set)of_standin("cuMemsetD8Async"))(at, value, bytes, stream);
}

/* The door through which Windrow finds every call, and each of them is the stand-in's own; but what
 * its memory is, is said above. */
API CUresult cuGetProcAddress_v2(const char* name, void** found, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult* result) {
  typedef CUresult (*Get)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  const Get get = (Get)of_standin("cuGetProcAddress_v2");
  if (strcmp(name, "cuPointerGetAttribute") == 0) {
    *found = (void*)cuPointerGetAttribute;
    return CUDA_SUCCESS;
  }
  if (strcmp(name, "cuMemsetD8Async") == 0) {
    *found = (void*)cuMemsetD8Async;
    return CUDA_SUCCESS;
  }
  return get(name, found, version, flags, result);
}
