#pragma once

#include <stdexcept>
#include <string>

namespace windrow {

// Everything that the core throws on purpose. The message says what is wrong and what to do; the
// bindings turn each class into the Python exception of the same name.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Sizes that cannot make an arena.
class GeometryError : public Error {
 public:
  using Error::Error;
};

// An arena could not be served or attached.
class AttachError : public Error {
 public:
  using Error::Error;
};

// A transition that the chunk table does not allow. The table is unchanged.
class OwnershipError : public Error {
 public:
  using Error::Error;
};

// Memory cannot be unmapped while tensors over it live.
class LiveTensorsError : public Error {
 public:
  using Error::Error;
};

// The device that was asked for cannot be used on this machine. Nothing was opened.
class DriverUnavailable : public Error {
 public:
  using Error::Error;
};

// The device's library has ended, as this process is about to: what was on the device is gone.
class DeviceGone : public Error {
 public:
  using Error::Error;
};

// An allocation does not fit into the chunks that decode has lent. The message names the budget.
class BudgetError : public Error {
 public:
  using Error::Error;
};

// `Error` that names the failed call and what errno says. Call it before errno can change.
[[nodiscard]] Error errno_error(const std::string& what);

}  // namespace windrow
