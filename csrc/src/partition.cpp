#include "windrow/partition.h"

#include <stdexcept>
#include <string>

namespace windrow {

void require_share(const Partition& partition, int groups) {
  if (groups < 1 || groups > partition.groups()) {
    throw std::invalid_argument("a share takes 1 to " + std::to_string(partition.groups()) +
                                " groups of units, not " + std::to_string(groups));
  }
}

}  // namespace windrow
