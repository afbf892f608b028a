#include "windrow/faulty_driver.h"

namespace windrow {
namespace {

class FaultyMemory final : public Memory {
 public:
  FaultyMemory(std::unique_ptr<Memory> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  [[nodiscard]] std::size_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] OwnedFd export_fd() const override {
    return plan_->reach(DriverCall::kExport) ? OwnedFd() : inner_->export_fd();
  }
  void seal_writes() override {
    plan_->reach(DriverCall::kSeal);
    inner_->seal_writes();
  }
  [[nodiscard]] const Memory& inner() const { return *inner_; }

 private:
  std::unique_ptr<Memory> inner_;
  std::shared_ptr<FaultPlan> plan_;
};

class FaultyReservation final : public Reservation {
 public:
  FaultyReservation(std::unique_ptr<Reservation> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  [[nodiscard]] std::byte* data() const override { return inner_->data(); }
  [[nodiscard]] std::size_t bytes() const override { return inner_->bytes(); }
  void map(std::size_t offset, const Memory& memory, std::size_t memory_offset, std::size_t bytes,
           Access access) override {
    plan_->reach(DriverCall::kMap);
    inner_->map(offset, dynamic_cast<const FaultyMemory&>(memory).inner(), memory_offset, bytes,
                access);
  }
  // Each piece counts as a call of map(). The faulty ones come before the first is made.
  void map_run(std::size_t offset, std::span<const Piece> pieces, Access access) override {
    std::vector<Piece> inner(pieces.begin(), pieces.end());
    for (Piece& piece : inner) {
      plan_->reach(DriverCall::kMap);
      piece.memory = &dynamic_cast<const FaultyMemory&>(*piece.memory).inner();
    }
    inner_->map_run(offset, inner, access);
  }
  void unmap(std::size_t offset, std::size_t bytes) override {
    plan_->reach(DriverCall::kUnmap);
    inner_->unmap(offset, bytes);
  }
  [[nodiscard]] MemorySpace space() const override { return inner_->space(); }

 private:
  std::unique_ptr<Reservation> inner_;
  std::shared_ptr<FaultPlan> plan_;
};

class FaultyPartition final : public Partition {
 public:
  FaultyPartition(std::unique_ptr<Partition> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  [[nodiscard]] int total_units() const override { return inner_->total_units(); }
  [[nodiscard]] int group_units() const override { return inner_->group_units(); }
  [[nodiscard]] int groups() const override { return inner_->groups(); }
  [[nodiscard]] std::uintptr_t enter(Side side, int groups) override {
    plan_->reach(DriverCall::kEnter);
    return inner_->enter(side, groups);
  }
  void leave() override {
    plan_->reach(DriverCall::kLeave);
    inner_->leave();
  }
  [[nodiscard]] int units(Side side, int groups) override { return inner_->units(side, groups); }
  [[nodiscard]] std::vector<unsigned> measure(Side side, int groups) override {
    return inner_->measure(side, groups);
  }
  void exclude(int thread) override { inner_->exclude(thread); }
  void keep_in_background(int thread) override { inner_->keep_in_background(thread); }

 private:
  std::unique_ptr<Partition> inner_;
  std::shared_ptr<FaultPlan> plan_;
};

}  // namespace

FaultyDriver::FaultyDriver(Driver& inner, std::shared_ptr<FaultPlan> plan)
    : inner_(&inner), plan_(std::move(plan)) {
  if (&inner_->host() != inner_) {
    host_.reset(new FaultyDriver(inner_->host(), plan_));
  }
}

Driver& FaultyDriver::host() {
  return host_ ? *host_ : *this;
}

std::unique_ptr<Reservation> FaultyDriver::reserve(std::size_t bytes) {
  plan_->reach(DriverCall::kReserve);
  return std::make_unique<FaultyReservation>(inner_->reserve(bytes), plan_);
}

std::unique_ptr<Memory> FaultyDriver::create(std::size_t bytes, const char* label) {
  plan_->reach(DriverCall::kCreate);
  return std::make_unique<FaultyMemory>(inner_->create(bytes, label), plan_);
}

std::unique_ptr<Memory> FaultyDriver::import_fd(OwnedFd fd, std::size_t bytes) {
  plan_->reach(DriverCall::kImport);
  return std::make_unique<FaultyMemory>(inner_->import_fd(std::move(fd), bytes), plan_);
}

std::unique_ptr<Event> FaultyDriver::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  plan_->reach(DriverCall::kCopy);
  return inner_->copy(to, from, bytes);
}

std::unique_ptr<Partition> FaultyDriver::partition(std::span<const int> units) {
  plan_->reach(DriverCall::kPartition);
  return std::make_unique<FaultyPartition>(inner_->partition(units), plan_);
}

}  // namespace windrow
