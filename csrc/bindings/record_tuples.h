#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "windrow/records.h"

namespace windrow::bindings {

namespace nb = nanobind;

inline constexpr std::size_t kEstimatesField = 6;
static_assert(Offer::kNames[kEstimatesField] == "estimates_us");

// Whatever publishing costs, decode pays before each step: a record is a named tuple of Python,
// whose items are read in place, and no dictionary is ever built.
template <class Record>
std::int64_t integer_of(const nb::tuple& record, std::size_t field) {
  const std::int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(record.ptr(), field));
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::type_error((std::string(Record::kNames[field]) + " is not a 64-bit integer").c_str());
  }
  return value;
}

inline Estimates estimates_of(nb::handle values) {
  if (!nb::isinstance<nb::tuple>(values)) {
    throw nb::type_error("estimates_us is not a tuple");
  }
  const auto tuple = nb::borrow<nb::tuple>(values);
  const std::size_t count = nb::len(tuple);
  if (count > kLevelsMax) {
    throw std::invalid_argument("estimates_us has " + std::to_string(count) +
                                " levels; the page holds " + std::to_string(kLevelsMax));
  }
  Estimates estimates{};
  for (std::size_t i = 0; i < count; ++i) {
    estimates[i] = nb::cast<std::int64_t>(tuple[i]);
  }
  return estimates;
}

template <class Record, std::size_t Field>
auto field_of(const nb::tuple& record) {
  if constexpr (std::is_same_v<Record, Offer> && Field == kEstimatesField) {
    return estimates_of(record[Field]);
  } else {
    return integer_of<Record>(record, Field);
  }
}

// All fields but the last, heartbeat_ns, which publishing sets.
template <class Record, std::size_t... Fields>
Record record_of(const nb::tuple& fields, std::index_sequence<Fields...>) {
  if (nb::len(fields) != Record::kNames.size()) {
    throw std::invalid_argument("the record has " + std::to_string(nb::len(fields)) +
                                " fields; the page's has " + std::to_string(Record::kNames.size()));
  }
  return Record{field_of<Record, Fields>(fields)..., 0};
}

template <class Record>
Record record_of(const nb::tuple& fields) {
  return record_of<Record>(fields, std::make_index_sequence<Record::kNames.size() - 1>{});
}

// Takes a fresh tuple of that length (null: Python's error is raised) and gives it back with ints.
inline nb::tuple filled(PyObject* tuple, const std::int64_t* words, std::size_t count) {
  if (tuple == nullptr) {
    throw nb::python_error();
  }
  for (std::size_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(words[i]));
  }
  return nb::steal<nb::tuple>(tuple);
}

template <class Record>
std::array<std::int64_t, sizeof(Record) / sizeof(std::int64_t)> words_of(const Record& record) {
  return std::bit_cast<std::array<std::int64_t, sizeof(Record) / sizeof(std::int64_t)>>(record);
}

inline nb::tuple words_tuple(const std::int64_t* words, std::size_t count) {
  return filled(PyTuple_New(static_cast<Py_ssize_t>(count)), words, count);
}

template <class Record>
nb::tuple to_tuple(const Record& record) {
  const auto words = words_of(record);
  return words_tuple(words.data(), words.size());
}

inline nb::tuple to_tuple(const Offer& offer) {
  const auto words = words_of(offer);
  constexpr std::size_t kBefore = offsetof(Offer, estimates_us) / sizeof(std::int64_t);
  constexpr std::size_t kAfter = kBefore + kLevelsMax;
  nb::tuple before = words_tuple(words.data(), kBefore);
  nb::tuple estimates = words_tuple(offer.estimates_us.data(), kLevelsMax);
  nb::tuple after = words_tuple(words.data() + kAfter, words.size() - kAfter);
  return nb::tuple(before + nb::make_tuple(estimates) + after);
}

// A Grant of Python: what calling the type would do, without the arguments' tuple in between.
inline nb::object grant_tuple(nb::handle grant_type, const Grant& grant) {
  auto* type = reinterpret_cast<PyTypeObject*>(grant_type.ptr());
  const auto words = words_of(grant);
  return filled(type->tp_alloc(type, words.size()), words.data(), words.size());
}

// Throws nb::type_error where it is none.
inline void require_tuple_type(nb::handle grant_type) {
  auto* type = reinterpret_cast<PyTypeObject*>(grant_type.ptr());
  if (PyType_IsSubtype(type, &PyTuple_Type) == 0) {
    throw nb::type_error("grant_type is not a named tuple");
  }
}

}  // namespace windrow::bindings
