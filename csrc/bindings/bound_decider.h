#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "record_tuples.h"
#include "windrow/decision.h"

namespace windrow::bindings {

// A Decider, with what its answers are made of in Python.
class BoundDecider {
 public:
  BoundDecider(const DecisionFigures& figures, Decider::Device device, std::int64_t pause_epoch,
               std::shared_ptr<Guard> guard, nb::object grant_type)
      : decider_(figures, std::move(device), pause_epoch, std::move(guard)),
        grant_type_(std::move(grant_type)) {
    require_tuple_type(grant_type_);
    for (std::size_t i = 0; i < kWhyWords.size(); ++i) {
      words_[i] = nb::str(kWhyWords[i].data(), kWhyWords[i].size());
    }
  }

  nb::object decide(const nb::tuple& view, const nb::tuple& offer, std::int64_t now_ns,
                    bool present, std::int64_t chunks, std::int64_t prompts_left,
                    std::int64_t waited_us) {
    const PromptQueue prompts{.left_tokens = prompts_left, .waited_us = waited_us};
    return grant_tuple(grant_type_, decider_.decide(record_of<View>(view), record_of<Offer>(offer),
                                                    now_ns, present, chunks, prompts));
  }

  Decider& decider() { return decider_; }
  [[nodiscard]] const nb::object& grant_type() const { return grant_type_; }
  [[nodiscard]] const nb::str& word(Why why) const { return words_[static_cast<std::size_t>(why)]; }

 private:
  Decider decider_;
  nb::object grant_type_;
  std::array<nb::str, kWhyWords.size()> words_;
};

}  // namespace windrow::bindings
