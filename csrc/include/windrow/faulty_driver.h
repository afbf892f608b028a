#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "windrow/driver.h"
#include "windrow/mutex.h"

namespace windrow {

enum class DriverCall : std::uint8_t {
  kReserve,
  kMap,
  kUnmap,
  kCreate,
  kExport,
  kImport,
  kSeal,
  kCopy,
  kPartition,
  kEnter,
  kLeave,
};
inline constexpr std::size_t kDriverCalls = 11;
[[nodiscard]] std::string_view name_of(DriverCall call);

// Which calls of a driver go wrong, by their number: never by chance or by time. Thread: any.
class FaultPlan {
 public:
  // The n-th call of that kind from now on throws Error and does nothing; 1 is the next.
  void fail(DriverCall call, std::int64_t n);
  // The n-th call of any kind from now on.
  void fail_any(std::int64_t n);
  // The n-th export from now on gives no descriptor, as if it had been lost on its way.
  void lose_export(std::int64_t n);
  // Runs an action before the n-th call of that kind, which then goes its way: a wait is a delay, a
  // kill is a peer that dies just then.
  void before(DriverCall call, std::int64_t n, std::function<void()> action);
  // Takes back what has not fired.
  void clear();

  // Calls so far, those that were made to fail included.
  [[nodiscard]] std::int64_t calls(DriverCall call) const;
  [[nodiscard]] std::int64_t calls() const;
  // Faults and actions that have fired.
  [[nodiscard]] std::int64_t fired() const;

  // The driver calls this before each call of its own. Throws where that call is to fail; true
  // where its result is to be lost.
  bool reach(DriverCall call);

 private:
  enum class Effect { kFail, kLose, kAct };
  struct Fault {
    bool any;
    DriverCall call;
    std::int64_t left;
    Effect effect;
    std::function<void()> action;
  };
  void add(Fault fault);

  mutable Mutex mutex_;
  std::vector<Fault> faults_ WINDROW_GUARDED_BY(mutex_);
  std::array<std::int64_t, kDriverCalls> counts_ WINDROW_GUARDED_BY(mutex_){};
  std::int64_t fired_ WINDROW_GUARDED_BY(mutex_) = 0;
};

// Another driver whose calls go wrong as its plan says; what it makes does so too. For tests of
// what is above drivers. The other driver, and it itself, outlive all that it makes.
class FaultyDriver final : public Driver {
 public:
  explicit FaultyDriver(Driver& inner) : FaultyDriver(inner, std::make_shared<FaultPlan>()) {}

  [[nodiscard]] FaultPlan& plan() { return *plan_; }

  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] DeviceFacts facts() const override { return inner_->facts(); }
  [[nodiscard]] std::size_t granularity() const override { return inner_->granularity(); }
  [[nodiscard]] bool maps_parts() const override { return inner_->maps_parts(); }
  // Under the same plan.
  [[nodiscard]] Driver& host() override;
  void require_sealed(int fd) const override { inner_->require_sealed(fd); }
  [[nodiscard]] std::unique_ptr<Reservation> reserve(std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Memory> create(std::size_t bytes, const char* label) override;
  [[nodiscard]] std::unique_ptr<Memory> import_fd(OwnedFd fd, std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Event> copy(std::byte* to, const std::byte* from,
                                            std::size_t bytes) override;
  [[nodiscard]] std::unique_ptr<Partition> partition(std::span<const int> units) override;

 private:
  FaultyDriver(Driver& inner, std::shared_ptr<FaultPlan> plan);

  Driver* inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::unique_ptr<FaultyDriver> host_;  // where the inner one's is another driver
};

}  // namespace windrow
