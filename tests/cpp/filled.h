#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace windrow::testing {

template <class Record>
using Words = std::array<std::int64_t, sizeof(Record) / sizeof(std::int64_t)>;

// A record of the shared page all of whose words are the same, so that a torn one shows.
template <class Record>
Record filled(std::int64_t n) {
  Words<Record> words;
  words.fill(n);
  return std::bit_cast<Record>(words);
}

// The last word is the heartbeat, which publishing sets.
template <class Record>
bool is_whole(const Record& record) {
  const auto words = std::bit_cast<Words<Record>>(record);
  return std::all_of(words.begin(), words.end() - 1,
                     [&](std::int64_t word) { return word == words.front(); });
}

}  // namespace windrow::testing
