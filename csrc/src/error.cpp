#include "windrow/error.h"

#include <cerrno>
#include <system_error>

namespace windrow {

Error errno_error(const std::string& what) {
  const int code = errno;
  return Error(what + ": " + std::generic_category().message(code));
}

}  // namespace windrow
