#include "windrow/server.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "windrow/control.h"
#include "windrow/error.h"

namespace windrow {
namespace {

// A pod attaches a worker and perhaps an observer or two; a loop gone wrong must not eat all
// descriptors of the decode process.
constexpr std::size_t kMostPeers = 64;
constexpr int kAcceptAgainMs = 100;

Reply reply_with(const Geometry& geometry) {
  Reply reply{};
  reply.magic = kMagic;
  reply.layout_version = kLayoutVersion;
  reply.geometry = geometry;
  return reply;
}

// A thread that takes no signals: they belong to the threads of the program.
template <class Function>
std::thread quiet_thread(Function function) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(function);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

ArenaServer::ArenaServer(std::string path, const Geometry& geometry, OwnedFd arena, OwnedFd control)
    : path_(std::move(path)),
      geometry_(geometry),
      arena_(std::move(arena)),
      control_(std::move(control)),
      listener_(listen_on(path_)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) {
    throw errno_error("making the server's eventfd");
  }
  struct stat status{};
  if (::stat(path_.c_str(), &status) == 0) {
    file_device_ = status.st_dev;
    file_inode_ = status.st_ino;
  }
  thread_ = quiet_thread([this] { run(); });
}

ArenaServer::~ArenaServer() {
  const std::uint64_t one = 1;
  if (::write(stop_.get(), &one, sizeof(one)) != sizeof(one)) {
    std::fputs("windrow: the arena's server could not be told to stop\n", stderr);
  }
  thread_.join();
  // Only our own file: another server may have taken the place of a directory that was emptied.
  struct stat status{};
  if (::stat(path_.c_str(), &status) == 0 && status.st_dev == file_device_ &&
      status.st_ino == file_inode_) {
    ::unlink(path_.c_str());
  }
}

void ArenaServer::add(const std::string& name, OwnedFd fd) {
  if (name.empty() || name.size() >= sizeof(Request::name)) {
    throw std::invalid_argument("the name '" + name + "' must have 1 to 63 bytes");
  }
  const std::scoped_lock lock(mutex_);
  named_.insert_or_assign(name, std::move(fd));
}

std::vector<pid_t> ArenaServer::peers() const {
  std::vector<pid_t> pids;
  const std::scoped_lock lock(mutex_);
  for (const Peer& peer : peers_) {
    // Asked of the socket itself, so that a death shows before the thread has come round to it.
    pollfd entry{.fd = peer.socket.get(), .events = POLLRDHUP, .revents = 0};
    if (::poll(&entry, 1, 0) == 0) {
      pids.push_back(peer.pid);
    }
  }
  std::sort(pids.begin(), pids.end());
  return pids;
}

void ArenaServer::run() {
  for (;;) {
    std::vector<pollfd> entries{{.fd = stop_.get(), .events = POLLIN, .revents = 0},
                                {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Peer& peer : peers_) {
      entries.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
    }
    if (::poll(entries.data(), entries.size(), -1) < 0) {
      continue;
    }
    if (entries[0].revents != 0) {
      return;
    }
    // From the back, so that erasing leaves the indices before it alone.
    for (std::size_t i = peers_.size(); i-- > 0;) {
      if (entries[i + 2].revents != 0 && !answer(peers_[i])) {
        const std::scoped_lock lock(mutex_);
        peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    if (entries[1].revents != 0) {
      welcome();
    }
  }
}

void ArenaServer::welcome() {
  OwnedFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    // Out of descriptors, most likely: the peer stays queued, so a pause keeps this from spinning
    // on decode's cores until one is free. Being told to stop ends it.
    pollfd entry{.fd = stop_.get(), .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, kAcceptAgainMs);
    return;
  }
  try {
    const PeerIdentity identity = identify(socket.get());
    if (identity.uid != ::geteuid() || peers_.size() >= kMostPeers) {
      Reply reply = reply_with(geometry_);
      reply.refused = 1;
      put_text(reply.text, identity.uid != ::geteuid()
                               ? "the arena belongs to user " + std::to_string(::geteuid()) +
                                     "; user " + std::to_string(identity.uid) + " may not attach"
                               : std::string("the arena has too many peers"));
      send_reply(socket.get(), reply, {});
      return;
    }
    const std::scoped_lock lock(mutex_);
    peers_.push_back({std::move(socket), identity.pid});
  } catch (const Error& error) {
    // The peer is gone already; serving the others goes on.
    std::fprintf(stderr, "windrow: a peer was not welcomed: %s\n", error.what());
  }
}

bool ArenaServer::answer(const Peer& peer) {
  const auto request = receive_request(peer.socket.get());
  if (!request) {
    return false;
  }
  Reply reply = reply_with(geometry_);
  try {
    if (request->layout_version != kLayoutVersion) {
      reply.refused = 1;
      put_text(reply.text, "another layout version");
      send_reply(peer.socket.get(), reply, {});
    } else if (request->ask == Ask::kAttach) {
      send_reply(peer.socket.get(), reply, {arena_.get(), control_.get()});
    } else {
      answer_named(peer, *request, reply);
    }
  } catch (const Error&) {
    return false;  // it hung up before it had its answer
  }
  return reply.refused == 0 || request->ask == Ask::kNamed;
}

void ArenaServer::answer_named(const Peer& peer, const Request& request, Reply& reply) {
  OwnedFd copy;
  std::string known;
  {
    const std::scoped_lock lock(mutex_);
    if (const auto found = named_.find(request.name.data()); found != named_.end()) {
      copy = found->second.duplicate();
    }
    for (const auto& [name, fd] : named_) {
      known += (known.empty() ? "" : ", ") + name;
    }
  }
  struct stat status{};
  if (!copy || ::fstat(copy.get(), &status) != 0) {
    reply.refused = 1;
    put_text(reply.text, "the arena's owner exports nothing named '" +
                             std::string(request.name.data()) +
                             "' (it exports: " + (known.empty() ? "nothing" : known) + ")");
    send_reply(peer.socket.get(), reply, {});
    return;
  }
  reply.named_bytes = static_cast<std::uint64_t>(status.st_size);
  send_reply(peer.socket.get(), reply, {copy.get()});
}

}  // namespace windrow
