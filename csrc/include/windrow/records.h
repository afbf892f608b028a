#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace windrow {

// The words of the shared page: what decode shows (View), what the worker offers (Offer), what is
// granted (Grant). `sidecar/windrow_sidecar/qos/view.py` says what each means; names and order are
// the same there and a test holds them equal. Every field is one signed 64-bit word. Struct, names
// and Python arguments all come from these lists.

inline constexpr std::size_t kLevelsMax = 9;
using Estimates = std::array<std::int64_t, kLevelsMax>;

#define WINDROW_VIEW_FIELDS(X) \
  X(step)                      \
  X(start_ns)                  \
  X(batch)                     \
  X(context_tokens)            \
  X(waiting)                   \
  X(admitted_tokens)           \
  X(free_chunks)               \
  X(objective_us)              \
  X(slack_us)                  \
  X(waited_us)                 \
  X(heartbeat_ns)

// `estimates_us` is between these two lists: it has one word for each level.
#define WINDROW_OFFER_FIELDS_BEFORE_ESTIMATES(X) \
  X(job_epoch)                                   \
  X(tasklet_id)                                  \
  X(phase)                                       \
  X(layer_begin)                                 \
  X(layer_end)                                   \
  X(tokens)

#define WINDROW_OFFER_FIELDS_AFTER_ESTIMATES(X) \
  X(memory_delta_bytes)                         \
  X(resident_layers)                            \
  X(starving)                                   \
  X(in_flight_us)                               \
  X(pause_epoch_seen)                           \
  X(wanted_chunks)                              \
  X(held_chunks)                                \
  X(tokens_done)                                \
  X(heartbeat_ns)

#define WINDROW_GRANT_FIELDS(X) \
  X(action)                     \
  X(finetune_units)             \
  X(decode_units)               \
  X(n_tasklets)                 \
  X(budget_us)                  \
  X(window_tokens)              \
  X(gap_until_ns)               \
  X(pause_epoch)                \
  X(hold_admission_until_ns)    \
  X(predicted_us)               \
  X(chunks)                     \
  X(in_flight_bound_us)         \
  X(heartbeat_ns)

#define WINDROW_FIELD(name) std::int64_t name = 0;
#define WINDROW_NAME(name) std::string_view(#name),

struct View {
  WINDROW_VIEW_FIELDS(WINDROW_FIELD)
  static constexpr auto kNames = std::to_array({WINDROW_VIEW_FIELDS(WINDROW_NAME)});
};

struct Offer {
  WINDROW_OFFER_FIELDS_BEFORE_ESTIMATES(WINDROW_FIELD)
  Estimates estimates_us{};
  WINDROW_OFFER_FIELDS_AFTER_ESTIMATES(WINDROW_FIELD)
  static constexpr auto kNames = std::to_array(
      {WINDROW_OFFER_FIELDS_BEFORE_ESTIMATES(WINDROW_NAME) std::string_view("estimates_us"),
       WINDROW_OFFER_FIELDS_AFTER_ESTIMATES(WINDROW_NAME)});
};

struct Grant {
  WINDROW_GRANT_FIELDS(WINDROW_FIELD)
  static constexpr auto kNames = std::to_array({WINDROW_GRANT_FIELDS(WINDROW_NAME)});
};

// The place of each field among the words of its record.
#define WINDROW_PLACE(name) k_##name,
struct ViewPlaces {
  enum : std::size_t { WINDROW_VIEW_FIELDS(WINDROW_PLACE) };
};
struct OfferPlaces {
  enum : std::size_t {
    WINDROW_OFFER_FIELDS_BEFORE_ESTIMATES(WINDROW_PLACE) k_estimates_us,
    k_last_estimate = k_estimates_us + kLevelsMax - 1,
    WINDROW_OFFER_FIELDS_AFTER_ESTIMATES(WINDROW_PLACE)
  };
};
struct GrantPlaces {
  enum : std::size_t { WINDROW_GRANT_FIELDS(WINDROW_PLACE) };
};

#define WINDROW_AT(record, name) \
  static_assert(offsetof(record, name) == record##Places::k_##name * sizeof(std::int64_t));
#define WINDROW_VIEW_AT(name) WINDROW_AT(View, name)
#define WINDROW_OFFER_AT(name) WINDROW_AT(Offer, name)
#define WINDROW_GRANT_AT(name) WINDROW_AT(Grant, name)
WINDROW_VIEW_FIELDS(WINDROW_VIEW_AT)
WINDROW_OFFER_FIELDS_BEFORE_ESTIMATES(WINDROW_OFFER_AT)
WINDROW_OFFER_AT(estimates_us)
WINDROW_OFFER_FIELDS_AFTER_ESTIMATES(WINDROW_OFFER_AT)
WINDROW_GRANT_FIELDS(WINDROW_GRANT_AT)

#undef WINDROW_GRANT_AT
#undef WINDROW_OFFER_AT
#undef WINDROW_VIEW_AT
#undef WINDROW_AT
#undef WINDROW_PLACE
#undef WINDROW_FIELD
#undef WINDROW_NAME

// A change here is a change of the layout: kLayoutVersion grows with it.
static_assert(sizeof(View) == 11 * 8 && View::kNames.size() == 11);
static_assert(sizeof(Offer) == 24 * 8 && Offer::kNames.size() == 16);
static_assert(sizeof(Grant) == 13 * 8 && Grant::kNames.size() == 13);
static_assert(offsetof(View, heartbeat_ns) == 10 * 8);
static_assert(offsetof(Offer, estimates_us) == 6 * 8);
static_assert(offsetof(Offer, heartbeat_ns) == 23 * 8);
static_assert(offsetof(Grant, pause_epoch) == 7 * 8);
static_assert(offsetof(Grant, heartbeat_ns) == 12 * 8);

}  // namespace windrow
