#pragma once

#include <cstddef>
#include <utility>

namespace windrow {

// Owns one file descriptor. Move-only; closes on destruction. Not thread-safe.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() { reset(); }

  [[nodiscard]] int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() noexcept;
  // A second descriptor of the same file. Throws Error.
  [[nodiscard]] OwnedFd duplicate() const;

 private:
  int fd_ = -1;
};

// A second descriptor of the file behind `fd`, which stays its owner's. Throws Error.
[[nodiscard]] OwnedFd duplicate_fd(int fd);

// Raises this process's soft limit of descriptors to the hard one where that many more exceed it.
// Returns whether that many more can be opened now.
[[nodiscard]] bool allow_descriptors(std::size_t more);

// Allows that many more. Throws Error, with the limit that would do, where the hard one is too low.
void require_descriptors(std::size_t more);

// Bytes of the file behind a descriptor. Throws Error.
[[nodiscard]] std::size_t file_bytes(int fd);

// A descriptor of memory and the memory's size, which CUDA's descriptors do not tell.
struct SizedFd {
  OwnedFd fd;
  std::size_t bytes = 0;
};

}  // namespace windrow
