#include "windrow/fd.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "windrow/error.h"

namespace windrow {
namespace {

// Of this process; the limit itself when not even the listing can be opened.
std::size_t open_descriptors(std::size_t limit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  if (!folder) {
    return limit;
  }
  std::size_t entries = 0;
  while (::readdir(folder.get()) != nullptr) {
    ++entries;
  }
  return entries - 3;  // ".", ".." and the listing's own
}

}  // namespace

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

bool allow_descriptors(std::size_t more) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return true;
  }
  const std::size_t wanted = open_descriptors(limit.rlim_cur) + more;
  if (wanted <= limit.rlim_cur) {
    return true;
  }
  // The soft limit protects programs that use select(); a process may raise its own to the hard
  // one.
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && wanted <= limit.rlim_max;
}

void require_descriptors(std::size_t more) {
  if (allow_descriptors(more)) {
    return;
  }
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::size_t open = open_descriptors(limit.rlim_max);
  throw Error("the hard limit RLIMIT_NOFILE is " + std::to_string(limit.rlim_max) + " and " +
              std::to_string(open) + " descriptors are open, but " + std::to_string(more) +
              " more are needed: raise it to at least " + std::to_string(open + more) +
              " (ulimit -Hn, or LimitNOFILE of the container runtime), or make larger chunks");
}

std::size_t file_bytes(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw errno_error("looking at descriptor " + std::to_string(fd));
  }
  return static_cast<std::size_t>(status.st_size);
}

}  // namespace windrow
