#include "windrow/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "windrow/clock.h"
#include "windrow/control.h"
#include "windrow/error.h"
#include "windrow/fd.h"

namespace windrow {
namespace {

constexpr std::size_t kControlBytes = CMSG_SPACE(kFdsPerMessage * sizeof(int));
// What every release understands: magic and layout version.
constexpr ssize_t kFirstWords = 16;
// How long a waiting worker sleeps between looks for a server that has not started yet.
constexpr auto kConnectEvery = std::chrono::milliseconds(10);

AttachError attach_error(const std::string& what) {
  return AttachError(errno_error(what).what());
}

OwnedFd make_socket() {
  OwnedFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) {
    throw attach_error("making a Unix socket");
  }
  return fd;
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    throw AttachError("the socket path '" + path + "' has " + std::to_string(path.size()) +
                      " bytes; Unix sockets allow 1 to 107: use a shorter run directory");
  }
  path.copy(address.sun_path, path.size());
  return address;
}

// errno of connecting to the path: 0 when it worked.
int try_connect(int socket, const sockaddr_un& address) {
  const int rc = ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  return rc == 0 ? 0 : errno;
}

void remove_stale(const std::string& path, const sockaddr_un& address) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) {
    return;
  }
  if (!S_ISSOCK(status.st_mode)) {
    throw AttachError(path + " exists and is not a socket; move it away");
  }
  const OwnedFd probe = make_socket();
  if (try_connect(probe.get(), address) != ECONNREFUSED) {
    throw AttachError(path + " is served by a live process; stop it or use another run directory");
  }
  ::unlink(path.c_str());
}

// False when the other end has hung up.
bool send_message(int socket, const void* data, std::size_t bytes, const std::vector<int>& fds) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, kControlBytes> control{};
  if (!fds.empty()) {
    const std::size_t fds_bytes = fds.size() * sizeof(int);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds_bytes);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(fds_bytes);
    std::memcpy(CMSG_DATA(head), fds.data(), fds_bytes);
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes)) {
    return true;
  }
  if (errno == EPIPE || errno == ECONNRESET) {
    return false;
  }
  throw attach_error("sending on the arena's socket");
}

std::vector<OwnedFd> take_fds(msghdr& message) {
  std::vector<OwnedFd> fds;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

void wait_readable(int socket, std::int64_t deadline_ns) {
  pollfd entry{.fd = socket, .events = POLLIN, .revents = 0};
  for (;;) {
    const std::int64_t left_ms = (deadline_ns - monotonic_ns()) / 1'000'000;
    const int rc =
        ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left_ms, 0, 60'000)));
    if (rc > 0) {
      return;
    }
    if (rc < 0 && errno != EINTR) {
      throw attach_error("waiting for the arena's server");
    }
    if (monotonic_ns() >= deadline_ns) {
      throw AttachError("the arena's server did not answer in time");
    }
  }
}

void require_accepted(const Reply& reply) {
  if (reply.magic != kMagic) {
    throw AttachError("who serves this socket is not Windrow");
  }
  if (reply.layout_version != kLayoutVersion) {
    throw AttachError("the arena's owner speaks layout " + std::to_string(reply.layout_version) +
                      ", this build " + std::to_string(kLayoutVersion) +
                      "; use the same release on both sides");
  }
  if (reply.refused != 0) {
    throw AttachError(
        std::string(reply.text.data(), ::strnlen(reply.text.data(), reply.text.size())));
  }
}

}  // namespace

void send_request(int socket, const Request& request) {
  // A server that refuses says why before it hangs up: receive_reply finds that.
  static_cast<void>(send_message(socket, &request, sizeof(request), {}));
}

void send_reply(int socket, const Reply& reply, const std::vector<int>& fds) {
  if (!send_message(socket, &reply, sizeof(reply), fds)) {
    throw AttachError("the peer hung up before it had its answer");
  }
}

std::optional<Request> receive_request(int socket) {
  Request request{};
  const ssize_t got = ::recv(socket, &request, sizeof(request), MSG_DONTWAIT);
  const bool whole = got == static_cast<ssize_t>(sizeof(request));
  const bool other = got >= kFirstWords && request.layout_version != kLayoutVersion;
  if (request.magic != kMagic || !(whole || other)) {
    return std::nullopt;
  }
  request.name.back() = '\0';
  return request;
}

Received receive_reply(int socket, std::int64_t deadline_ns) {
  wait_readable(socket, deadline_ns);
  // What exceeds the limit is lost with the message. It may hold fewer; its count says so below.
  static_cast<void>(allow_descriptors(kFdsPerMessage));
  Received received{};
  iovec part{&received.reply, sizeof(received.reply)};
  alignas(cmsghdr) std::array<char, kControlBytes> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  constexpr int kFlags = MSG_CMSG_CLOEXEC | MSG_DONTWAIT;
  ssize_t got = ::recvmsg(socket, &message, kFlags);
  if (got < 0 && errno == ECONNRESET) {
    // Hung up before our request was read. Linux reports that once and then what was sent before.
    got = ::recvmsg(socket, &message, kFlags);
  }
  received.fds = take_fds(message);
  if (got < kFirstWords) {
    throw AttachError("the arena's server hung up; does it run as the same user?");
  }
  require_accepted(received.reply);
  if (got != static_cast<ssize_t>(sizeof(received.reply))) {
    throw AttachError("the arena's server sent half an answer");
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    require_descriptors(received.reply.descriptors - received.fds.size());
    throw AttachError("descriptors were lost on the arena's socket");
  }
  return received;
}

OwnedFd connect_to(const std::string& path, std::int64_t deadline_ns) {
  const sockaddr_un address = address_of(path);
  for (;;) {
    OwnedFd socket = make_socket();
    const int code = try_connect(socket.get(), address);
    if (code == 0) {
      return socket;
    }
    const bool may_come = code == ENOENT || code == ECONNREFUSED || code == EINTR;
    if (!may_come || monotonic_ns() >= deadline_ns) {
      errno = code;
      throw attach_error("no arena is served at " + path);
    }
    std::this_thread::sleep_for(kConnectEvery);
  }
}

OwnedFd listen_on(const std::string& path) {
  const sockaddr_un address = address_of(path);
  remove_stale(path, address);
  OwnedFd socket = make_socket();
  // Before bind, so that the file never exists with a wider mode; umask can only narrow it.
  if (::fchmod(socket.get(), S_IRUSR | S_IWUSR) != 0) {
    throw attach_error("setting the mode of " + path);
  }
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    throw attach_error("binding " + path);
  }
  constexpr int kBacklog = 16;
  if (::listen(socket.get(), kBacklog) != 0) {
    throw attach_error("listening on " + path);
  }
  return socket;
}

PeerIdentity identify(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    throw attach_error("asking who is at the other end");
  }
  return {credentials.pid, credentials.uid};
}

}  // namespace windrow
