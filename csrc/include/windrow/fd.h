#pragma once

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

}  // namespace windrow
