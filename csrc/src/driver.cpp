#include "windrow/driver.h"

namespace windrow {

void Reservation::map_run(std::size_t offset, std::span<const Piece> pieces, Access access) {
  std::size_t done = 0;
  std::size_t at = offset;
  try {
    for (const Piece& piece : pieces) {
      map(at, *piece.memory, piece.offset, piece.bytes, access);
      at += piece.bytes;
      ++done;
    }
  } catch (...) {
    for (const Piece& piece : pieces.first(done)) {
      unmap(offset, piece.bytes);
      offset += piece.bytes;
    }
    throw;
  }
}

std::unique_ptr<Reservation> map_whole(Driver& driver, const Memory& memory, Access access) {
  auto reservation = driver.reserve(memory.bytes());
  reservation->map(0, memory, 0, memory.bytes(), access);
  return reservation;
}

}  // namespace windrow
