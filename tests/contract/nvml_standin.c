/* Stands in for libnvidia-ml.so.1 in tests: two GPUs and a slice of one, and what runs there, as the
 * environment says: NVML_GPUS "uuid,uuid,..."; NVML_USE_<index> "pid:percent,pid:percent" (times
 * count up with each call, so that only newer samples are returned); on each runs the process that
 * asks, or NVML_RUNS. Compiled by the test. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  unsigned pid;
  unsigned long long time_us;
  unsigned sm, memory, encoder, decoder;
} Sample;

enum { kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6, kTooSmall = 7 };
enum { kMost = 8 };
static char uuids[kMost][96];
static int n_devices;
static unsigned long long now_us = 1;

int nvmlInit_v2(void) {
  const char* text = getenv("NVML_GPUS");
  n_devices = 0;
  for (const char* at = text ? text : ""; *at && n_devices < kMost; ++n_devices) {
    const size_t length = strcspn(at, ",");
    snprintf(uuids[n_devices], sizeof uuids[0], "%.*s", (int)length, at);
    at += length + (at[length] == ',');
  }
  return kSuccess;
}
int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return nvmlInit_v2();
}
int nvmlShutdown(void) {
  return kSuccess;
}
const char* nvmlErrorString(int result) {
  return result == kNotSupported ? "Not Supported" : "said by the stand-in for NVML";
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = (unsigned)n_devices;
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = uuids[index];
  return index < (unsigned)n_devices ? kSuccess : kInvalidArgument;
}
/* The whole of it, as NVML wants it; CUDA takes a beginning. */
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int i = 0; i < n_devices; ++i) {
    if (strcmp(uuids[i], uuid) == 0) {
      *device = uuids[i];
      return kSuccess;
    }
  }
  return kNotFound;
}
int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  snprintf(uuid, length, "%s", (char*)device);
  return kSuccess;
}
int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  snprintf(name, length, "stand-in %d", (int)(((char*)device - uuids[0]) / sizeof uuids[0]));
  return kSuccess;
}
typedef struct {
  unsigned pid;
  unsigned long long memory_bytes;
  unsigned gpu_instance, compute_instance;
} Process;
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* processes) {
  (void)device;
  const char* runs = getenv("NVML_RUNS");
  if (processes == NULL || *count < 1) {
    *count = 1;
    return kTooSmall;
  }
  *count = 1;
  processes[0] = (Process){.pid = runs ? (unsigned)atoi(runs) : (unsigned)getpid()};
  return kSuccess;
}
static const char* use_of(void* device) {
  char name[32];
  snprintf(name, sizeof name, "NVML_USE_%d", (int)(((char*)device - uuids[0]) / sizeof uuids[0]));
  const char* use = getenv(name);
  return use ? use : "";
}
int nvmlDeviceGetProcessUtilization(void* device, Sample* samples, unsigned* count,
                                    unsigned long long since_us) {
  if (strncmp((char*)device, "MIG-", 4) == 0) {
    return kNotSupported;
  }
  unsigned found = 0;
  const char* at = use_of(device);
  if (samples != NULL) {
    now_us += 1000;
  }
  for (unsigned pid, percent; sscanf(at, "%u:%u", &pid, &percent) == 2; ++found) {
    if (samples != NULL && found < *count) {
      samples[found] = (Sample){.pid = pid, .time_us = now_us, .sm = percent};
    }
    at = strchr(at, ',') ? strchr(at, ',') + 1 : "";
  }
  (void)since_us;
  *count = found;
  return found == 0 ? kNotFound : samples == NULL ? kTooSmall : kSuccess;
}
int nvmlDeviceGetUtilizationRates(void* device, unsigned* rates) {
  if (strncmp((char*)device, "MIG-", 4) == 0) {
    return kNotSupported;
  }
  rates[0] = 77;
  rates[1] = 0;
  return kSuccess;
}
