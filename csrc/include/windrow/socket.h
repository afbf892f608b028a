#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "windrow/fd.h"
#include "windrow/geometry.h"

namespace windrow {

// What owner and peer say on the arena's socket: SOCK_SEQPACKET, one request, one reply,
// descriptors beside the reply. The first two words of both never change their place or meaning, so
// that any two releases can at least tell each other that they do not match.
//
//   kAttach   control region and blocks, in that order: the asker is a peer from now on
//   kNamed    one exported descriptor
//   kInspect  the control region, read-only: the asker looks and borrows nothing
enum class Ask : std::uint32_t { kAttach = 1, kNamed = 2, kInspect = 3 };

struct Request {
  std::uint64_t magic;
  std::uint32_t layout_version;
  Ask ask;
  std::uint64_t first;        // kAttach: how many descriptors the asker has already
  std::array<char, 64> name;  // kNamed: zero-terminated
};
static_assert(sizeof(Request) == 88 && offsetof(Request, layout_version) == 8);

struct Reply {
  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t refused;  // 1: `text` says why, no descriptors
  Geometry geometry;
  std::uint64_t descriptors;  // how many there are in all; ask again for those that are missing
  std::uint64_t named_bytes;  // kNamed: size of the memory
  std::array<char, 256> text;
};
static_assert(sizeof(Reply) == 344 && offsetof(Reply, layout_version) == 8);

// Linux passes at most 253 descriptors with one message. The asker asks for each batch, so that no
// more than one is ever on its way: the kernel limits those in flight, too.
inline constexpr std::size_t kFdsPerMessage = 250;

// Both send without SIGPIPE and never block; they throw AttachError. A request to a server that has
// hung up is not an error yet: its refusal may be waiting to be read.
void send_request(int socket, const Request& request);
void send_reply(int socket, const Reply& reply, const std::vector<int>& fds);

// The next request, or none when the peer hung up or sent something else. Never blocks. Of another
// layout version only the first two words mean something. Descriptors sent with it are not taken.
[[nodiscard]] std::optional<Request> receive_request(int socket);

// Waits for the reply and its descriptors until `deadline_ns` (CLOCK_MONOTONIC). Throws AttachError
// on a timeout, a closed socket, another version, or a refusal (with the server's text).
struct Received {
  Reply reply;
  std::vector<OwnedFd> fds;
};
[[nodiscard]] Received receive_reply(int socket, std::int64_t deadline_ns);

// A socket connected to `path`; tries again until the deadline while no server listens there.
[[nodiscard]] OwnedFd connect_to(const std::string& path, std::int64_t deadline_ns);

// A listening socket at `path`, mode 0600. A socket file that a dead server left is replaced; a
// live server, or a file that is not a socket, is an AttachError.
[[nodiscard]] OwnedFd listen_on(const std::string& path);

struct PeerIdentity {
  pid_t pid;
  uid_t uid;
};
[[nodiscard]] PeerIdentity identify(int socket);

// Copies `text` into a field of fixed size: cut if too long, always terminated.
template <std::size_t N>
void put_text(std::array<char, N>& field, const std::string& text) {
  field.fill('\0');
  text.copy(field.data(), N - 1);
}

}  // namespace windrow
