#include "windrow/decision.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

namespace windrow {
namespace {

constexpr std::int64_t kUnits = 8;
constexpr std::int64_t kSecondNs = 1'000'000'000;

DecisionFigures figures() {
  return {.grow_headroom = 0.02,
          .slack_steps = 16,
          .turns_margin = 2,
          .turns_gain = 1.25,
          .part_gain = 1.02,
          .most_stretch = 4,
          .least_gap_us = 500,
          .grain_tokens = 16,
          .most_tokens = 512,
          .passes = 3,
          .batch_floor = 4,
          .beyond_margin = 0.08,
          .context_bits = 12,
          .widen_half_life_ns = 10 * kSecondNs,
          .stale_ns = kSecondNs,
          .standing_clock = 3,
          .longest_step_us = 6e8,
          .offered_layers = std::int64_t{1} << 20,
          .offered_tokens = std::int64_t{1} << 31,
          .offered_bytes = std::int64_t{1} << 50};
}

// Decode on all units beside workers of 2, 4 and 6 of them.
Decider decider() {
  Decider::Device device{.units = kUnits,
                         .splits = {{0, kUnits}, {2, kUnits}, {4, kUnits}, {6, kUnits}},
                         .offered = {2, 4, 6, kUnits},
                         .layers = 32,
                         .chunk_bytes = 1 << 27,
                         .gaps = true};
  Decider made(figures(), device, 0);
  made.set_models(std::vector<std::array<double, 3>>(4, {2000.0, 100.0, 0.01}));
  made.learned(1.05, 1.05, 0.08, 64, 100'000, true);
  return made;
}

// Most figures as they are, some at the ends of what a word holds.
std::int64_t garbled(std::mt19937_64& rng, std::int64_t sane) {
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  switch (rng() % 12) {
    case 0:
      return kLeast;
    case 1:
      return kMost;
    case 2:
      return static_cast<std::int64_t>(rng());
    default:
      return sane;
  }
}

Offer garbled_offer(std::mt19937_64& rng) {
  Offer offer{.job_epoch = 1, .phase = 1, .layer_begin = 3, .layer_end = 5, .tokens = 128};
  offer.estimates_us.fill(700);
  for (std::int64_t* figure :
       {&offer.job_epoch, &offer.phase, &offer.layer_begin, &offer.layer_end, &offer.tokens,
        &offer.estimates_us[1], &offer.estimates_us[7], &offer.memory_delta_bytes, &offer.starving,
        &offer.in_flight_us, &offer.pause_epoch_seen, &offer.held_chunks}) {
    *figure = garbled(rng, *figure);
  }
  return offer;
}

TEST(Decider, GarbledFiguresOverflowNothingAndPassNoLimit) {
  std::mt19937_64 rng(1);
  Decider slot = decider();
  std::int64_t now_ns = kSecondNs;
  std::int64_t ran = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (i % 100 == 0) {
      slot.set_terms({.policy = static_cast<PolicyKind>(i / 100 % 7),
                      .option = i % 200 == 0,
                      .per_request = i % 300 == 0,
                      .objective_us = 9000,
                      .deferral_us = 400'000,
                      .allowed = 3,
                      .idle_units = 4});
    }
    now_ns += 4'000'000;
    const bool sane = i % 4 == 0;
    View view{.start_ns = now_ns, .batch = i % 9, .context_tokens = 7000, .objective_us = 9000};
    if (!sane) {
      for (std::int64_t* figure :
           {&view.start_ns, &view.batch, &view.context_tokens, &view.waiting, &view.admitted_tokens,
            &view.free_chunks, &view.objective_us, &view.slack_us}) {
        *figure = garbled(rng, *figure);
      }
    }
    Offer offer{.job_epoch = 1};
    if (!sane) {
      offer = garbled_offer(rng);
    }
    const Grant grant = slot.decide(view, offer, now_ns, true, 5);
    ASSERT_LE(grant.finetune_units, 4);
    ASSERT_GE(grant.finetune_units, 0);
    ASSERT_GE(grant.decode_units, 1);
    ASSERT_LE(grant.decode_units, kUnits);
    ASSERT_EQ(grant.action == kGo, grant.finetune_units > 0);
    ran += grant.action;
  }
  EXPECT_GT(ran, 1000);
}

TEST(Decider, AnOpenBreakerLetsOneTrialBegin) {
  Decider slot = decider();
  slot.set_terms({.policy = PolicyKind::kHarli,
                  .objective_us = 9000,
                  .deferral_us = 400'000,
                  .allowed = 4,
                  .idle_units = kUnits});
  slot.set_guard({.open_until_ns = 5 * kSecondNs, .open = true});
  const Offer offer{.job_epoch = 1};
  const auto decide = [&](std::int64_t now_ns) {
    return slot.decide({.batch = 4, .context_tokens = 1000, .objective_us = 9000}, offer, now_ns,
                       true, 0);
  };
  EXPECT_EQ(decide(4 * kSecondNs).action, kPause);
  EXPECT_EQ(slot.why(), Why::kBreaker);
  EXPECT_FALSE(slot.take_trial());
  EXPECT_EQ(decide(5 * kSecondNs).action, kGo);
  EXPECT_TRUE(slot.take_trial());
  EXPECT_FALSE(slot.take_trial());
}

TEST(Decider, RefusesWhatDoesNotFitItsDevice) {
  Decider slot = decider();
  EXPECT_THROW(slot.set_terms({.allowed = 5}), std::invalid_argument);
  EXPECT_THROW(slot.set_terms({.allowed = 0}), std::invalid_argument);
  EXPECT_THROW(slot.set_models({{1.0, 1.0, 1.0}}), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(policy_of("best")), std::invalid_argument);
  EXPECT_THROW(slot.correct(3, 1, 0, 4, 1.1), std::out_of_range);
  for (std::int64_t kind = 0; kind < static_cast<std::int64_t>(Corrections::kMost); ++kind) {
    slot.correct(3, kind, 0, 1, 1.1);
  }
  EXPECT_THROW(slot.correct(3, -1, 0, 1, 1.1), std::length_error);
}

}  // namespace
}  // namespace windrow
