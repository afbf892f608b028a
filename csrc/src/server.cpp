#include "windrow/server.h"

#include <fcntl.h>
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
// descriptors of the decode process, nor keep a worker out.
constexpr std::size_t kMostPeers = 64;
constexpr int kAcceptAgainMs = 100;

Reply reply_with(const Geometry& geometry) {
  Reply reply{};
  reply.magic = kMagic;
  reply.layout_version = kLayoutVersion;
  reply.geometry = geometry;
  return reply;
}

// The same memory, to be read only. None where /proc is not mounted: then it cannot be inspected.
OwnedFd reopen_read_only(const OwnedFd& fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd.get());
  return OwnedFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

std::vector<OwnedFd> in_order(OwnedFd control, std::vector<OwnedFd> blocks) {
  blocks.insert(blocks.begin(), std::move(control));
  return blocks;
}

void refuse(Reply& reply, const std::string& why) {
  reply.refused = 1;
  put_text(reply.text, why);
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

ArenaServer::ArenaServer(std::string path, const Geometry& geometry, OwnedFd control,
                         std::vector<OwnedFd> blocks, std::map<std::string, SizedFd> named)
    : path_(std::move(path)),
      geometry_(geometry),
      shared_(in_order(std::move(control), std::move(blocks))),
      control_to_look_at_(reopen_read_only(shared_.front())),
      listener_(listen_on(path_)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      named_(std::move(named)) {
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
    std::fputs("windrow: the arena's server could not be asked to stop\n", stderr);
  }
  thread_.join();
  // Only our own file: another server may have taken the place of a directory that was emptied.
  struct stat status{};
  if (::stat(path_.c_str(), &status) == 0 && status.st_dev == file_device_ &&
      status.st_ino == file_inode_) {
    ::unlink(path_.c_str());
  }
}

void ArenaServer::add(const std::string& name, SizedFd fd) {
  if (name.empty() || name.size() >= sizeof(Request::name)) {
    throw std::invalid_argument("the name '" + name + "' must have 1 to 63 bytes");
  }
  const MutexLock lock(mutex_);
  named_.insert_or_assign(name, std::move(fd));
}

std::vector<pid_t> ArenaServer::peers() const {
  std::vector<pid_t> pids;
  const MutexLock lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.attached) {
      continue;
    }
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
    {
      const MutexLock lock(mutex_);
      for (const Peer& peer : peers_) {
        entries.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
      }
    }
    if (::poll(entries.data(), entries.size(), -1) < 0) {
      continue;
    }
    if (entries[0].revents != 0) {
      return;
    }
    // From the back, so that erasing leaves the indices before it alone.
    for (std::size_t i = entries.size() - 2; i-- > 0;) {
      if (entries[i + 2].revents != 0 && !answer(peer_at(i))) {
        const MutexLock lock(mutex_);
        peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    if (entries[1].revents != 0) {
      welcome();
    }
  }
}

ArenaServer::Peer& ArenaServer::peer_at(std::size_t index) {
  const MutexLock lock(mutex_);
  return peers_[index];
}

void ArenaServer::welcome() {
  OwnedFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    // Out of descriptors, most likely: the peer stays queued, so a pause keeps this from spinning
    // on decode's cores until one is free. A request to stop ends it.
    pollfd entry{.fd = stop_.get(), .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, kAcceptAgainMs);
    return;
  }
  try {
    const PeerIdentity identity = identify(socket.get());
    Reply reply = reply_with(geometry_);
    if (identity.uid != ::geteuid()) {
      refuse(reply, "the arena belongs to user " + std::to_string(::geteuid()) + "; user " +
                        std::to_string(identity.uid) + " may not attach");
    } else if (!make_room()) {
      refuse(reply, "the arena has " + std::to_string(kMostPeers) + " peers; no more may attach");
    }
    if (reply.refused != 0) {
      send_reply(socket.get(), reply, {});
      return;
    }
    const MutexLock lock(mutex_);
    peers_.push_back({std::move(socket), identity.pid});
  } catch (const Error& error) {
    // The peer is gone already; serving the others goes on.
    std::fprintf(stderr, "windrow: a peer was not welcomed: %s\n", error.what());
  }
}

bool ArenaServer::make_room() {
  const MutexLock lock(mutex_);
  if (peers_.size() < kMostPeers) {
    return true;
  }
  const auto idle =
      std::find_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.attached; });
  if (idle == peers_.end()) {
    return false;
  }
  peers_.erase(idle);
  return true;
}

bool ArenaServer::answer(Peer& peer) {
  const auto request = receive_request(peer.socket.get());
  if (!request) {
    return false;
  }
  Reply reply = reply_with(geometry_);
  try {
    if (request->layout_version != kLayoutVersion) {
      refuse(reply, "another layout version");
      send_reply(peer.socket.get(), reply, {});
      return false;
    }
    switch (request->ask) {
      case Ask::kAttach:
        send_shared(peer, *request, reply);
        return true;
      case Ask::kNamed:
        send_named(peer, *request, reply);
        return true;
      case Ask::kInspect:
        send_control(peer, reply);
        return true;
    }
  } catch (const Error&) {
    // It hung up, or does not take what it asked for.
  }
  return false;
}

void ArenaServer::send_shared(Peer& peer, const Request& request, Reply& reply) {
  {
    const MutexLock lock(mutex_);
    peer.attached = true;
  }
  std::vector<int> batch;
  for (std::size_t i = request.first; i < shared_.size() && batch.size() < kFdsPerMessage; ++i) {
    batch.push_back(shared_[i].get());
  }
  reply.descriptors = shared_.size();
  send_reply(peer.socket.get(), reply, batch);
}

void ArenaServer::send_control(const Peer& peer, Reply& reply) {
  if (!control_to_look_at_) {
    refuse(reply, "the arena's owner has no /proc and cannot show its control region read-only");
    send_reply(peer.socket.get(), reply, {});
    return;
  }
  reply.descriptors = 1;
  send_reply(peer.socket.get(), reply, {control_to_look_at_.get()});
}

void ArenaServer::send_named(const Peer& peer, const Request& request, Reply& reply) {
  OwnedFd copy;
  std::string known;
  {
    const MutexLock lock(mutex_);
    if (const auto found = named_.find(request.name.data()); found != named_.end()) {
      copy = found->second.fd.duplicate();
      reply.named_bytes = found->second.bytes;
    }
    for (const auto& [name, fd] : named_) {
      known += (known.empty() ? "" : ", ") + name;
    }
  }
  if (!copy) {
    refuse(reply, "the arena's owner exports nothing named '" + std::string(request.name.data()) +
                      "' (it exports: " + (known.empty() ? "nothing" : known) + ")");
    send_reply(peer.socket.get(), reply, {});
    return;
  }
  reply.descriptors = 1;
  send_reply(peer.socket.get(), reply, {copy.get()});
}

}  // namespace windrow
