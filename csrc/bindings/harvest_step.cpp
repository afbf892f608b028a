#include "windrow/harvest_step.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <bit>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "bind.h"
#include "bound_decider.h"
#include "record_tuples.h"
#include "windrow/arena.h"
#include "windrow/clock.h"

namespace windrow::bindings {
namespace {

#define WINDROW_STEP_PLACE(name) k_##name,
constexpr std::size_t kStepFields = sizeof(StepFacts) / sizeof(std::int64_t);
constexpr std::array<std::string_view, kStepFields> kStepNames{
#define WINDROW_NAME(name) #name,
    WINDROW_STEP_FIELDS(WINDROW_NAME)
#undef WINDROW_NAME
        "tokens",
};

// The value of one field, which is an exact 64-bit integer. CPython's conversion to `long` reads
// the digits in place, that to `long long` by a general function of more code.
std::int64_t field_of(PyObject* facts, std::size_t i) {
  static_assert(sizeof(long) == sizeof(std::int64_t));
  const std::int64_t value = PyLong_AsLong(PyTuple_GET_ITEM(facts, i));
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::type_error((std::string(kStepNames[i]) + " is not a 64-bit integer").c_str());
  }
  return value;
}

void require_step_input(PyObject* facts) {
  if (!PyTuple_Check(facts) || static_cast<std::size_t>(PyTuple_GET_SIZE(facts)) != kStepFields) {
    throw nb::type_error("facts is not a StepInput");
  }
}

StepFacts facts_of(PyObject* facts) {
  std::array<std::int64_t, kStepFields> words{};
  constexpr std::size_t kTokens = kStepFields - 1;
  for (std::size_t i = 0; i < kTokens; ++i) {
    words[i] = field_of(facts, i);
  }
  const double tokens = PyFloat_AsDouble(PyTuple_GET_ITEM(facts, kTokens));
  if (tokens == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::type_error("tokens is not a number");
  }
  words[kTokens] = std::bit_cast<std::int64_t>(tokens);
  return std::bit_cast<StepFacts>(words);
}

// What `HarvestStep::keeps` reads.
StepFacts facts_that_matter(PyObject* facts) {
  enum : std::size_t { WINDROW_STEP_FIELDS(WINDROW_STEP_PLACE) };
  return {.batch = field_of(facts, k_batch),
          .waiting = field_of(facts, k_waiting),
          .admitted_tokens = field_of(facts, k_admitted_tokens),
          .prefill_tokens = field_of(facts, k_prefill_tokens),
          .prompts_left = field_of(facts, k_prompts_left)};
}

// What is of Python's hook: `self` is the object that this is a base of.
class HookSurroundings : public StepSurroundings {
 public:
  void take_throttled(std::int64_t now_ns) override { self_.attr("_take_throttled")(now_ns); }
  void take_terms(std::int64_t now_ns) override { self_.attr("_take_terms")(now_ns); }
  void take_step_tokens(double tokens) override { self_.attr("_take_step_tokens")(tokens); }
  void mark(std::int64_t now_ns, std::string_view what, const std::string& detail) override {
    self_.attr("_mark")(now_ns, nb::str(what.data(), what.size()),
                        nb::str(detail.data(), detail.size()));
  }
  void breached(const std::string& reason) override {
    self_.attr("_breached")(nb::str(reason.data(), reason.size()));
  }

  void set_self(nb::handle self) { self_ = self; }
  virtual int traverse(visitproc /*visit*/, void* /*arg*/) { return 0; }

 private:
  nb::handle self_;  // borrowed: it holds us
};

// An arena and its page, in real time.
class ArenaSurroundings : public HookSurroundings {
 public:
  explicit ArenaSurroundings(nb::object arena)
      : object_(std::move(arena)), arena_(nb::cast<Arena&>(object_)), page_(arena_.page()) {}

