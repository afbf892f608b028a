#include "windrow/driver.h"

namespace windrow {

std::unique_ptr<Reservation> map_whole(Driver& driver, const Memory& memory, Access access) {
  auto reservation = driver.reserve(memory.bytes());
  reservation->map(0, memory, 0, memory.bytes(), access);
  return reservation;
}

}  // namespace windrow
