#pragma once

#include <cstddef>

#include "windrow/cuda_abi.h"

// What the stand-in for libcuda reports to tests beyond CUDA's own calls. Open it like libcuda and
// look these up by name. All of it is of the calling process.

namespace windrow::standin {

// What was made and not taken away. Primary contexts count each time they were retained.
struct Counts {
  long long handles;
  long long rdma_handles;  // of those, made for RDMA here
  long long mappings;
  long long reservations;
  long long streams;
  long long events;
  long long contexts;
  long long green_contexts;
  long long modules;
  long long violations;  // rules broken so far
  long long calls;       // CUDA calls so far
  long long maps;        // of those, cuMemMap
  long long accesses;    // cuMemSetAccess
};

using SetMemory = std::size_t (*)(std::size_t);  // "windrow_standin_set_memory"
using MakeForeignContext = cuda::Context (*)();  // "windrow_standin_foreign_context"
using ReadCounts = void (*)(Counts*);            // "windrow_standin_counts"
using TakeViolations = const char* (*)();        // "windrow_standin_take_violations"

}  // namespace windrow::standin
