#pragma once

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

namespace windrow::testing {

// A forked process that runs a function one machine instruction, or one system call, at a time, so
// that it can be killed at each of them. Killed on destruction at the latest.
class Stepper {
 public:
  template <class Function>
  explicit Stepper(Function run) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      run_traced(run);
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    traced_ = WIFSTOPPED(status);
    if (!traced_) {
      pid_ = 0;
    }
  }
  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;
  ~Stepper() { kill(); }

  // False where this machine does not let a process trace its own child.
  [[nodiscard]] bool traced() const { return traced_; }
  // Whether the process is still there; `failed()` says whether it ended well.
  bool one_instruction() { return go_on(PTRACE_SINGLESTEP); }
  bool one_system_call() { return go_on(PTRACE_SYSCALL); }
  [[nodiscard]] bool failed() const { return failed_; }

  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
      pid_ = 0;
    }
  }

 private:
  template <class Function>
  [[noreturn]] static void run_traced(Function run) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
      ::_exit(1);
    }
    ::raise(SIGSTOP);
    try {
      run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }

  bool go_on(__ptrace_request how) {
    int status = 0;
    ::ptrace(how, pid_, nullptr, nullptr);
    ::waitpid(pid_, &status, 0);
    if (WIFSTOPPED(status)) {
      return true;
    }
    failed_ = !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    pid_ = 0;
    return false;
  }

  pid_t pid_ = 0;
  bool traced_ = false;
  bool failed_ = false;
};

}  // namespace windrow::testing
