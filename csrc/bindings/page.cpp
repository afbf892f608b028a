#include "windrow/page.h"

#include <nanobind/stl/shared_ptr.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "bind.h"
#include "record_tuples.h"

namespace windrow::bindings {
namespace {

template <class Record, auto Publish>
void def_publish(nb::class_<SharedPage>& page, const char* name, const char* argument,
                 const char* doc) {
  page.def(
      name,
      [](SharedPage& self, const nb::tuple& fields) { (self.*Publish)(record_of<Record>(fields)); },
      nb::arg(argument), doc);
}

// Signals end the sleep so that Python's handlers run: Ctrl-C works while waiting.
template <auto Wait, auto Sequence>
std::uint64_t wait_for(SharedPage& page, std::uint64_t seen, double timeout_s) {
  const std::int64_t deadline = deadline_after(timeout_s);
  for (;;) {
    Woken woken{};
    {
      nb::gil_scoped_release release;
      woken = (page.*Wait)(seen, deadline);
    }
    const std::uint64_t sequence = (page.*Sequence)();
    if (sequence != seen || woken == Woken::kTimedOut) {
      return sequence;
    }
    if (PyErr_CheckSignals() != 0) {
      throw nb::python_error();
    }
  }
}

template <std::size_t N>
nb::tuple names_tuple(const std::array<std::string_view, N>& names) {
  nb::list list;
  for (const std::string_view name : names) {
    list.append(nb::str(name.data(), name.size()));
  }
  return nb::tuple(list);
}

}  // namespace

Writer writer_of(int writer) {
  if (writer != 0 && writer != 1) {
    throw std::invalid_argument("writer is " + std::to_string(writer) +
                                "; 0 is decode, 1 the worker");
  }
  return static_cast<Writer>(writer);
}

void bind_page(nb::module_& module) {
  module.attr("VIEW_FIELDS") = names_tuple(View::kNames);
  module.attr("OFFER_FIELDS") = names_tuple(Offer::kNames);
  module.attr("GRANT_FIELDS") = names_tuple(Grant::kNames);
  module.attr("LEVELS_MAX") = kLevelsMax;

  nb::class_<SharedPage> page(module, "Page",
                              "View and grant (decode writes), offer (worker writes).");
  def_publish<View, &SharedPage::publish_view>(page, "publish_view", "view",
                                               "Publish; sets heartbeat_ns.");
  def_publish<Offer, &SharedPage::publish_offer>(
      page, "publish_offer", "offer", "Publish; sets heartbeat_ns; wakes who waits for an offer.");
  def_publish<Grant, &SharedPage::publish_grant>(
      page, "publish_grant", "grant", "Publish; sets heartbeat_ns; wakes a waiting worker.");
  page.def("read_view", [](const SharedPage& self) { return to_tuple(self.read_view()); })
      .def("read_offer", [](const SharedPage& self) { return to_tuple(self.read_offer()); })
      .def("read_grant", [](const SharedPage& self) { return to_tuple(self.read_grant()); })
      .def_prop_ro("grant_seq", &SharedPage::grant_sequence)
      .def_prop_ro("offer_seq", &SharedPage::offer_sequence)
      .def_prop_ro("pause_epoch", &SharedPage::pause_epoch)
      .def("wait_grant", &wait_for<&SharedPage::wait_grant, &SharedPage::grant_sequence>,
           nb::arg("seen_seq"), nb::kw_only(), nb::arg("timeout_s"))
      .def("wait_offer", &wait_for<&SharedPage::wait_offer, &SharedPage::offer_sequence>,
           nb::arg("seen_seq"), nb::kw_only(), nb::arg("timeout_s"))
      .def(
          "beat", [](SharedPage& self, int writer) { self.beat(writer_of(writer)); },
          nb::arg("writer"))
      .def(
          "heartbeat_age_ns",
          [](const SharedPage& self, int writer) {
            return self.heartbeat_age_ns(writer_of(writer));
          },
          nb::arg("writer"))
      .def("grant_stands", &SharedPage::grant_stands, nb::arg("seq"), nb::arg("stale_ns"),
           "Whether that grant is the newest, and decode alive. For the middle of a tasklet.")
      .def("add", &SharedPage::add, nb::arg("counter"), nb::arg("n"));
}

}  // namespace windrow::bindings
