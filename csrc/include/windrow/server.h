#pragma once

#include <sys/types.h>

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "windrow/fd.h"
#include "windrow/geometry.h"
#include "windrow/socket.h"

namespace windrow {

// Hands out the descriptors of an arena on a Unix socket, from a thread of its own that holds no
// lock while it sends and never touches Python. Only processes of the same user are answered.
//
// A peer's connection stays open as long as it is attached: the kernel closes it when the peer
// dies, whatever killed it, and so peers() tells who is there. Public calls: any thread.
class ArenaServer {
 public:
  // Listens at once; throws AttachError. `arena` and `control` are handed to whoever attaches.
  ArenaServer(std::string path, const Geometry& geometry, OwnedFd arena, OwnedFd control);
  ArenaServer(const ArenaServer&) = delete;
  ArenaServer& operator=(const ArenaServer&) = delete;
  // Ends the thread, hangs up on the peers (their mappings stay valid) and removes the socket file.
  ~ArenaServer();

  // One more descriptor, by name; replaces one of that name. Throws std::invalid_argument where the
  // name is empty or longer than 63 bytes.
  void add(const std::string& name, OwnedFd fd);
  // Process ids of the peers that are attached now, ascending.
  [[nodiscard]] std::vector<pid_t> peers() const;

 private:
  struct Peer {
    OwnedFd socket;
    pid_t pid;
  };

  void run();
  void welcome();
  // False: hang up.
  bool answer(const Peer& peer);
  void answer_named(const Peer& peer, const Request& request, Reply& reply);

  std::string path_;
  Geometry geometry_;
  OwnedFd arena_;
  OwnedFd control_;
  OwnedFd listener_;
  OwnedFd stop_;  // eventfd
  dev_t file_device_ = 0;
  ino_t file_inode_ = 0;
  mutable std::mutex mutex_;  // guards peers_ and named_
  std::vector<Peer> peers_;   // changed by the thread only
  std::map<std::string, OwnedFd> named_;
  std::thread thread_;
};

}  // namespace windrow
