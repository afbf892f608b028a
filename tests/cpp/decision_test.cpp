#include "windrow/decision.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

namespace windrow {
namespace {

constexpr std::int64_t kUnits = 8;
constexpr std::int64_t kSecondNs = 1'000'000'000;

constexpr GuardSettings kGuard{.pause_ns = 50'000'000,
                               .queue_us = 50'000,
                               .widen = 0.05,
                               .widen_max = 0.4,
                               .widen_queued = 4,
                               .widen_half_life_ns = 10 * kSecondNs,
                               .excess_factor = 5,
                               .window_steps = 400,
                               .min_steps = 200,
                               .first_break_ns = 10 * kSecondNs,
                               .longest_break_ns = 160 * kSecondNs,
                               .stale_ns = kSecondNs,
                               .standing_clock = 3,
                               .longest_step_us = 6e8};

std::vector<DecisionSplit> splits() {
  return {{0, kUnits}, {2, kUnits}, {4, kUnits}, {6, kUnits}};
}

Predictor::Device modelled() {
  return {.units = kUnits,
          .splits = splits(),
          .models = std::vector<std::array<double, 3>>(4, {2000.0, 100.0, 0.01}),
          .start = {1.05, 1.05},
          .measured = true,
          .most_batch = 64,
          .most_context = 100'000};
}

// Decode on all units beside workers of 2, 4 and 6 of them.
Decider decider() {
  Decider::Device device{.units = kUnits,
                         .splits = splits(),
                         .offered = {2, 4, 6, kUnits},
                         .layers = 32,
                         .chunk_bytes = 1 << 27,
                         .gaps = true};
  Decider made(DecisionFigures{}, device, 0, std::make_shared<Guard>(kGuard));
  made.set_predictor(std::make_shared<Predictor>(DecisionFigures{}, modelled()));
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
      const auto every = policies();
      slot.set_terms({.policy = every[static_cast<std::size_t>(i / 100) % every.size()].decide,
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
    // Whatever a step took, and whatever it ran under, it is learned from or refused.
    static_cast<void>(slot.observe(now_ns, i % 997 == 0 ? -1.0 : 4000.0 + i % 3000));
    ASSERT_TRUE(std::isfinite(slot.headroom_units(view)));
  }
  EXPECT_GT(ran, 1000);
}

TEST(Decider, AnOpenBreakerLetsATrialBegin) {
  Decider slot = decider();
  slot.set_terms({.policy = policy_of("harli").decide,
                  .objective_us = 9000,
                  .deferral_us = 400'000,
                  .allowed = 4,
                  .idle_units = kUnits});
  slot.guard().throttled(kSecondNs, 0.2);
  const Offer offer{.job_epoch = 1};
  const auto decide = [&](std::int64_t now_ns) {
    return slot.decide({.batch = 4, .context_tokens = 1000, .objective_us = 9000}, offer, now_ns,
                       true, 0);
  };
  EXPECT_EQ(decide(4 * kSecondNs).action, kPause);
  EXPECT_EQ(slot.why(), Why::kBreaker);
  EXPECT_EQ(decide(11 * kSecondNs).action, kGo);
  EXPECT_EQ(slot.guard().reason(), "");
}

// A slot whose step objective never binds, with one for first tokens of a second.
class Prompted {
 public:
  Prompted() {
    slot.set_terms({.policy = policy_of("windrow").decide,
                    .objective_us = 60'000'000,
                    .deferral_us = 400'000,
                    .first_token_us = 1'000'000,
                    .allowed = 4,
                    .idle_units = kUnits});
  }

  Grant decide(const PromptQueue& prompts) {
    now_ns_ += 4'000'000;
    return slot.decide({.batch = 1, .context_tokens = 100, .objective_us = 60'000'000},
                       {.job_epoch = 1}, now_ns_, true, 0, prompts);
  }

  Decider slot = decider();

 private:
  std::int64_t now_ns_ = kSecondNs;
};

TEST(Decider, APromptLeavesTheWorkerWhatTheFirstTokenHasTimeFor) {
  Prompted pod;
  Decider& slot = pod.slot;
  const Grant alone{.decode_units = kUnits};
  // Nothing is known of prompts yet: the worker waits for the first one.
  EXPECT_EQ(pod.decide({.left_tokens = 100}).action, kPause);
  EXPECT_EQ(slot.why(), Why::kPrompts);
  slot.observe_prompt(1000, 100'000, alone);  // 100 us a token
  EXPECT_DOUBLE_EQ(slot.prompts().token_us(), 100);
  const std::int64_t most = pod.decide({.left_tokens = 100}).finetune_units;
  EXPECT_GT(most, 0);
  // Its share shrinks as prompts take more of the time that is left, and by how long they waited.
  std::int64_t last = most;
  for (const std::int64_t tokens : {2000, 4000, 6000, 8000, 9500}) {
    const std::int64_t units = pod.decide({.left_tokens = tokens}).finetune_units;
    EXPECT_LE(units, last);
    last = units;
  }
  EXPECT_EQ(last, 0);
  EXPECT_EQ(pod.decide({.left_tokens = 100, .waited_us = 999'000}).finetune_units, 0);
  // A step without a prompt is the policy's alone.
  EXPECT_GT(pod.decide({}).finetune_units, 0);
}

TEST(Decider, WithoutAnObjectiveForFirstTokensAPassOverAPromptHasTheDeviceToItself) {
  for (const char* policy : {"windrow", "static", "temporal"}) {
    Decider slot = decider();
    slot.set_terms({.policy = policy_of(policy).decide,
                    .objective_us = 60'000'000,
                    .deferral_us = 400'000,
                    .allowed = 4,
                    .idle_units = kUnits});
    std::int64_t now_ns = kSecondNs;
    const auto decide = [&](const PromptQueue& prompts) {
      now_ns += 4'000'000;
      return slot.decide({.batch = 1, .context_tokens = 100, .objective_us = 60'000'000},
                         {.job_epoch = 1}, now_ns, true, 0, prompts);
    };
    const Grant before = decide({});
    const Grant computing = decide({.computing = true});
    EXPECT_EQ(computing.action, kPause) << policy;
    EXPECT_EQ(slot.why(), Why::kPrompts) << policy;
    EXPECT_EQ(computing.decode_units, kUnits) << policy;
    EXPECT_EQ(computing.gap_until_ns, 0) << policy;
    EXPECT_EQ(decide({}).finetune_units, before.finetune_units) << policy;
  }
}

TEST(Decider, DecodeTakesItsUnitsAtOnceForAPromptAndElseWaitsForTheWorker) {
  Decider::Device device{.units = kUnits,
                         .splits = {{0, kUnits}, {6, 2}},
                         .offered = {6, kUnits},
                         .layers = 32,
                         .chunk_bytes = 1 << 27};
  Decider slot(DecisionFigures{}, device, 0, std::make_shared<Guard>(kGuard));
  Predictor::Device model = modelled();
  model.splits = device.splits;
  model.models.resize(2);
  slot.set_predictor(std::make_shared<Predictor>(DecisionFigures{}, model));
  slot.set_terms({.policy = policy_of("windrow").decide,
                  .objective_us = 60'000'000,
                  .deferral_us = 400'000,
                  .first_token_us = 1'000'000,
                  .allowed = 2,
                  .idle_units = kUnits});
  std::int64_t now_ns = kSecondNs;
  const Offer runs{.job_epoch = 1, .in_flight_us = 5000};
  const auto decide = [&](std::int64_t batch, const PromptQueue& prompts) {
    now_ns += 4'000'000;
    return slot.decide({.batch = batch, .context_tokens = 100, .objective_us = 60'000'000}, runs,
                       now_ns, true, 0, prompts);
  };
  EXPECT_EQ(decide(0, {}).decode_units, 2);  // idle: decode keeps its narrowest share
  EXPECT_EQ(decide(1, {.left_tokens = 100}).decode_units, kUnits);  // of which nothing is known yet
  EXPECT_EQ(slot.why(), Why::kPrompts);
  EXPECT_EQ(decide(1, {}).decode_units, 2);
  slot.guard().distrust(now_ns);
  EXPECT_EQ(decide(1, {}).decode_units, 2);  // paused, and the worker has not stopped yet
}

TEST(Decider, LateFirstTokensBesideTheWorkerWidenTheMarginAndOthersDoNot) {
  Prompted pod;
  Decider& slot = pod.slot;
  slot.observe_prompt(1000, 100'000, {.decode_units = kUnits});
  const double start = slot.prompts().margin();
  slot.observe_first_token(2e6);  // no worker ran meanwhile
  EXPECT_DOUBLE_EQ(slot.prompts().margin(), start);
  ASSERT_GT(pod.decide({.left_tokens = 100}).finetune_units, 0);
  slot.observe_first_token(2e6);
  EXPECT_GT(slot.prompts().margin(), start);
  for (int i = 0; i < 200; ++i) {
    slot.observe_first_token(1000);
  }
  EXPECT_DOUBLE_EQ(slot.prompts().margin(), start);
  EXPECT_EQ(slot.first_tokens(), 202);
  EXPECT_EQ(slot.first_tokens_over(), 2);
}

TEST(PromptModel, LearnsWhatAWorkerCostsAndRefusesNonsense) {
  PromptModel model({1.0, 0.5});
  EXPECT_TRUE(std::isinf(model.predict_us(1, 10)));
  model.observe(1, 10, 5000);  // beside a worker first: nothing to compare with
  model.observe(0, 0, 5000);
  model.observe(0, 10, -1);
  model.observe(0, 10, std::nan(""));
  EXPECT_EQ(model.token_us(), 0);
  model.observe(0, 1000, 100'000);
  const double by_units = model.predict_us(1, 1000);
  EXPECT_DOUBLE_EQ(by_units, 2 * model.predict_us(0, 1000));
  for (int i = 0; i < 100; ++i) {
    model.observe(1, 1000, 120'000);
  }
  EXPECT_NEAR(model.predict_us(1, 1000), 1.2 * model.predict_us(0, 1000), 1);
  EXPECT_THROW(static_cast<void>(model.predict_us(2, 1)), std::out_of_range);
}

TEST(Decider, RefusesWhatDoesNotFitItsDevice) {
  Decider slot = decider();
  EXPECT_THROW(slot.set_terms({.allowed = 5}), std::invalid_argument);
  EXPECT_THROW(slot.set_terms({.allowed = 0}), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(policy_of("best")), std::invalid_argument);
  Predictor::Device few = modelled();
  few.models.pop_back();
  EXPECT_THROW(Predictor(DecisionFigures{}, few), std::invalid_argument);
  few.splits.pop_back();
  EXPECT_THROW(slot.set_predictor(std::make_shared<Predictor>(DecisionFigures{}, few)),
               std::invalid_argument);
}

TEST(Predictor, KeepsOfAsManyKindsOfStepsAsItHasRoomFor) {
  Predictor predictor(DecisionFigures{}, modelled());
  for (std::int64_t kind = 0; kind < 1100; ++kind) {
    for (int i = 0; i < 16; ++i) {
      predictor.observe(1, 4, kind << 12, 9000, 9000, 3);
    }
  }
  EXPECT_EQ(predictor.records().known(), 1024);
  EXPECT_THROW(predictor.observe(4, 4, 0, 9000, 9000, 0), std::out_of_range);
}

}  // namespace
}  // namespace windrow