  std::int64_t now_ns() override { return monotonic_ns(); }
  SharedWord<std::int64_t>* heartbeat() override { return &page_->decodes_heartbeat(); }
  void publish_view(const View& view) override { page_->publish_view(view); }
  void publish_grant(const Grant& grant) override { page_->publish_grant(grant); }
  void beat(std::int64_t now_ns) override { page_->beat(Writer::kDecode, now_ns); }
  Offer read_offer() override { return page_->read_offer(); }
  std::int64_t worker_age_ns() override { return page_->heartbeat_age_ns(Writer::kWorker); }
  Counts counts() override { return arena_.table().counts(); }
  std::int64_t set_reserve(std::int64_t chunks) override {
    return arena_.table().set_reserve(chunks);
  }
  std::int64_t lend(std::int64_t chunks, std::int64_t owner) override {
    return static_cast<std::int64_t>(arena_.table().lend(chunks, owner).size());
  }
  std::int64_t revoke(std::int64_t chunks) override {
    return static_cast<std::int64_t>(arena_.table().revoke(chunks).size());
  }
  std::int64_t reclaim(std::int64_t owner) override { return arena_.table().reclaim(owner); }
  bool has_peers() override { return !arena_.peers().empty(); }
  int traverse(visitproc visit, void* arg) override {
    Py_VISIT(object_.ptr());
    return 0;
  }

 private:
  nb::object object_;
  Arena& arena_;
  std::shared_ptr<SharedPage> page_;
};

// Surroundings whose chunks are those of an object of Python with an arena's calls.
template <class Base>
class PythonChunks : public Base {
 public:
  template <class... Args>
  explicit PythonChunks(nb::object chunks, Args&&... of_base)
      : Base(std::forward<Args>(of_base)...), chunks_(std::move(chunks)) {}

  Counts counts() override {
    const auto found = nb::cast<nb::tuple>(chunks_.attr("counts")());
    Counts counts{};
    for (std::size_t i = 0; i < counts.size(); ++i) {
      counts[i] = nb::cast<std::int64_t>(found[i]);
    }
    return counts;
  }
  std::int64_t set_reserve(std::int64_t chunks) override {
    return nb::cast<std::int64_t>(chunks_.attr("set_reserve")(chunks));
  }
  std::int64_t lend(std::int64_t chunks, std::int64_t owner) override {
    return static_cast<std::int64_t>(
        nb::len(chunks_.attr("lend")(chunks, nb::arg("owner") = owner)));
  }
  std::int64_t revoke(std::int64_t chunks) override {
    return static_cast<std::int64_t>(nb::len(chunks_.attr("revoke")(chunks)));
  }
  std::int64_t reclaim(std::int64_t owner) override {
    return nb::cast<std::int64_t>(chunks_.attr("reclaim")(owner));
  }
  bool has_peers() override { return nb::len(chunks_.attr("peers")()) > 0; }
  int traverse(visitproc visit, void* arg) override {
    Py_VISIT(chunks_.ptr());
    return Base::traverse(visit, arg);
  }

 private:
  nb::object chunks_;
};

// An arena and its page in real time, whose chunks a group of ranks lends: what becomes of them is
// decided by an object of Python, since every rank has to do the same.
using GroupSurroundings = PythonChunks<ArenaSurroundings>;

// An object of Python with an arena's methods and a clock of its own, as a simulation has them.
// Nobody there reads a view or falls silent.
class SimulatedSurroundings final : public PythonChunks<HookSurroundings> {
 public:
  SimulatedSurroundings(const nb::object& arena, nb::object clock, nb::object grant_type)
      : PythonChunks(arena),
        page_(arena.attr("page")),
        clock_(std::move(clock)),
        grant_type_(std::move(grant_type)) {}

