// Arguments of the Python modules: tuples that are read here, and codes of the C interface as exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "attn_cuda.h"

namespace py = pybind11;

using Address = std::uintptr_t;

// The members of a tuple or list, in order; std::runtime_error when it is none or their number is another one than was read.
class Members {
 public:
  explicit Members(PyObject* values) : values_(values) {
    if (!PyTuple_Check(values) && !PyList_Check(values)) throw std::runtime_error("attn_cuda: a tuple was expected");
  }

  int64_t size() const { return PySequence_Fast_GET_SIZE(values_); }
  bool ended() const { return index_ >= size(); }

  PyObject* next() {
    if (ended()) throw std::runtime_error("attn_cuda: a tuple of more than " + std::to_string(index_) + " members was expected");
    return PySequence_Fast_GET_ITEM(values_, index_++);
  }

  int64_t integer() {
    const int64_t value = PyLong_AsLongLong(next());
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
  }

  template <typename T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<Address>(integer()));
  }

  void end() const {
    if (index_ != size()) throw std::runtime_error("attn_cuda: a tuple of " + std::to_string(index_) + " members was expected");
  }

 private:
  PyObject* values_;
  Py_ssize_t index_ = 0;
};

inline void check(int code, const char* function) {
  if (code != 0) throw std::runtime_error(std::string(function) + ": " + attn_cuda_message(code) + " (code " + std::to_string(code) + ")");
}

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}
