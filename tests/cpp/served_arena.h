#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "windrow/arena.h"
#include "windrow/clock.h"
#include "windrow/host_driver.h"

namespace windrow::testing {

inline constexpr Geometry kGeometry{
    .layers = 2, .kv_heads = 2, .head_dim = 32, .dtype_bytes = 4, .block_bytes = 4096, .chunks = 8};

inline std::int64_t soon() {
  return monotonic_ns() + 5'000'000'000;
}

// A folder of its own for each test, with the path of a socket in it.
class ServedArena : public ::testing::Test {
 protected:
  ServedArena() {
    std::string name = "/tmp/windrow-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    path_ = folder_ + "/arena.sock";
  }
  ~ServedArena() override {
    ::unlink(path_.c_str());
    ::rmdir(folder_.c_str());
  }

  [[nodiscard]] std::unique_ptr<Arena> serve() const {
    auto arena = Arena::create(host_driver(), kGeometry, 1);
    arena->serve(path_);
    return arena;
  }

  std::string folder_;
  std::string path_;
};

}  // namespace windrow::testing