  std::int64_t now_ns() override { return nb::cast<std::int64_t>(clock_()); }
  void publish_view(const View& /*view*/) override {}
  void publish_grant(const Grant& grant) override {
    page_.attr("publish_grant")(grant_tuple(grant_type_, grant));
  }
  void beat(std::int64_t /*now_ns*/) override {}
  Offer read_offer() override {
    return record_of<Offer>(nb::cast<nb::tuple>(page_.attr("read_offer")()));
  }
  std::int64_t worker_age_ns() override { return 0; }
  int traverse(visitproc visit, void* arg) override {
    Py_VISIT(page_.ptr());
    Py_VISIT(clock_.ptr());
    return PythonChunks::traverse(visit, arg);
  }

 private:
  nb::object page_;
  nb::object clock_;
  nb::object grant_type_;
};

std::unique_ptr<HookSurroundings> surroundings_of(nb::object arena, nb::object clock,
                                                  nb::object chunks, const nb::object& grant_type) {
  if (clock.is_none() && chunks.is_none()) {
    return std::make_unique<ArenaSurroundings>(std::move(arena));
  }
  if (clock.is_none()) {
    return std::make_unique<GroupSurroundings>(std::move(chunks), std::move(arena));
  }
  return std::make_unique<SimulatedSurroundings>(arena, std::move(clock), grant_type);
}

class BoundStep {
 public:
  BoundStep(nb::object arena, nb::object clock, nb::object group, nb::object decider,
            const StepSettings& settings, std::int64_t units, std::int64_t pause_epoch)
      : decider_object_(std::move(decider)),
        decider_(nb::cast<BoundDecider&>(decider_object_)),
        around_(surroundings_of(std::move(arena), std::move(clock), std::move(group),
                                decider_.grant_type())),
        step_(*around_, decider_.decider(), settings,
              {.decode_units = units, .pause_epoch = pause_epoch}) {
    show(step_.grant());
  }

  // Returns a new reference. Most steps end with the first line that they can.
  PyObject* before_step(PyObject* self, PyObject* facts) {
    require_step_input(facts);
    if (!step_.keeps(facts_that_matter(facts))) {
      around_->set_self(self);
      show(step_.decides(facts_of(facts)));
    }
    return newest_.inc_ref().ptr();
  }
  nb::object idle(nb::handle self, std::int64_t now_ns) {
    around_->set_self(self);
    show(step_.idle(now_ns));
    return newest_;
  }
  void after_step(nb::handle self, std::int64_t end_ns, double latency_us) {
    around_->set_self(self);
    step_.after_step(end_ns, latency_us);
  }
  void after_prompt(std::int64_t tokens, double latency_us, const nb::tuple& grant) {
    step_.after_prompt(tokens, latency_us, record_of<Grant>(grant));
  }
  void close(nb::handle self) {
    around_->set_self(self);
    step_.close();
    show(step_.grant());
  }

  HarvestStep& step() { return step_; }
  [[nodiscard]] const nb::object& newest() const { return newest_; }
  BoundDecider& decider() { return decider_; }

  int traverse(visitproc visit, void* arg) {
    Py_VISIT(decider_object_.ptr());
    return around_->traverse(visit, arg);
  }

 private:
  void show(const Grant& grant) { newest_ = grant_tuple(decider_.grant_type(), grant); }

  nb::object decider_object_;
  BoundDecider& decider_;
  std::unique_ptr<HookSurroundings> around_;
  nb::object newest_;  // beside what a step reads first
  HarvestStep step_;
};

// Raises in Python what the core threw, as nanobind does for the functions that it calls.
PyObject* raised(std::exception_ptr thrown) noexcept {
  try {
    nb::cpp_function([&thrown] { std::rethrow_exception(thrown); })();
  } catch (nb::python_error& translated) {
    translated.restore();
  }
  return nullptr;
}

// As CPython calls a method of one argument, without nanobind's search for an overload and for the
// types of arguments: ten cache lines that are cold between two decode steps.
PyObject* before_step(PyObject* self, PyObject* facts) noexcept {
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_TypeError, "before_step needs a HarvestStep whose __init__ was called");
    return nullptr;
  }
  try {
    return nb::inst_ptr<BoundStep>(self)->before_step(self, facts);
  } catch (...) {
    return raised(std::current_exception());
  }
}

