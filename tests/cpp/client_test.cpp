#include "windrow/client.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "served_arena.h"
#include "windrow/control.h"
#include "windrow/error.h"
#include "windrow/server.h"
#include "windrow/socket.h"

namespace windrow {
namespace {

using testing::kGeometry;
using testing::soon;

std::size_t open_now() {
  const std::filesystem::directory_iterator listing("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(listing), end(listing))) - 1;
}

// Sets the soft limit of this process for as long as it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(std::size_t most) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit now{std::min<rlim_t>(most, before_.rlim_max), before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &now);
  }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

class ClientTest : public testing::ServedArena {
 protected:
  // Of an arena that has one memory for each block, as it would be on a device.
  [[nodiscard]] std::unique_ptr<ArenaServer> serve_blocks(std::size_t count) const {
    const auto memory = host_driver().create(4096, "test");
    std::vector<OwnedFd> blocks;
    for (std::size_t i = 0; i < count; ++i) {
      blocks.push_back(memory->export_fd());
    }
    return std::make_unique<ArenaServer>(path_, kGeometry, memory->export_fd(), std::move(blocks));
  }
};

TEST_F(ClientTest, ReceivesMoreDescriptorsThanOneMessageHolds) {
  const DescriptorLimit limit(4096);
  const std::size_t before = open_now();
  {
    const auto server = serve_blocks(600);
    ArenaClient client(path_, soon());
    const ArenaClient::Shared shared = client.attach();
    EXPECT_EQ(shared.blocks.size(), 600U);
    EXPECT_EQ(shared.geometry, kGeometry);
  }
  EXPECT_EQ(open_now(), before);
}

TEST_F(ClientTest, TheSoftLimitOfDescriptorsIsRaisedForWhatAnArenaNeeds) {
  const DescriptorLimit enough(4096);
  const auto server = serve_blocks(600);
  ArenaClient client(path_, soon());
  static_cast<void>(client.inspect());       // the server, in this process too, has accepted
  for (const std::size_t more : {3, 300}) {  // within the first batch, and after it
    const DescriptorLimit low(open_now() + more);
    EXPECT_EQ(client.attach().blocks.size(), 600U);
  }
}

// The hard limit is given up for good, so a process of its own gives it up.
TEST_F(ClientTest, TooLowAHardLimitOfDescriptorsSaysWhichOneWouldDo) {
  const auto attach_below_the_limit = [this] {
    const DescriptorLimit enough(4096);
    const auto server = serve_blocks(600);
    ArenaClient client(path_, soon());
    static_cast<void>(client.inspect());
    for (const std::size_t more : {300, 3}) {
      const std::size_t open = open_now();
      const rlimit low{open + more, open + more};
      ::setrlimit(RLIMIT_NOFILE, &low);
      try {
        static_cast<void>(client.attach());
        std::_Exit(1);
      } catch (const Error& error) {
        if (std::strstr(error.what(), "raise it to at least") == nullptr ||
            std::strstr(error.what(), std::to_string(open + 601).c_str()) == nullptr) {
          std::_Exit(2);
        }
      }
    }
    std::_Exit(0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(attach_below_the_limit(), ::testing::ExitedWithCode(0), "");
}

TEST_F(ClientTest, DescriptorsThatAPeerSendsAreNotTaken) {
  const auto owner = serve();
  const OwnedFd flooder = connect_to(path_, soon());
  std::size_t before = 0;  // taken after the first answer: the server has accepted then
  Request request{};
  request.magic = kMagic;
  request.layout_version = kLayoutVersion;
  request.ask = Ask::kInspect;
  iovec part{&request, sizeof(request)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(200 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(200 * sizeof(int));
  std::fill_n(reinterpret_cast<int*>(CMSG_DATA(head)), 200, flooder.get());
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(::sendmsg(flooder.get(), &message, MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof(request)));
    EXPECT_EQ(receive_reply(flooder.get(), soon()).fds.size(), 1U);
    before = before == 0 ? open_now() : before;
  }
  EXPECT_EQ(open_now(), before);
}

TEST_F(ClientTest, ConnectionsThatAskForNothingKeepNoWorkerOut) {
  const auto owner = serve();
  std::vector<OwnedFd> idle;
  for (int i = 0; i < 100; ++i) {
    idle.push_back(connect_to(path_, soon()));
  }
  const auto worker = Arena::attach(host_driver(), path_, soon());
  EXPECT_EQ(owner->peers(), std::vector<pid_t>{::getpid()});
}

TEST_F(ClientTest, TooManyPeersAreRefusedWithTheReasonUntilOneLeaves) {
  const auto server = serve_blocks(1);
  std::vector<ArenaClient> clients;
  for (int i = 0; i < 64; ++i) {
    static_cast<void>(clients.emplace_back(path_, soon()).attach());
  }
  try {
    static_cast<void>(ArenaClient(path_, soon()).attach());
    FAIL() << "65 peers";
  } catch (const AttachError& error) {
    EXPECT_NE(std::strstr(error.what(), "64 peers"), nullptr) << error.what();
  }
  clients.pop_back();
  EXPECT_EQ(ArenaClient(path_, soon()).attach().blocks.size(), 1U);
}

TEST_F(ClientTest, AReleaseWithOtherMessagesIsToldTheVersion) {
  const auto owner = serve();
  const OwnedFd old = connect_to(path_, soon());
  Request request{};
  request.magic = kMagic;
  request.layout_version = kLayoutVersion - 1;
  ASSERT_EQ(::send(old.get(), &request, 80, MSG_NOSIGNAL), 80);  // as long as version 1 had it
  Reply reply{};
  ASSERT_EQ(::recv(old.get(), &reply, sizeof(reply), 0), static_cast<ssize_t>(sizeof(reply)));
  EXPECT_EQ(reply.layout_version, kLayoutVersion);
  EXPECT_EQ(reply.refused, 1U);
}

TEST_F(ClientTest, WhoLooksGetsTheControlRegionReadOnlyAndIsNoPeer) {
  const auto owner = serve();
  ArenaClient client(path_, soon());
  const ArenaClient::Shared shown = client.inspect();
  EXPECT_TRUE(shown.blocks.empty());
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, shown.control.get(), 0),
            MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  EXPECT_TRUE(owner->peers().empty());
  EXPECT_EQ(client.owner(), ::getpid());
}

TEST_F(ClientTest, APeerSeesThatItsOwnerHasClosed) {
  const auto owner = serve();
  const auto peer = Arena::attach(host_driver(), path_, soon());
  EXPECT_TRUE(peer->owner_lives());
  EXPECT_THROW(static_cast<void>(owner->owner_lives()), OwnershipError);
  owner->close();
  EXPECT_FALSE(peer->owner_lives());
  EXPECT_THROW(static_cast<void>(peer->imported("weights")), AttachError);
}

}  // namespace
}  // namespace windrow
