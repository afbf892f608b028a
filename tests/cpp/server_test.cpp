#include "windrow/server.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "served_arena.h"
#include "windrow/arena.h"
#include "windrow/clock.h"
#include "windrow/control.h"
#include "windrow/error.h"
#include "windrow/host_driver.h"
#include "windrow/weights.h"

namespace windrow {
namespace {

using testing::kGeometry;
using testing::soon;

class ServerTest : public testing::ServedArena {};

TEST_F(ServerTest, APeerSeesTheSameBytesTableAndPage) {
  const auto owner = serve();
  const auto peer = Arena::attach(host_driver(), path_, soon());
  EXPECT_EQ(peer->geometry(), kGeometry);
  EXPECT_FALSE(peer->is_owner());
  owner->mapping()->data()[owner->chunk_offset(3)] = std::byte{42};
  EXPECT_EQ(peer->mapping()->data()[peer->chunk_offset(3)], std::byte{42});
  owner->table().lend(1, 4);
  EXPECT_EQ(peer->table().held_in(ChunkState::kLent, 4).size(), 1U);
  owner->page()->publish_view({.step = 11});
  EXPECT_EQ(peer->page()->read_view().step, 11);
  EXPECT_EQ(owner->peers(), std::vector<pid_t>{::getpid()});
  peer->check();
}

TEST_F(ServerTest, TheSocketIsTheUsersOwnAndGoesWithTheArena) {
  auto owner = serve();
  struct stat status{};
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
  owner->close();
  EXPECT_NE(::stat(path_.c_str(), &status), 0);
}

TEST_F(ServerTest, AStaleSocketIsReplacedALiveOneAndAFileAreNot) {
  const int stale = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, path_.size());
  ASSERT_EQ(::bind(stale, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ::close(stale);
  {
    const auto owner = serve();
    const auto second = Arena::create(host_driver(), kGeometry, 1);
    EXPECT_THROW(second->serve(path_), AttachError);
    EXPECT_NO_THROW(static_cast<void>(Arena::attach(host_driver(), path_, soon())));
  }
  std::ofstream(path_) << "a file of somebody's";
  EXPECT_THROW(serve(), AttachError);
}

TEST_F(ServerTest, NobodyThereAndAPathTooLongSaySo) {
  EXPECT_THROW(static_cast<void>(Arena::attach(host_driver(), path_, monotonic_ns())), AttachError);
  EXPECT_THROW(static_cast<void>(Arena::attach(host_driver(), std::string(200, 'x'), soon())),
               AttachError);
}

TEST_F(ServerTest, GarbageAndAnotherVersionAreTurnedAwayAndOthersStillServed) {
  const auto owner = serve();
  const OwnedFd garbler = connect_to(path_, soon());
  ASSERT_GT(::send(garbler.get(), "hello", 5, MSG_NOSIGNAL), 0);
  EXPECT_THROW(static_cast<void>(receive_reply(garbler.get(), soon())), AttachError);

  const OwnedFd old = connect_to(path_, soon());
  Request request{};
  request.magic = kMagic;
  request.layout_version = kLayoutVersion + 1;
  request.ask = Ask::kAttach;
  send_request(old.get(), request);
  EXPECT_THROW(static_cast<void>(receive_reply(old.get(), soon())), AttachError);

  EXPECT_NO_THROW(static_cast<void>(Arena::attach(host_driver(), path_, soon())));
}

TEST_F(ServerTest, AnotherUserIsRefusedWithTheReason) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  const auto owner = serve();
  ::chmod(folder_.c_str(), 0755);
  ::chmod(path_.c_str(), 0666);  // past the first door, so that the second one is tried
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      if (::setuid(65534) != 0) {
        ::_exit(2);
      }
      static_cast<void>(Arena::attach(host_driver(), path_, soon()));
      ::_exit(3);
    } catch (const AttachError& error) {
      const bool refused = std::string(error.what()).find("may not attach") != std::string::npos;
      ::_exit(refused ? 0 : 1);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(owner->peers().empty());
}

TEST_F(ServerTest, APeerThatIsKilledIsNoPeerAnyMore) {
  const auto owner = serve();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto peer = Arena::attach(host_driver(), path_, soon());
    ::_exit(::write(ready[1], "x", 1) == 1 && ::pause() == 0 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(owner->peers(), std::vector<pid_t>{child});
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(owner->peers().empty());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(ServerTest, SealedWeightsAreHandedOutByNameUnsealedOnesAreNot) {
  const auto owner = serve();
  SharedWeights weights(host_driver(), 5000);
  EXPECT_THROW(owner->export_named("weights", weights.fd()), Error);
  weights.mapping()->data()[4999] = std::byte{7};
  weights.seal();
  weights.seal();
  owner->export_named("weights", weights.fd());
  const auto peer = Arena::attach(host_driver(), path_, soon());
  const auto mapping = peer->imported("weights");
  EXPECT_EQ(mapping->bytes(), 5000U);
  EXPECT_EQ(mapping->data()[4999], std::byte{7});
  EXPECT_EQ(peer->imported("weights"), mapping);
  EXPECT_THROW(static_cast<void>(peer->imported("other")), AttachError);
  EXPECT_NO_THROW(peer->check());
}

TEST_F(ServerTest, AnArenaWithALeaseStaysOpenAndOneWithoutCloses) {
  auto arena = Arena::create(host_driver(), kGeometry, 0);
  auto page = arena->page();
  {
    const Lease lease(arena->mapping(), 4096, 10);
    EXPECT_THROW(arena->close(), LiveTensorsError);
    EXPECT_EQ(arena->table().counts()[0], 8);
  }
  arena->close();
  arena->close();
  EXPECT_THROW(static_cast<void>(arena->table()), Error);
  page->publish_view({.step = 3});  // its memory lives on
  EXPECT_EQ(page->read_view().step, 3);
}

}  // namespace
}  // namespace windrow
