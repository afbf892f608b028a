#pragma once

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <optional>

namespace windrow::bench {

// Times that a forked process which runs a function enters or leaves the kernel by a system call,
// its own stop and end included. Nothing where this machine lets no process trace its child.
template <class Function>
std::optional<std::int64_t> kernel_entries(Function run) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
      ::_exit(1);
    }
    ::raise(SIGSTOP);
    run();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) {
    return std::nullopt;
  }
  std::int64_t entries = -1;  // the stop that was reported just now
  for (; WIFSTOPPED(status); ++entries) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
  }
  return entries;
}

// System calls of a function, which must not change the number of threads.
template <class Function>
std::optional<std::int64_t> system_calls(Function run) {
  const auto alone = kernel_entries([] {});
  const auto with = kernel_entries(run);
  if (!alone || !with) {
    return std::nullopt;
  }
  return (*with - *alone) / 2;
}

}  // namespace windrow::bench
