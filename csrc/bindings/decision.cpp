#include "windrow/decision.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "record_tuples.h"

namespace windrow::bindings {
namespace {

// A Decider, with what its answers are made of in Python.
class BoundDecider {
 public:
  BoundDecider(const DecisionFigures& figures, Decider::Device device, std::int64_t pause_epoch,
               nb::type_object grant_type)
      : decider_(figures, std::move(device), pause_epoch), grant_type_(std::move(grant_type)) {
    auto* type = reinterpret_cast<PyTypeObject*>(grant_type_.ptr());
    if (PyType_IsSubtype(type, &PyTuple_Type) == 0) {
      throw nb::type_error("grant_type is no named tuple");
    }
    for (std::size_t i = 0; i < kWhyWords.size(); ++i) {
      words_[i] = nb::str(kWhyWords[i].data(), kWhyWords[i].size());
    }
  }

  nb::tuple decide(const nb::tuple& view, const nb::tuple& offer, std::int64_t now_ns, bool present,
                   std::int64_t chunks) {
    const Grant grant =
        decider_.decide(record_of<View>(view), record_of<Offer>(offer), now_ns, present, chunks);
    if (decider_.take_trial()) {
      begin_trial_();
    }
    // What calling the type would do, without the arguments' tuple in between.
    auto* type = reinterpret_cast<PyTypeObject*>(grant_type_.ptr());
    const auto words = std::bit_cast<std::array<std::int64_t, Grant::kNames.size()>>(grant);
    return filled(type->tp_alloc(type, words.size()), words.data(), words.size());
  }

  // The next decision is the first that a guard of this method sees.
  void use_guard(nb::object begin_trial) {
    begin_trial_ = std::move(begin_trial);
    decider_.forget_clock();
  }

  Decider& decider() { return decider_; }
  [[nodiscard]] const nb::str& why() const {
    return words_[static_cast<std::size_t>(decider_.why())];
  }

 private:
  Decider decider_;
  nb::type_object grant_type_;
  nb::object begin_trial_;
  std::array<nb::str, kWhyWords.size()> words_;
};

DecisionFigures figures_of(const nb::dict& values) {
  DecisionFigures figures;
#define WINDROW_FIGURE(type, name) figures.name = nb::cast<type>(values[#name]);
  WINDROW_DECISION_FIGURES(WINDROW_FIGURE)
#undef WINDROW_FIGURE
  return figures;
}

Why idle_why_of(std::string_view word) {
  for (const Why why : {Why::kNoPolicy, Why::kOff, Why::kNoProfile}) {
    if (kWhyWords[static_cast<std::size_t>(why)] == word) {
      return why;
    }
  }
  throw std::invalid_argument(std::string(word) + " is no reason to harvest nothing");
}

nb::tuple during_tuple(const DuringStep& during) {
  return nb::make_tuple(during.split, during.batch, during.context_tokens, during.harvested,
                        during.slack_us, during.settled, during.in_part, during.predicted_us,
                        during.phase);
}

using Models = std::vector<std::array<double, 3>>;
using Shares = std::vector<std::array<std::int64_t, 2>>;

void make(BoundDecider* self, const nb::dict& figures, std::int64_t units, const Shares& splits,
          std::vector<std::int64_t> offered, std::int64_t layers, std::int64_t chunk_bytes,
          bool gaps, std::int64_t pause_epoch, nb::type_object grant_type) {
  Decider::Device device{.units = units,
                         .splits = {},
                         .offered = std::move(offered),
                         .layers = layers,
                         .chunk_bytes = chunk_bytes,
                         .gaps = gaps};
  for (const auto& [finetune, decode] : splits) {
    device.splits.push_back({.finetune_units = finetune, .decode_units = decode});
  }
  new (self)
      BoundDecider(figures_of(figures), std::move(device), pause_epoch, std::move(grant_type));
}

void set_terms(BoundDecider& self, std::string_view policy, bool option, bool observing,
               bool per_request, bool refused, std::int64_t objective_us, std::int64_t deferral_us,
               std::size_t allowed, std::int64_t idle_units) {
  self.decider().set_terms({.policy = policy_of(policy),
                            .option = option,
                            .observing = observing,
                            .per_request = per_request,
                            .refused = refused,
                            .objective_us = objective_us,
                            .deferral_us = deferral_us,
                            .allowed = allowed,
                            .idle_units = idle_units});
}

}  // namespace

void bind_decision(nb::module_& module) {
  nb::list names;
#define WINDROW_FIGURE(type, name) names.append(#name);
  WINDROW_DECISION_FIGURES(WINDROW_FIGURE)
#undef WINDROW_FIGURE
  module.attr("DECISION_FIGURES") = nb::tuple(names);

  nb::class_<BoundDecider>(module, "Decider",
                           "Decides for one slot; see engines/harvest/compiled.py.")
      .def("__init__", &make, nb::kw_only(), nb::arg("figures"), nb::arg("units"),
           nb::arg("splits"), nb::arg("offered"), nb::arg("layers"), nb::arg("chunk_bytes"),
           nb::arg("gaps"), nb::arg("pause_epoch"), nb::arg("grant_type"))
      .def("set_models", [](BoundDecider& self, const Models& m) { self.decider().set_models(m); })
      .def("learned",
           [](BoundDecider& self, double b1, double k1, double margin, std::int64_t most_batch,
              std::int64_t most_context, bool taught) {
             self.decider().learned(b1, k1, margin, most_batch, most_context, taught);
           })
      .def("correct",
           [](BoundDecider& self, std::int64_t batch_bits, std::int64_t context, std::int64_t phase,
              std::size_t split,
              double ratio) { self.decider().correct(batch_bits, context, phase, split, ratio); })
      .def("set_idle", [](BoundDecider& self,
                          std::string_view why) { self.decider().set_idle(idle_why_of(why)); })
      .def("set_terms", &set_terms, nb::kw_only(), nb::arg("policy"), nb::arg("option"),
           nb::arg("observing"), nb::arg("per_request"), nb::arg("refused"),
           nb::arg("objective_us"), nb::arg("deferral_us"), nb::arg("allowed"),
           nb::arg("idle_units"))
      .def("set_guard",
           [](BoundDecider& self, double extra, std::int64_t extra_at_ns,
              std::int64_t paused_until_ns, std::int64_t open_until_ns, bool open, bool for_queue) {
             self.decider().set_guard(
                 {extra, extra_at_ns, paused_until_ns, open_until_ns, open, for_queue});
           })
      .def("use_guard", &BoundDecider::use_guard)
      .def("decide", &BoundDecider::decide)
      .def("during", [](BoundDecider& self) { return during_tuple(self.decider().during()); })
      .def_prop_ro("why", [](BoundDecider& self) { return self.why(); })
      .def_prop_ro("margin", [](BoundDecider& self) { return self.decider().margin(); })
      .def_prop_ro("alone_us", [](BoundDecider& self) { return self.decider().alone_us(); })
      .def_prop_ro("would_units", [](BoundDecider& self) { return self.decider().would_units(); })
      .def_prop_ro("extrapolated", [](BoundDecider& self) { return self.decider().extrapolated(); })
      .def_prop_ro("settled", [](BoundDecider& self) { return self.decider().during().settled; })
      .def_prop_ro("current", [](BoundDecider& self) { return self.decider().current(); });
}

}  // namespace windrow::bindings