PyMethodDef step_methods[] = {
    {"before_step", &before_step, METH_O,
     "Show the view, decide, grant; a decision holds while nothing that it rests on has changed."},
    {nullptr, nullptr, 0, nullptr}};

// Lets Python's collector see through a step, whose simulated page refers to the engine around it.
int traverse_step(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  if (!nb::inst_ready(self)) {
    return 0;
  }
  return nb::inst_ptr<BoundStep>(self)->traverse(visit, arg);
}

int clear_step(PyObject* /*self*/) {
  return 0;  // a cycle is broken at the dictionaries of Python's objects in it
}

PyType_Slot step_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_step)},
                            {Py_tp_clear, reinterpret_cast<void*>(&clear_step)},
                            {Py_tp_methods, static_cast<void*>(step_methods)},
                            {0, nullptr}};

void make_step(BoundStep* self, nb::object arena, nb::object clock, nb::object group,
               nb::object decider, std::int64_t units, std::int64_t pause_epoch,
               std::int64_t chunks, std::int64_t chunk_bytes, std::int64_t slots_per_chunk,
               std::int64_t max_batch, double drain_us, bool reserve_prompts, bool keeps_reserve,
               std::int64_t admission_window_ns, std::int64_t worker_stale_ns,
               std::int64_t regrant_ns, std::int64_t steady_ns, std::int64_t lending_every_ns,
               bool keeps_decisions) {
  const StepSettings settings{.max_batch = max_batch,
                              .drain_us = drain_us,
                              .reserve_prompts = reserve_prompts,
                              .keeps_reserve = keeps_reserve,
                              .admission_window_ns = admission_window_ns,
                              .worker_stale_ns = worker_stale_ns,
                              .regrant_ns = regrant_ns,
                              .steady_ns = steady_ns,
                              .lending_every_ns = lending_every_ns,
                              .chunks = chunks,
                              .chunk_bytes = chunk_bytes,
                              .slots_per_chunk = slots_per_chunk,
                              .keeps_decisions = keeps_decisions};
  new (self) BoundStep(std::move(arena), std::move(clock), std::move(group), std::move(decider),
                       settings, units, pause_epoch);
}

nb::object kept_tuple(BoundStep& self, const KeptEntry& entry) {
  if (const auto* outcome = std::get_if<KeptOutcome>(&entry)) {
    return nb::make_tuple(outcome->steps, outcome->over, outcome->longest_us, outcome->sum_us);
  }
  const auto& kept = std::get<KeptDecision>(entry);
  return nb::make_tuple(kept.at_ns, to_tuple(kept.view), to_tuple(kept.offer), to_tuple(kept.grant),
                        kept.margin, kept.alone_us, self.decider().word(kept.why),
                        kept.extrapolated);
}

nb::list take_kept(BoundStep& self) {
  nb::list taken;
  for (const KeptEntry& entry : self.step().take_kept()) {
    taken.append(kept_tuple(self, entry));
  }
  return taken;
}

nb::tuple take_measured(BoundStep& self) {
  nb::list steps;
  for (const MeasuredStep& step : self.step().take_measured()) {
    steps.append(nb::make_tuple(step.latency_us, step.cost_ns, step.objective_us, step.tokens));
  }
  return nb::make_tuple(steps, self.step().take_residuals());
}

nb::list take_beside(BoundStep& self) {
  nb::list steps;
  for (const StepBeside& step : self.step().take_beside()) {
    steps.append(nb::make_tuple(step.split, step.batch, step.context_tokens, step.latency_us));
  }
  return steps;
}

nb::tuple counters_tuple(BoundStep& self) {
  const StepCounters found = self.step().counters();
  return nb::make_tuple(found.steps, found.over, found.busy_us, found.lent, found.revoked,
                        found.reclaimed, found.granted_unit_seconds, found.granted_s);
}

std::optional<std::int64_t> live_epoch(BoundStep& self) {
  const std::int64_t epoch = self.step().live_epoch();
  return epoch < 0 ? std::nullopt : std::optional(epoch);
}

}  // namespace

