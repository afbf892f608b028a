#include "windrow/decision.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "bound_decider.h"
#include "record_tuples.h"
#include "windrow/lending.h"

namespace windrow::bindings {
namespace {

using Shares = std::vector<std::array<std::int64_t, 2>>;
using Figures = std::vector<double>;

DecisionFigures figures_of(const nb::dict& values) {
  DecisionFigures figures;
#define WINDROW_FIGURE(type, name, value) figures.name = nb::cast<type>(values[#name]);
  WINDROW_DECISION_FIGURES(WINDROW_FIGURE)
#undef WINDROW_FIGURE
  return figures;
}

std::vector<DecisionSplit> splits_of(const Shares& shares) {
  std::vector<DecisionSplit> splits;
  for (const auto& [finetune, decode] : shares) {
    splits.push_back({.finetune_units = finetune, .decode_units = decode});
  }
  return splits;
}

Why why_of(std::string_view word) {
  for (std::size_t i = 0; i < kWhyWords.size(); ++i) {
    if (kWhyWords[i] == word) {
      return static_cast<Why>(i);
    }
  }
  throw std::invalid_argument(std::string(word) + " is not a reason to harvest nothing");
}

void make_guard(Guard* self, const nb::dict& settings, bool watches) {
  GuardSettings made;
#define WINDROW_SETTING(type, name) made.name = nb::cast<type>(settings[#name]);
  WINDROW_GUARD_SETTINGS(WINDROW_SETTING)
#undef WINDROW_SETTING
  new (self) Guard(made, watches);
}

void bind_guard(nb::module_& module) {
  nb::class_<Guard>(module, "Guard", "Watches latencies; see qos/guard.py.")
      .def("__init__", &make_guard, nb::arg("settings"), nb::kw_only(), nb::arg("watches") = true)
      .def("set_percentile", &Guard::set_percentile, nb::arg("percentile"))
      .def("extra_margin", &Guard::extra_margin, nb::arg("now_ns"))
      .def("doubt",
           [](Guard& self, const nb::tuple& view, const nb::tuple& offer,
              const Figures& predicted_us, std::int64_t now_ns) {
             const Why why =
                 self.doubt(record_of<View>(view), record_of<Offer>(offer), predicted_us, now_ns);
             const std::string_view word = kWhyWords[static_cast<std::size_t>(why)];
             return nb::str(word.data(), word.size());
           })
      .def("pauses", &Guard::pauses, nb::arg("now_ns"))
      .def("may_run", &Guard::may_run, nb::arg("now_ns"))
      .def("distrust", &Guard::distrust, nb::arg("now_ns"))
      .def("queued", &Guard::queued, nb::arg("now_ns"), nb::arg("waited_us"))
      .def("throttled", &Guard::throttled, nb::arg("now_ns"), nb::arg("seconds"))
      .def("begin_trial", &Guard::begin_trial)
      .def("observe", &Guard::observe, nb::arg("now_ns"), nb::kw_only(), nb::arg("latency_us"),
           nb::arg("objective_us"), nb::arg("harvested"))
      .def_prop_ro("reason", [](const Guard& self) { return self.reason(); })
      .def_prop_rw("trips", &Guard::trips, &Guard::set_trips);
}

PredictorForm form_of(std::string_view name) {
  if (name == "windrow") {
    return PredictorForm::kWindrow;
  }
  if (name == "harli") {
    return PredictorForm::kHarli;
  }
  if (name == "llmstation") {
    return PredictorForm::kLlmStation;
  }
  throw std::invalid_argument(std::string(name) + " is not a form of the predictor");
}

void make_predictor(Predictor* self, const nb::dict& figures, std::int64_t units,
                    const Shares& splits, std::vector<std::array<double, 3>> models,
                    std::array<double, 2> start, bool measured,
                    std::array<std::int64_t, 2> profiled, std::string_view form, bool blind) {
  new (self) Predictor(figures_of(figures), {.units = units,
                                             .splits = splits_of(splits),
                                             .models = std::move(models),
                                             .start = start,
                                             .measured = measured,
                                             .most_batch = profiled[0],
                                             .most_context = profiled[1],
                                             .form = form_of(form),
                                             .blind = blind});
}

nb::tuple predict(const Predictor& self, std::int64_t batch, std::int64_t context_tokens,
                  std::int64_t phase) {
  Figures beside(self.splits());
  Figures solo(self.splits());
  self.predict(batch, context_tokens, phase, beside, solo);
  return nb::make_tuple(beside, solo);
}

void bind_predictor(nb::module_& module) {
  nb::class_<Predictor>(module, "Predictor", "Latency of the next step; see qos/predictor.py.")
      .def("__init__", &make_predictor, nb::kw_only(), nb::arg("figures"), nb::arg("units"),
           nb::arg("splits"), nb::arg("models"), nb::arg("start"), nb::arg("measured"),
           nb::arg("profiled"), nb::arg("form"), nb::arg("blind"))
      .def("predict", &predict, nb::arg("batch"), nb::arg("context_tokens"), nb::arg("phase") = 0)
      .def("extrapolates", &Predictor::extrapolates, nb::arg("batch"), nb::arg("context_tokens"))
      .def("observe", &Predictor::observe, nb::arg("split"), nb::kw_only(), nb::arg("batch"),
           nb::arg("context_tokens"), nb::arg("latency_us"), nb::arg("objective_us") = 0.0,
           nb::arg("phase") = 0)
      .def("follow", &Predictor::follow, nb::arg("residual"), nb::arg("weight") = 1.0)
      .def_prop_rw("margin", &Predictor::margin, &Predictor::set_margin)
      .def_prop_ro("factors",
                   [](const Predictor& self) { return nb::make_tuple(self.b1(), self.k1()); })
      .def_prop_ro("taught", &Predictor::taught)
      .def_prop_ro("known_kinds", [](const Predictor& self) { return self.records().known(); })
      .def_prop_ro("least_step_us", &Predictor::least_step_us);
}

void make_decider(BoundDecider* self, const nb::dict& figures, std::int64_t units,
                  const Shares& splits, std::vector<std::int64_t> offered, std::int64_t layers,
                  std::int64_t chunk_bytes, bool gaps, bool handover, std::int64_t pause_epoch,
                  std::shared_ptr<Guard> guard, nb::object grant_type) {
  new (self) BoundDecider(figures_of(figures),
                          {.units = units,
                           .splits = splits_of(splits),
                           .offered = std::move(offered),
                           .layers = layers,
                           .chunk_bytes = chunk_bytes,
                           .gaps = gaps,
                           .handover = handover},
                          pause_epoch, std::move(guard), std::move(grant_type));
}

// A name of POLICIES, "" for none, or a function from view and offer to a grant.
Policy policy_from(const nb::object& policy) {
  if (!nb::isinstance<nb::str>(policy)) {
    return [policy](const View& view, const Offer& offer, const PolicyContext&) {
      return record_of<Grant>(nb::cast<nb::tuple>(policy(to_tuple(view), to_tuple(offer))));
    };
  }
  const auto name = nb::cast<std::string_view>(policy);
  return name.empty() ? Policy{} : Policy{policy_of(name).decide};
}

void set_terms(BoundDecider& self, const nb::object& policy, std::string_view idle, bool observing,
               bool per_request, bool refused, std::int64_t objective_us, std::int64_t deferral_us,
               std::int64_t first_token_us, std::size_t allowed, std::int64_t idle_units) {
  self.decider().set_terms({.policy = policy_from(policy),
                            .idle = why_of(idle),
                            .observing = observing,
                            .per_request = per_request,
                            .refused = refused,
                            .objective_us = objective_us,
                            .deferral_us = deferral_us,
                            .first_token_us = first_token_us,
                            .allowed = allowed,
                            .idle_units = idle_units});
}

nb::tuple during_tuple(const DuringStep& during) {
  return nb::make_tuple(during.split, during.batch, during.context_tokens, during.harvested,
                        during.slack_us, during.settled, during.in_part, during.predicted_us,
                        during.phase);
}

void bind_decider(nb::module_& module) {
  nb::class_<BoundDecider>(module, "Decider", "Decides for one slot; see qos/control.py.")
      .def("__init__", &make_decider, nb::kw_only(), nb::arg("figures"), nb::arg("units"),
           nb::arg("splits"), nb::arg("offered"), nb::arg("layers"), nb::arg("chunk_bytes"),
           nb::arg("gaps"), nb::arg("handover"), nb::arg("pause_epoch"), nb::arg("guard"),
           nb::arg("grant_type"))
      .def(
          "set_predictor",
          [](BoundDecider& self, std::shared_ptr<Predictor> predictor) {
            self.decider().set_predictor(std::move(predictor));
          },
          nb::arg("predictor").none())
      .def("set_guard",
           [](BoundDecider& self, std::shared_ptr<Guard> guard) {
             if (!guard) {
               throw std::invalid_argument("None is not a guard");
             }
             self.decider().set_guard(std::move(guard));
           })
      .def("clear_terms", [](BoundDecider& self) { self.decider().clear_terms(); })
      .def("set_terms", &set_terms, nb::kw_only(), nb::arg("policy"), nb::arg("idle"),
           nb::arg("observing"), nb::arg("per_request"), nb::arg("refused"),
           nb::arg("objective_us"), nb::arg("deferral_us"), nb::arg("first_token_us"),
           nb::arg("allowed"), nb::arg("idle_units"))
      .def("decide", &BoundDecider::decide)
      .def("observe_prompt",
           [](BoundDecider& self, std::int64_t tokens, double latency_us, const nb::tuple& grant) {
             self.decider().observe_prompt(tokens, latency_us, record_of<Grant>(grant));
           })
      .def(
          "observe_first_token",
          [](BoundDecider& self, double after_us) { self.decider().observe_first_token(after_us); })
      .def("observe", [](BoundDecider& self, std::int64_t now_ns,
                         double latency_us) { return self.decider().observe(now_ns, latency_us); })
      .def("headroom_units",
           [](BoundDecider& self, const nb::tuple& view) {
             return self.decider().headroom_units(record_of<View>(view));
           })
      .def("during", [](BoundDecider& self) { return during_tuple(self.decider().during()); })
      .def_prop_ro("why", [](BoundDecider& self) { return self.word(self.decider().why()); })
      .def_prop_ro("margin", [](BoundDecider& self) { return self.decider().margin(); })
      .def_prop_ro("alone_us", [](BoundDecider& self) { return self.decider().alone_us(); })
      .def_prop_ro("prompt_token_us",
                   [](BoundDecider& self) { return self.decider().prompts().token_us(); })
      .def_prop_ro("prompt_margin",
                   [](BoundDecider& self) { return self.decider().prompts().margin(); })
      .def_prop_ro("first_tokens",
                   [](BoundDecider& self) {
                     return nb::make_tuple(self.decider().first_tokens(),
                                           self.decider().first_tokens_over());
                   })
      .def_prop_ro("would_units", [](BoundDecider& self) { return self.decider().would_units(); })
      .def_prop_ro("extrapolated",
                   [](BoundDecider& self) { return self.decider().extrapolated(); });
}

nb::tuple ask_policy(std::string_view name, const nb::tuple& view, const nb::tuple& offer,
                     const nb::dict& figures, std::int64_t units, const Shares& splits,
                     const std::vector<std::int64_t>& offered, std::size_t allowed,
                     std::int64_t idle_units, const Figures& predicted_us, const Figures& solo_us,
                     double margin, std::int64_t current, bool per_request,
                     std::int64_t in_flight_bound_us, std::int64_t layers, bool gaps,
                     std::int64_t deferral_us, std::int64_t due_ns, std::int64_t chunk_bytes,
                     bool taught) {
  const std::size_t count = splits.size();
  if (predicted_us.size() != count || solo_us.size() != count || allowed < 1 || allowed > count ||
      offered.empty()) {
    throw std::invalid_argument("a prediction for each split, and 1 to all of them allowed");
  }
  const DecisionFigures constants = figures_of(figures);
  const std::vector<DecisionSplit> shares = splits_of(splits);
  return to_tuple(policy_of(name).decide(record_of<View>(view), record_of<Offer>(offer),
                                         {.figures = constants,
                                          .units = units,
                                          .splits = shares,
                                          .offered = offered,
                                          .allowed = allowed,
                                          .idle_units = idle_units,
                                          .predicted_us = predicted_us,
                                          .solo_us = solo_us,
                                          .margin = margin,
                                          .current = current,
                                          .in_flight_bound_us = in_flight_bound_us,
                                          .layers = layers,
                                          .deferral_us = deferral_us,
                                          .due_ns = due_ns,
                                          .chunk_bytes = chunk_bytes,
                                          .per_request = per_request,
                                          .gaps = gaps,
                                          .taught = taught}));
}

void bind_policies(nb::module_& module) {
  nb::dict figures;
#define WINDROW_FIGURE(type, name, value) figures[#name] = nb::cast(DecisionFigures{}.name);
  WINDROW_DECISION_FIGURES(WINDROW_FIGURE)
#undef WINDROW_FIGURE
  module.attr("DECISION_FIGURES") = figures;
  nb::list names;
  for (const NamedPolicy& policy : policies()) {
    names.append(nb::str(policy.name.data(), policy.name.size()));
  }
  module.attr("POLICIES") = nb::tuple(names);
  module.def("ask_policy", &ask_policy, nb::arg("name"), nb::arg("view"), nb::arg("offer"),
             nb::kw_only(), nb::arg("figures"), nb::arg("units"), nb::arg("splits"),
             nb::arg("offered"), nb::arg("allowed"), nb::arg("idle_units"), nb::arg("predicted_us"),
             nb::arg("solo_us"), nb::arg("margin"), nb::arg("current"), nb::arg("per_request"),
             nb::arg("in_flight_bound_us"), nb::arg("layers"), nb::arg("gaps"),
             nb::arg("deferral_us"), nb::arg("due_ns"), nb::arg("chunk_bytes"), nb::arg("taught"));
  module.def("beside_us", &beside_us, nb::arg("bound"), nb::arg("solo"), nb::arg("beside"));
  module.def("accompanied_layers", &accompanied_layers, nb::arg("objective"), nb::arg("layers"),
             nb::arg("solo"), nb::arg("beside"));
}

nb::tuple plan(const Counts& chunks, std::int64_t wanted, std::int64_t limit, std::int64_t reserve,
               bool kv_short, std::int64_t since_revoke_ns) {
  const LendingPlan made = plan_lending(chunks, {.wanted = wanted,
                                                 .limit = limit,
                                                 .reserve = reserve,
                                                 .kv_short = kv_short,
                                                 .since_revoke_ns = since_revoke_ns});
  return nb::make_tuple(made.target, made.lend, made.revoke);
}

void bind_lending(nb::module_& module) {
  module.attr("GROW_REST_NS") = kGrowRestNs;
  module.def("plan_lending", &plan, nb::arg("chunks"), nb::kw_only(), nb::arg("wanted"),
             nb::arg("limit"), nb::arg("reserve"), nb::arg("kv_short"), nb::arg("since_revoke_ns"));
  nb::class_<KvDemand>(module, "KvDemand", "What KV may ask for before lent memory is back.")
      .def(
          "__init__",
          [](KvDemand* self, double release_us, std::int64_t objective_us, std::int64_t max_batch,
             std::int64_t token_bytes, std::int64_t admitted_q99_tokens) {
            new (self)
                KvDemand{release_us, objective_us, max_batch, token_bytes, admitted_q99_tokens};
          },
          nb::kw_only(), nb::arg("release_us"), nb::arg("objective_us"), nb::arg("max_batch"),
          nb::arg("token_bytes"), nb::arg("admitted_q99_tokens") = 0);
  module.def("kv_demand_bytes", &kv_demand_bytes, nb::arg("demand"), nb::kw_only(),
             nb::arg("prompts"));
  module.def("reserve_chunks", &reserve_chunks, nb::arg("demand"), nb::kw_only(),
             nb::arg("prompts"), nb::arg("chunk_bytes"), nb::arg("total"));
  nb::class_<AdmissionRate>(module, "AdmissionRate",
                            "Context tokens that arrive within windows of a fixed length.")
      .def(nb::init<std::int64_t>(), nb::arg("window_ns"))
      .def("add", &AdmissionRate::add, nb::arg("now_ns"), nb::arg("tokens"))
      .def("q99", &AdmissionRate::q99);
}

}  // namespace

void bind_decision(nb::module_& module) {
  bind_policies(module);
  bind_lending(module);
  bind_guard(module);
  bind_predictor(module);
  bind_decider(module);
}

}  // namespace windrow::bindings
