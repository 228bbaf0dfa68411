// Python face of attention.h, in the manner of module.cpp. A struct comes as one flat tuple of integers in its own order, with addresses
// for pointers: pybind11's conversion of nested tuples took longer than a launch.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

// The integers of a tuple, in order; std::runtime_error when their number is another one than was read.
class Integers {
 public:
  explicit Integers(const py::tuple& values) : values_(values) {}

  int64_t next() {
    PyObject* item = PyTuple_GetItem(values_.ptr(), index_++);
    if (item == nullptr) throw py::error_already_set();
    const int64_t value = PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
  }

  template <typename T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<Address>(next()));
  }

  attn_cuda_array array() {
    attn_cuda_array array{};
    array.data = pointer<const void>();
    array.dtype = static_cast<int32_t>(next());
    for (int64_t& stride : array.strides) stride = next();
    return array;
  }

  void end() const {
    if (index_ != PyTuple_Size(values_.ptr()))
      throw std::runtime_error("attn_cuda: a tuple of " + std::to_string(index_) + " integers was expected");
  }

 private:
  const py::tuple& values_;
  Py_ssize_t index_ = 0;
};

void check(int code, const char* function) {
  if (code != 0) throw std::runtime_error(std::string(function) + ": " + attn_cuda_message(code) + " (code " + std::to_string(code) + ")");
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// Sizes; q, k, v; the optional pointers; strides of the bias; causal, window left and right.
attn_cuda_attention attention(const py::tuple& values, float scale) {
  Integers from(values);
  attn_cuda_attention problem{};
  for (int64_t* size :
       {&problem.batch, &problem.heads, &problem.kv_heads, &problem.queries, &problem.keys, &problem.head_dim, &problem.value_dim})
    *size = from.next();
  for (attn_cuda_array* array : {&problem.q, &problem.k, &problem.v}) *array = from.array();
  for (const uint8_t** mask : {&problem.query_mask, &problem.key_mask}) *mask = from.pointer<const uint8_t>();
  for (const int64_t** integers : {&problem.kv_lengths, &problem.q_start, &problem.k_start, &problem.cu_seqlens_q, &problem.cu_seqlens_k,
                                   &problem.seqlens_q, &problem.seqlens_k})
    *integers = from.pointer<const int64_t>();
  for (const float** floats : {&problem.sinks, &problem.bias}) *floats = from.pointer<const float>();
  for (int64_t& stride : problem.bias_strides) stride = from.next();
  problem.causal = static_cast<int32_t>(from.next());
  problem.window_left = from.next();
  problem.window_right = from.next();
  problem.scale = scale;
  from.end();
  return problem;
}

// dout; dlse, row_max, row_sum, dq, dk, dv, dsinks, dbias; shape of dbias.
attn_cuda_attention_gradients gradients_of(const py::tuple& values) {
  Integers from(values);
  attn_cuda_attention_gradients gradients{};
  gradients.dout = from.array();
  for (const float** row : {&gradients.dlse, &gradients.row_max, &gradients.row_sum}) *row = from.pointer<const float>();
  for (void** gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) *gradient = from.pointer<void>();
  for (float** gradient : {&gradients.dsinks, &gradients.dbias}) *gradient = from.pointer<float>();
  for (int64_t& size : gradients.dbias_shape) size = from.next();
  from.end();
  return gradients;
}

int64_t forward_workspace(int device, const attn_cuda_attention& problem) {
  int64_t bytes = 0;
  check(attn_cuda_attention_forward_workspace(device, &problem, &bytes), "attn_cuda_attention_forward_workspace");
  return bytes;
}

void forward(int device, Address stream, const attn_cuda_attention& problem, const py::tuple& results, Address workspace) {
  Integers from(results);
  attn_cuda_attention_results to{};
  to.out = from.pointer<void>();
  to.out_dtype = static_cast<int32_t>(from.next());
  for (float** row : {&to.lse, &to.row_max, &to.row_sum}) *row = from.pointer<float>();
  from.end();
  check(attn_cuda_attention_forward(device, pointer(stream), &problem, &to, pointer(workspace)), "attn_cuda_attention_forward");
}

int64_t backward_workspace(int device, const attn_cuda_attention& problem, const py::tuple& gradients) {
  const attn_cuda_attention_gradients to = gradients_of(gradients);
  int64_t bytes = 0;
  check(attn_cuda_attention_backward_workspace(device, &problem, &to, &bytes), "attn_cuda_attention_backward_workspace");
  return bytes;
}

void backward(int device, Address stream, const attn_cuda_attention& problem, const py::tuple& gradients, Address workspace) {
  const attn_cuda_attention_gradients to = gradients_of(gradients);
  check(attn_cuda_attention_backward(device, pointer(stream), &problem, &to, pointer(workspace)), "attn_cuda_attention_backward");
}

// Kind; sizes; left, right; out and its dtype.
void product(int device, Address stream, const py::tuple& values, float scale) {
  Integers from(values);
  attn_cuda_product product{};
  product.kind = static_cast<int32_t>(from.next());
  for (int64_t* size : {&product.batch, &product.heads, &product.kv_heads, &product.queries, &product.keys, &product.width})
    *size = from.next();
  for (attn_cuda_array* array : {&product.left, &product.right}) *array = from.array();
  product.out = from.pointer<void>();
  product.out_dtype = static_cast<int32_t>(from.next());
  product.scale = scale;
  from.end();
  check(attn_cuda_product_run(device, pointer(stream), &product), "attn_cuda_product_run");
}

}  // namespace

void define_attention(py::module_& module) {
  module.attr("OVER_WIDTH") = static_cast<int>(ATTN_CUDA_OVER_WIDTH);
  module.attr("OVER_KEYS") = static_cast<int>(ATTN_CUDA_OVER_KEYS);
  module.attr("OVER_QUERIES") = static_cast<int>(ATTN_CUDA_OVER_QUERIES);
  py::class_<attn_cuda_attention>(module, "Attention", "A checked problem; the memory that it points to must live until the call.");
  module.def("attention", &attention);
  module.def("product", &product);
  module.def("attention_forward_workspace", &forward_workspace);
  module.def("attention_forward", &forward);
  module.def("attention_backward_workspace", &backward_workspace);
  module.def("attention_backward", &backward);
}
