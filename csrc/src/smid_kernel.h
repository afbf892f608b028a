#pragma once

#include <vector>

#include "windrow/cuda_driver.h"

namespace windrow {

// The SMs on which a stream's kernels run, ascending: blocks that each hold an SM for a while, a
// few for each of the `units` SMs that the stream is said to have. Waits for the stream. Throws
// Error.
[[nodiscard]] std::vector<unsigned> smids_of(CudaDriver& driver, cuda::Stream stream, int units);

}  // namespace windrow
