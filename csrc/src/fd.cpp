#include "windrow/fd.h"

#include <fcntl.h>
#include <unistd.h>

#include "windrow/error.h"

namespace windrow {

void OwnedFd::reset() noexcept {
  if (fd_ >= 0) {
    // Linux releases the descriptor even when close reports EINTR: retrying could close another's.
    ::close(fd_);
    fd_ = -1;
  }
}

OwnedFd OwnedFd::duplicate() const {
  return duplicate_fd(fd_);
}

OwnedFd duplicate_fd(int fd) {
  OwnedFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) {
    throw errno_error("duplicating a descriptor");
  }
  return copy;
}

}  // namespace windrow
