#include "windrow/host_driver.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "windrow/error.h"
#include "windrow/host_partition.h"

namespace windrow {
namespace {

class HostMemory final : public Memory {
 public:
  HostMemory(OwnedFd fd, std::size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  [[nodiscard]] OwnedFd export_fd() const override { return fd_.duplicate(); }
  void seal_writes() override {
    if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
      throw errno_error("sealing shared memory against writes");
    }
  }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  OwnedFd fd_;
  std::size_t bytes_;
};

class HostReservation final : public Reservation {
 public:
  explicit HostReservation(std::size_t bytes) : bytes_(bytes) {
    void* base =
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      throw errno_error("reserving " + std::to_string(bytes) +
                        " bytes of addresses (make the arena smaller, or raise RLIMIT_AS: "
                        "ulimit -v)");
    }
    base_ = static_cast<std::byte*>(base);
  }
  HostReservation(const HostReservation&) = delete;
  HostReservation& operator=(const HostReservation&) = delete;
  ~HostReservation() override { ::munmap(base_, bytes_); }

  [[nodiscard]] std::byte* data() const override { return base_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

  void map(std::size_t offset, const Memory& memory, std::size_t memory_offset, std::size_t bytes,
           Access access) override {
    require_inside(offset, bytes);
    const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
    const int fd = dynamic_cast<const HostMemory&>(memory).fd();
    if (::mmap(base_ + offset, bytes, protection, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd,
               static_cast<off_t>(memory_offset)) == MAP_FAILED) {
      throw errno_error("mapping " + std::to_string(bytes) + " bytes");
    }
  }

  void unmap(std::size_t offset, std::size_t bytes) override {
    require_inside(offset, bytes);
    // Replaced, not removed: the addresses stay ours and a stray access faults.
    if (::mmap(base_ + offset, bytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
      throw errno_error("unmapping " + std::to_string(bytes) + " bytes");
    }
  }

 private:
  void require_inside(std::size_t offset, std::size_t bytes) const {
    if (offset > bytes_ || bytes > bytes_ - offset) {
      throw Error("the range is outside of the reservation of " + std::to_string(bytes_) +
                  " bytes");
    }
  }

  std::byte* base_ = nullptr;
  std::size_t bytes_;
};

class DoneEvent final : public Event {
 public:
  [[nodiscard]] bool done() const override { return true; }
  void wait() const override {}
};

void require_size(int fd, std::size_t bytes) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw errno_error("looking at imported memory");
  }
  if (static_cast<std::size_t>(status.st_size) != bytes) {
    throw Error("imported memory has " + std::to_string(status.st_size) + " bytes, not " +
                std::to_string(bytes));
  }
}

}  // namespace

DeviceFacts HostDriver::facts() const {
  DeviceFacts facts{.name = "host", .uuid = {}, .compute_units = {}};
  cpu_set_t mask;
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) {
    throw errno_error("reading the affinity mask");
  }
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) {
      facts.compute_units.push_back(cpu);
    }
  }
  facts.memory_bytes = static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
  return facts;
}

std::size_t HostDriver::granularity() const {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

void HostDriver::require_sealed(int fd) const {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    throw errno_error("reading the seals of descriptor " + std::to_string(fd));
  }
  const bool no_writes = (seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)) != 0;
  const bool fixed_size = (seals & F_SEAL_SHRINK) != 0 && (seals & F_SEAL_GROW) != 0;
  if (!no_writes || !fixed_size) {
    throw Error("descriptor " + std::to_string(fd) +
                " is not sealed against writes and changes of size; call seal() first");
  }
}

std::unique_ptr<Reservation> HostDriver::reserve(std::size_t bytes) {
  return std::make_unique<HostReservation>(bytes);
}

std::unique_ptr<Memory> HostDriver::create(std::size_t bytes, const char* label) {
  OwnedFd fd(::memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw errno_error("creating shared memory");
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw errno_error("sizing shared memory of " + std::to_string(bytes) +
                      " bytes (make the arena smaller, or raise RLIMIT_FSIZE: ulimit -f)");
  }
  // Allocates every page now: a machine that is short says so here and not as SIGBUS while serving.
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    throw errno_error("allocating " + std::to_string(bytes) +
                      " bytes of shared memory (make the arena smaller, or give the machine or the "
                      "control group more memory)");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw errno_error("sealing shared memory");
  }
  return std::make_unique<HostMemory>(std::move(fd), bytes);
}

std::unique_ptr<Memory> HostDriver::import_fd(OwnedFd fd, std::size_t bytes) {
  require_size(fd.get(), bytes);
  return std::make_unique<HostMemory>(std::move(fd), bytes);
}

std::unique_ptr<Event> HostDriver::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memmove(to, from, bytes);
  return std::make_unique<DoneEvent>();
}

std::unique_ptr<Partition> HostDriver::partition(std::span<const int> units) {
  if (units.empty()) {
    return std::make_unique<HostPartition>(facts().compute_units);
  }
  return std::make_unique<HostPartition>(units);
}

Driver& host_driver() {
  static HostDriver driver;
  return driver;
}

}  // namespace windrow
