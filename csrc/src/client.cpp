#include "windrow/client.h"

#include <poll.h>

#include <iterator>

#include "windrow/clock.h"
#include "windrow/control.h"
#include "windrow/error.h"
#include "windrow/socket.h"

namespace windrow {
namespace {

// The server answers from a thread that does nothing else; so long only if its process is stopped.
constexpr std::int64_t kAnswerWithinNs = 5'000'000'000;

Received ask_for(int socket, Ask ask, std::size_t first = 0, const std::string& name = "") {
  Request request{};
  request.magic = kMagic;
  request.layout_version = kLayoutVersion;
  request.ask = ask;
  request.first = first;
  put_text(request.name, name);
  send_request(socket, request);
  return receive_reply(socket, monotonic_ns() + kAnswerWithinNs);
}

}  // namespace

ArenaClient::ArenaClient(const std::string& socket_path, std::int64_t deadline_ns)
    : socket_(connect_to(socket_path, deadline_ns)) {}

ArenaClient::Shared ArenaClient::attach() {
  Received received = ask_for(socket_.get(), Ask::kAttach);
  const std::size_t wanted = received.reply.descriptors;
  std::vector<OwnedFd> fds = std::move(received.fds);
  while (!fds.empty() && fds.size() < wanted) {
    require_descriptors(wanted - fds.size());
    Received more = ask_for(socket_.get(), Ask::kAttach, fds.size());
    if (more.fds.empty()) {
      break;
    }
    std::move(more.fds.begin(), more.fds.end(), std::back_inserter(fds));
  }
  if (fds.size() != wanted || wanted < 2) {
    throw AttachError("the arena's server sent " + std::to_string(fds.size()) + " of " +
                      std::to_string(wanted) + " descriptors");
  }
  OwnedFd control = std::move(fds.front());
  fds.erase(fds.begin());
  return {received.reply.geometry, std::move(control), std::move(fds)};
}

ArenaClient::Named ArenaClient::named(const std::string& name) {
  Received received = ask_for(socket_.get(), Ask::kNamed, 0, name);
  if (received.fds.size() != 1) {
    throw AttachError("the arena's server sent no descriptor for '" + name + "'");
  }
  return {std::move(received.fds[0]), received.reply.named_bytes};
}

ArenaClient::Shared ArenaClient::inspect() {
  Received received = ask_for(socket_.get(), Ask::kInspect);
  if (received.fds.size() != 1) {
    throw AttachError("the arena's server showed no control region");
  }
  return {received.reply.geometry, std::move(received.fds[0]), {}};
}

pid_t ArenaClient::owner() const {
  return identify(socket_.get()).pid;
}

bool ArenaClient::owner_lives() const {
  pollfd entry{.fd = socket_.get(), .events = POLLRDHUP, .revents = 0};
  return ::poll(&entry, 1, 0) == 0;
}

}  // namespace windrow
