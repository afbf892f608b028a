#include "windrow/page.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "filled.h"
#include "shared_memory.h"
#include "windrow/clock.h"

namespace windrow {
namespace {

using testing::filled;
using testing::is_whole;
using testing::SharedMemory;

constexpr std::int64_t kSecond = 1'000'000'000;

// Until the kernel says that the process sleeps: the state follows the name in brackets.
void wait_until_asleep(pid_t pid) {
  std::string line;
  do {
    std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), line);
  } while (line.find(") S ") == std::string::npos);
}

class PageTest : public ::testing::Test {
 protected:
  SharedMemory memory_{sizeof(SharedPage)};
  SharedPage& page_{*new (memory_.data()) SharedPage{}};
};

TEST_F(PageTest, ReadsWhatWasPublishedAndAFreshPageIsZero) {
  EXPECT_EQ(page_.read_view().step, 0);
  EXPECT_EQ(page_.grant_sequence(), 0U);
  page_.publish_view(filled<View>(-4));
  EXPECT_EQ(page_.read_view().slack_us, -4);
  Offer offer;
  offer.estimates_us = {1, 2, 3, 4, 5, 6, 7, 8};
  offer.tokens_done = 9;
  page_.publish_offer(offer);
  EXPECT_EQ(page_.read_offer().estimates_us, offer.estimates_us);
  EXPECT_EQ(page_.read_offer().tokens_done, 9);
}

TEST_F(PageTest, PublishingAndBeatingAreSignsOfLife) {
  EXPECT_GT(page_.heartbeat_age_ns(Writer::kDecode), 0);
  page_.publish_view(filled<View>(1));
  const std::int64_t at_publication = page_.read_view().heartbeat_ns;
  EXPECT_LT(page_.heartbeat_age_ns(Writer::kDecode), 10 * kSecond);
  page_.beat(Writer::kDecode);
  EXPECT_GT(page_.read_view().heartbeat_ns, at_publication);
  EXPECT_EQ(page_.read_offer().heartbeat_ns, 0);
}

TEST_F(PageTest, ThePauseEpochIsThatOfTheNewestGrant) {
  Grant grant;
  grant.pause_epoch = 7;
  page_.publish_grant(grant);
  EXPECT_EQ(page_.pause_epoch(), 7);
  EXPECT_EQ(page_.read_grant().pause_epoch, 7);
}

TEST_F(PageTest, CountersOfBothSidesCountApart) {
  for (std::size_t i = 0; i < SharedPage::kCounters; ++i) {
    EXPECT_EQ(page_.add(i, static_cast<std::int64_t>(i)), static_cast<std::int64_t>(i));
  }
  EXPECT_EQ(page_.add(3, 4), 7);
  EXPECT_EQ(page_.counter(3), 7);
  EXPECT_THROW((void)page_.counter(SharedPage::kCounters), std::out_of_range);
  EXPECT_THROW(page_.add(SharedPage::kCounters, 1), std::out_of_range);
}

TEST_F(PageTest, AWaitEndsAtItsDeadlineAndAtOnceWhenTheSequenceHasMoved) {
  EXPECT_EQ(page_.wait_grant(0, monotonic_ns() + 1'000'000), Woken::kTimedOut);
  EXPECT_EQ(page_.wait_grant(99, monotonic_ns() + 60 * kSecond), Woken::kChangedOrWoken);
}

TEST_F(PageTest, NoReaderEverSeesATornRecord) {
  constexpr int kPublications = 200'000;
  std::atomic<bool> done = false;
  std::atomic<int> torn = 0;
  std::atomic<int> backwards = 0;
  const auto read = [&] {
    std::int64_t last = 0;
    while (!done.load()) {
      const View view = page_.read_view();
      torn += is_whole(view) ? 0 : 1;
      backwards += view.step < last ? 1 : 0;
      last = view.step;
    }
  };
  std::vector<std::thread> readers;
  readers.emplace_back(read);
  readers.emplace_back(read);
  for (int i = 1; i <= kPublications; ++i) {
    page_.publish_view(filled<View>(i));
  }
  done.store(true);
  for (auto& reader : readers) {
    reader.join();
  }
  EXPECT_EQ(torn.load(), 0);
  EXPECT_EQ(backwards.load(), 0);
}

