#pragma once

#include <mutex>

// Which lock guards what, in the code itself: clang's -Wthread-safety refuses what breaks it
// (tests/contract/test_native_cpp.py); other compilers read past it.
#if defined(__clang__)
#define WINDROW_THREAD(annotation) __attribute__((annotation))
#else
#define WINDROW_THREAD(annotation)
#endif
// Of a member: read and written under that lock only.
#define WINDROW_GUARDED_BY(mutex) WINDROW_THREAD(guarded_by(mutex))
// Of a function: its callers hold that lock; they do not.
#define WINDROW_REQUIRES(mutex) WINDROW_THREAD(requires_capability(mutex))
#define WINDROW_EXCLUDES(mutex) WINDROW_THREAD(locks_excluded(mutex))

namespace windrow {

// std::mutex, with the annotations that it lacks.
class WINDROW_THREAD(capability("mutex")) Mutex {
 public:
  void lock() WINDROW_THREAD(acquire_capability()) { mutex_.lock(); }
  void unlock() WINDROW_THREAD(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds it from construction to destruction.
class WINDROW_THREAD(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) WINDROW_THREAD(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() WINDROW_THREAD(release_capability()) { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

}  // namespace windrow
