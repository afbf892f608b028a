#include <numeric>
#include <stdexcept>
#include <string>

#include "windrow/error.h"
#include "windrow/faulty_driver.h"

namespace windrow {

std::string_view name_of(DriverCall call) {
  constexpr std::array<std::string_view, kDriverCalls> kNames{
      "reserve", "map",  "unmap",     "create", "export", "import",
      "seal",    "copy", "partition", "enter",  "leave"};
  return kNames.at(static_cast<std::size_t>(call));
}

void FaultPlan::fail(DriverCall call, std::int64_t n) {
  add({false, call, n, Effect::kFail, {}});
}

void FaultPlan::fail_any(std::int64_t n) {
  add({true, DriverCall::kReserve, n, Effect::kFail, {}});
}

void FaultPlan::lose_export(std::int64_t n) {
  add({false, DriverCall::kExport, n, Effect::kLose, {}});
}

void FaultPlan::before(DriverCall call, std::int64_t n, std::function<void()> action) {
  add({false, call, n, Effect::kAct, std::move(action)});
}

void FaultPlan::add(Fault fault) {
  if (fault.left < 1) {
    throw std::invalid_argument("the first call is number 1");
  }
  const MutexLock lock(mutex_);
  faults_.push_back(std::move(fault));
}

void FaultPlan::clear() {
  const MutexLock lock(mutex_);
  faults_.clear();
}

std::int64_t FaultPlan::calls(DriverCall call) const {
  const MutexLock lock(mutex_);
  return counts_[static_cast<std::size_t>(call)];
}

std::int64_t FaultPlan::calls() const {
  const MutexLock lock(mutex_);
  return std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
}

std::int64_t FaultPlan::fired() const {
  const MutexLock lock(mutex_);
  return fired_;
}

bool FaultPlan::reach(DriverCall call) {
  std::vector<Fault> due;
  {
    const MutexLock lock(mutex_);
    ++counts_[static_cast<std::size_t>(call)];
    std::vector<Fault> later;
    for (Fault& fault : faults_) {
      const bool counts = fault.any || fault.call == call;
      fault.left -= counts ? 1 : 0;
      (fault.left == 0 ? due : later).push_back(std::move(fault));
    }
    faults_ = std::move(later);
    fired_ += static_cast<std::int64_t>(due.size());
  }
  bool lost = false;
  for (const Fault& fault : due) {
    if (fault.effect == Effect::kFail) {
      throw Error("injected fault: " + std::string(name_of(call)) + " failed");
    }
    if (fault.effect == Effect::kAct) {
      fault.action();
    }
    lost = lost || fault.effect == Effect::kLose;
  }
  return lost;
}

}  // namespace windrow
