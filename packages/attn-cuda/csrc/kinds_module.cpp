// What a prepared launch depends on, read from the arguments of a call. Python's getters of three tensors take longer than the launch.
#include <memory>
#include <string>
#include <vector>

#include "exchange.h"
#include "members.h"

namespace {

// Torch as the describer sees it. `types` are those that are nothing but a dense tensor.
struct Torch {
  const ExchangeTable* table;
  std::vector<py::object> types;
  py::object dtype;
  py::object is_neg;
  py::object requires_grad;

  bool holds(PyObject* value) const {
    for (const py::object& type : types)
      if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == type.ptr()) return true;
    return false;
  }
};

bool is_true(PyObject* owned) {
  const auto value = py::reinterpret_steal<py::object>(owned);
  if (!value) throw py::error_already_set();
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

// The arguments of one call as bytes that calls of other kinds do not have, and the addresses of its tensors. Each value begins with a
// letter, and what has no fixed length with its length. Where calls are `recorded`, a letter says which tensors need a gradient.
class Kind {
 public:
  Kind(const Torch& torch, bool recorded) : torch_(torch), recorded_(recorded) { bytes_.reserve(512); }

  // False for what is neither a plain value, a tuple of such, nor a dense tensor as it lies in memory.
  bool add(PyObject* value) {
    if (torch_.holds(value)) return add_tensor(value);
    return PyTuple_CheckExact(value) ? add_members<&Kind::add_plain>(value) : add_plain(value);
  }

  template <bool (Kind::*Add)(PyObject*)>
  bool add_members(PyObject* tuple) {
    put('(', PyTuple_GET_SIZE(tuple));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
      if (!(this->*Add)(PyTuple_GET_ITEM(tuple, i))) return false;
    return true;
  }

  bool add_plain(PyObject* value) {
    if (value == Py_None || value == Py_True || value == Py_False) {
      bytes_ += value == Py_None ? 'n' : value == Py_True ? 't' : 'f';
    } else if (PyLong_CheckExact(value)) {
      int overflows = 0;
      put('i', PyLong_AsLongLongAndOverflow(value, &overflows));
      return overflows == 0;
    } else if (PyFloat_CheckExact(value)) {
      put('d', PyFloat_AS_DOUBLE(value));
    } else if (PyUnicode_CheckExact(value)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &size);
      if (text == nullptr) {  // half a surrogate pair
        PyErr_Clear();
        return false;
      }
      put('s', size);
      bytes_.append(text, static_cast<size_t>(size));
    } else if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == torch_.dtype.ptr()) {
      put('y', value);  // torch makes each dtype once
    } else {
      return false;
    }
    return true;
  }

  py::tuple taken() const {
    py::tuple found(2);
    PyTuple_SET_ITEM(found.ptr(), 0, py::bytes(bytes_).release().ptr());
    PyTuple_SET_ITEM(found.ptr(), 1, (needs_ ? py::object(py::none()) : addresses()).release().ptr());
    return found;
  }

 private:
  py::object addresses() const {
    py::list addresses(addresses_.size());
    for (size_t i = 0; i < addresses_.size(); ++i) PyList_SET_ITEM(addresses.ptr(), i, py::int_(addresses_[i]).release().ptr());
    return std::move(addresses);
  }

  template <typename T>
  void put(char letter, const T& value) {
    bytes_ += letter;
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  bool add_tensor(PyObject* value) {
    if (recorded_ && is_true(PyObject_GetAttr(value, torch_.requires_grad.ptr()))) {
      bytes_ += 'R';
      needs_ = true;
    }
    if (is_true(PyObject_CallMethodNoArgs(value, torch_.is_neg.ptr()))) return false;
    ExchangedTensor tensor{};
    if (torch_.table->read(value, &tensor) != 0) {  // sparse and nested tensors have no address or no strides
      PyErr_Clear();
      return false;
    }
    const Address address = tensor.address();
    put('T', tensor.axes);
    bytes_.append(reinterpret_cast<const char*>(tensor.shape), sizeof(int64_t) * tensor.axes);
    bytes_.append(reinterpret_cast<const char*>(tensor.strides), sizeof(int64_t) * tensor.axes);
    const int32_t facts[] = {tensor.dtype_code,  tensor.dtype_bits, tensor.dtype_lanes,
                             tensor.device_type, tensor.device_id,  static_cast<int32_t>(address % kAlignment)};
    bytes_.append(reinterpret_cast<const char*>(facts), sizeof facts);
    addresses_.push_back(address);
    return true;
  }

  static constexpr Address kAlignment = 16;  // bytes of the widest access of a kernel

  const Torch& torch_;
  bool recorded_;
  bool needs_ = false;
  std::string bytes_;
  std::vector<Address> addresses_;
};