void bind_harvest_step(nb::module_& module) {
  nb::list names;
  for (const std::string_view name : kStepNames) {
    names.append(nb::str(name.data(), name.size()));
  }
  module.attr("STEP_FIELDS") = nb::tuple(names);

  nb::class_<BoundStep>(module, "HarvestStep", nb::type_slots(step_slots),
                        "All that decode pays for before a step; see engines/harvest/hook.py.")
      .def("__init__", &make_step, nb::arg("arena"), nb::kw_only(), nb::arg("clock").none(),
           nb::arg("group").none(), nb::arg("decider"), nb::arg("units"), nb::arg("pause_epoch"),
           nb::arg("chunks"), nb::arg("chunk_bytes"), nb::arg("slots_per_chunk"),
           nb::arg("max_batch"), nb::arg("drain_us"), nb::arg("reserve_prompts"),
           nb::arg("keeps_reserve"), nb::arg("admission_window_ns"), nb::arg("worker_stale_ns"),
           nb::arg("regrant_ns"), nb::arg("steady_ns"), nb::arg("lending_every_ns"),
           nb::arg("keeps_decisions"))
      .def("after_step",
           [](nb::handle_t<BoundStep> self, std::int64_t end_ns, double latency_us) {
             nb::inst_ptr<BoundStep>(self)->after_step(self, end_ns, latency_us);
           })
      .def("idle",
           [](nb::handle_t<BoundStep> self, std::int64_t now_ns) {
             return nb::inst_ptr<BoundStep>(self)->idle(self, now_ns);
           })
      .def("after_prompt", &BoundStep::after_prompt)
      .def("after_first_token",
           [](BoundStep& self, double after_us) { self.step().after_first_token(after_us); })
      .def("_revoke_all",
           [](nb::handle_t<BoundStep> self) { nb::inst_ptr<BoundStep>(self)->close(self); })
      .def("_news", [](BoundStep& self) { self.step().news(); })
      .def("_look_again", [](BoundStep& self) { self.step().look_again(); })
      .def("worker_lives",
           [](BoundStep& self, std::int64_t epoch) { self.step().worker_lives(epoch); })
      .def(
          "_set_terms",
          [](BoundStep& self, bool any, bool harvests, std::int64_t objective_us,
             std::int64_t token_objective_us, std::int64_t max_memory_percent, double step_tokens) {
            self.step().set_terms({.any = any,
                                   .harvests = harvests,
                                   .objective_us = objective_us,
                                   .token_objective_us = token_objective_us,
                                   .max_memory_percent = max_memory_percent,
                                   .step_tokens = step_tokens});
          },
          nb::kw_only(), nb::arg("any"), nb::arg("harvests"), nb::arg("objective_us"),
          nb::arg("token_objective_us"), nb::arg("max_memory_percent"), nb::arg("step_tokens"))
      .def("_take_kept", &take_kept)
      .def("_take_measured", &take_measured)
      .def("_take_beside", &take_beside)
      .def("_take_returns", [](BoundStep& self) { return self.step().lender().take_returns(); })
      .def("_counters", &counters_tuple)
      .def_prop_ro("_view", [](BoundStep& self) { return to_tuple(self.step().view()); })
      .def_prop_ro("_grant", [](BoundStep& self) { return self.newest(); })
      .def_prop_ro("_holds_out", [](BoundStep& self) { return self.step().lender().holds_out(); })
      .def_prop_ro("_tokens_done", [](BoundStep& self) { return self.step().tokens_done(); })
      .def_prop_ro("chunks_lacking", [](BoundStep& self) { return self.step().lender().lacking(); })
      .def_prop_ro("live_epoch", &live_epoch)
      .def_prop_ro("cost_us", [](BoundStep& self) {
        return static_cast<double>(self.step().cost_ns()) / 1e3;
      });
}

}  // namespace windrow::bindings
