#pragma once

#include <atomic>

namespace windrow {

// A word in memory that several processes map, every access to which is atomic. Plain data, unlike
// std::atomic: zeroed memory holds it without a constructor having run in this process.
//
// Orders are those of std::atomic and always named. Loads work in read-only mappings.
template <class T>
class SharedWord {
  using Ref = std::atomic_ref<T>;
  static_assert(Ref::is_always_lock_free);

 public:
  [[nodiscard]] T load(std::memory_order order) const {
    return Ref(const_cast<T&>(value_)).load(order);  // C++20 knows no atomic_ref<const T>
  }
  void store(T value, std::memory_order order) { Ref(value_).store(value, order); }
  T fetch_add(T more, std::memory_order order) { return Ref(value_).fetch_add(more, order); }
  bool compare_exchange(T& expected, T desired, std::memory_order order) {
    return Ref(value_).compare_exchange_strong(expected, desired, order);
  }

 private:
  alignas(Ref::required_alignment) T value_;
};

}  // namespace windrow
