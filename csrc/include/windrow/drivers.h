#pragma once

#include <string>
#include <vector>

#include "windrow/driver.h"

namespace windrow {

// The driver of that name: "host", "cuda" (the first GPU that this process sees) or "cuda:N". Made
// when first asked for; lives until the process ends. Throws DriverUnavailable, and
// std::invalid_argument for an unknown name. Any thread.
[[nodiscard]] Driver& named_driver(const std::string& name);

// UUIDs of the GPUs that this process sees, 32 hexadecimal digits each, in CUDA's order. Makes no
// context: nothing of theirs is used. Throws DriverUnavailable where there is none. Any thread.
[[nodiscard]] std::vector<std::string> gpu_uuids();

// Which libcuda "cuda" means from now on, by path or by the loader's name. Any thread.
void use_libcuda(const std::string& library);

}  // namespace windrow
