#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "windrow/fd.h"
#include "windrow/geometry.h"
#include "windrow/mutex.h"
#include "windrow/socket.h"

namespace windrow {

// Hands out the descriptors of an arena on a Unix socket, from a thread of its own that holds no
// lock while it sends and never touches Python. Only processes of the same user are answered.
//
// A peer's connection stays open as long as it is attached: the kernel closes it when the peer
// dies, whatever killed it, and so peers() lists the living. Public calls: any thread.
class ArenaServer {
 public:
  // Listens at once; throws AttachError. `control` and `blocks` are handed to each process that
  // attaches, `named` to who asks by name.
  ArenaServer(std::string path, const Geometry& geometry, OwnedFd control,
              std::vector<OwnedFd> blocks, std::map<std::string, SizedFd> named = {});
  ArenaServer(const ArenaServer&) = delete;
  ArenaServer& operator=(const ArenaServer&) = delete;
  // Ends the thread, hangs up on the peers (their mappings stay valid) and removes the socket file.
  ~ArenaServer();

  // One more descriptor, by name; replaces one of that name. Throws std::invalid_argument where the
  // name is empty or longer than 63 bytes.
  void add(const std::string& name, SizedFd fd);
  // Process ids of those that are attached now, ascending; who only looks is not among them.
  [[nodiscard]] std::vector<pid_t> peers() const;

 private:
  struct Peer {
    OwnedFd socket;
    pid_t pid;
    bool attached = false;
  };

  void run();
  // Of the thread only, which alone adds and removes peers: what it returns stays where it is.
  Peer& peer_at(std::size_t index);
  void welcome();
  // False: all places are taken, each by an attached peer.
  bool make_room();
  // False: hang up.
  bool answer(Peer& peer);
  void send_shared(Peer& peer, const Request& request, Reply& reply);
  void send_named(const Peer& peer, const Request& request, Reply& reply);
  void send_control(const Peer& peer, Reply& reply);

  std::string path_;
  Geometry geometry_;
  std::vector<OwnedFd> shared_;  // the control region, then the blocks
  OwnedFd control_to_look_at_;   // read-only
  OwnedFd listener_;
  OwnedFd stop_;  // eventfd
  dev_t file_device_ = 0;
  ino_t file_inode_ = 0;
  mutable Mutex mutex_;
  std::vector<Peer> peers_
      WINDROW_GUARDED_BY(mutex_);  // changed by the thread only, the longest there first
  std::map<std::string, SizedFd> named_ WINDROW_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace windrow