// What answers for one capsule. Plain functions of CPython: a method of pybind11 takes as long as three tensors.
struct Describer {
  Torch torch;
  std::vector<py::object> watchers;
  py::object grad_enabled;
};

// None for a call that always goes the long way.
PyObject* taken(bool is_kind, const Kind& kind) { return (is_kind ? py::object(kind.taken()) : py::none()).release().ptr(); }

PyObject* describe_call(const Describer& of, PyObject* const* given) {
  if (!PyTuple_Check(given[2]) || !PyDict_Check(given[3])) throw py::type_error("attn_cuda: a tuple and a dict were expected");
  for (const py::object& watcher : of.watchers)
    if (is_true(PyObject_CallNoArgs(watcher.ptr()))) return py::none().release().ptr();
  Kind kind(of.torch, is_true(PyObject_CallNoArgs(of.grad_enabled.ptr())));
  bool is_kind = kind.add_plain(given[0]) && kind.add_plain(given[1]) && kind.add_members<&Kind::add>(given[2]);
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t place = 0; is_kind && PyDict_Next(given[3], &place, &key, &value) != 0;) is_kind = kind.add_plain(key) && kind.add(value);
  return taken(is_kind, kind);
}

PyObject* describe_values(const Describer& of, PyObject* const* given) {
  if (!PyTuple_Check(given[0])) throw py::type_error("attn_cuda: a tuple was expected");
  Kind kind(of.torch, false);
  return taken(kind.add_members<&Kind::add>(given[0]), kind);
}

template <auto Function, Py_ssize_t Count>
PyObject* entry(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  try {
    if (count != Count) throw py::type_error("attn_cuda: " + std::to_string(Count) + " arguments were expected");
    return Function(*static_cast<const Describer*>(PyCapsule_GetPointer(self, nullptr)), given);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::type_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <auto Function, Py_ssize_t Count>
py::object function(const char* name, const py::capsule& describer) {
  static PyMethodDef definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry<Function, Count>)), METH_FASTCALL,
                                   nullptr};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, describer.ptr()));
}

// The two functions of `attn_spec.torch.Describer`.
py::tuple describer(const py::capsule& exchange, const py::tuple& types, const py::object& dtype, const py::tuple& watchers,
                    const py::object& grad_enabled) {
  auto found = std::make_unique<Describer>();
  found->torch.table = exchange_table(exchange);
  for (const py::handle type : types) found->torch.types.push_back(py::reinterpret_borrow<py::object>(type));
  if (types.empty()) throw std::runtime_error("attn_cuda: a describer needs a class of tensors");
  found->torch.dtype = dtype;
  found->torch.is_neg = py::str("is_neg");
  found->torch.requires_grad = py::str("requires_grad");
  for (const py::handle watcher : watchers) found->watchers.push_back(py::reinterpret_borrow<py::object>(watcher));
  found->grad_enabled = grad_enabled;
  const py::capsule self(found.release(), [](void* held) { delete static_cast<Describer*>(held); });
  return py::make_tuple(function<describe_call, 4>("call", self), function<describe_values, 1>("values", self));
}

}  // namespace

void define_kinds(py::module_& module) { module.def("describer", &describer); }