TEST_F(PageTest, NeitherSideSeesATornRecordOfTheOtherWhenBothPublishAtOnce) {
  constexpr std::int64_t kPublications = 100'000;
  std::atomic<std::int64_t> torn = 0;
  std::thread worker([&] {
    for (std::int64_t n = 1; n <= kPublications; ++n) {
      page_.publish_offer(filled<Offer>(n));
      torn += is_whole(page_.read_view()) && is_whole(page_.read_grant()) ? 0 : 1;
    }
  });
  for (std::int64_t n = 1; n <= kPublications; ++n) {
    page_.publish_view(filled<View>(n));
    page_.publish_grant(filled<Grant>(n));
    torn += is_whole(page_.read_offer()) && page_.pause_epoch() == n ? 0 : 1;
  }
  worker.join();
  EXPECT_EQ(torn.load(), 0);
}

// Ping-pong over both futexes: a single lost wake-up would leave both asleep until the deadline.
TEST_F(PageTest, NoWakeUpIsEverLost) {
  constexpr std::uint64_t kRounds = 10'000;
  const std::int64_t deadline = monotonic_ns() + 60 * kSecond;
  std::thread worker([&] {
    for (std::uint64_t seen = 0; seen < kRounds; ++seen) {
      while (page_.grant_sequence() == seen &&
             page_.wait_grant(seen, deadline) != Woken::kTimedOut) {
      }
      page_.publish_offer({});
    }
  });
  for (std::uint64_t seen = 0; seen < kRounds; ++seen) {
    page_.publish_grant({});
    while (page_.offer_sequence() == seen && page_.wait_offer(seen, deadline) != Woken::kTimedOut) {
    }
  }
  worker.join();
  EXPECT_LT(monotonic_ns(), deadline);
  EXPECT_EQ(page_.offer_sequence(), kRounds);
}

TEST_F(PageTest, AWriterKilledAnywhereLeavesAWholeRecordAndItsSuccessorGoesOn) {
  for (int round = 0; round < 40; ++round) {
    const std::int64_t before = page_.read_view().step;
    const pid_t writer = ::fork();
    if (writer == 0) {
      for (std::int64_t n = before + 1;; ++n) {
        page_.publish_view(filled<View>(n));
      }
    }
    while (page_.read_view().step < before + 50 + round) {
    }
    ::kill(writer, SIGKILL);
    ::waitpid(writer, nullptr, 0);
    const View last = page_.read_view();
    EXPECT_TRUE(is_whole(last));
    page_.publish_view(filled<View>(last.step + 1));
    EXPECT_EQ(page_.read_view().step, last.step + 1);
  }
}

TEST_F(PageTest, ASleeperThatIsKilledLeavesItsWriterAndTheNextSleeperAlone) {
  const pid_t sleeper = ::fork();
  if (sleeper == 0) {
    page_.wait_grant(0, monotonic_ns() + 60 * kSecond);
    ::_exit(0);
  }
  wait_until_asleep(sleeper);
  ::kill(sleeper, SIGKILL);
  ::waitpid(sleeper, nullptr, 0);
  page_.publish_grant({});
  EXPECT_EQ(page_.wait_grant(1, monotonic_ns() + 1'000'000), Woken::kTimedOut);
  std::thread next([this] {
    EXPECT_EQ(page_.wait_grant(1, monotonic_ns() + 60 * kSecond), Woken::kChangedOrWoken);
  });
  page_.publish_grant({});
  next.join();
}

}  // namespace
}  // namespace windrow
