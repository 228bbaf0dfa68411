// Python face of attention.h, in the manner of module.cpp. A struct comes as a tuple in its own order, with addresses for pointers, and a
// tensor as (address, dtype code, shape, strides): pybind11's conversion of nested tuples took longer than a launch, so they are read here.
#include "attention.h"
#include "members.h"

namespace {

// A tensor over the axes batch, head, row, column. One of three axes is packed: row, head, column.
struct Tensor {
  attn_cuda_array array;
  int64_t sizes[4];
};

// An axis of size 1 has stride 0, since torch leaves its stride open.
Tensor tensor_of(PyObject* values) {
  Members from(values);
  Tensor tensor{};
  tensor.array.data = from.pointer<const void>();
  tensor.array.dtype = static_cast<int32_t>(from.integer());
  Members shape(from.next()), strides(from.next());
  from.end();
  const bool packed = shape.size() == 3;
  if (!packed && shape.size() != 4) throw std::runtime_error("attn_cuda: a tensor has three or four axes");
  if (packed) tensor.sizes[0] = 1;
  for (int64_t i = 0; i < shape.size(); ++i) {
    const int64_t size = shape.integer(), stride = strides.integer();
    const int64_t axis = !packed ? i : i == 0 ? 2 : i == 1 ? 1 : 3;
    tensor.sizes[axis] = size;
    tensor.array.strides[axis] = size != 1 ? stride : axis == 3 ? 1 : 0;
  }
  strides.end();
  return tensor;
}

// Batch; q, k, v; the optional pointers; shape and strides of the bias or None; causal, window left and right.
attn_cuda_attention attention(const py::tuple& values, float scale) {
  Members from(values.ptr());
  attn_cuda_attention problem{};
  problem.batch = from.integer();
  const Tensor q = tensor_of(from.next()), k = tensor_of(from.next()), v = tensor_of(from.next());
  problem.q = q.array, problem.k = k.array, problem.v = v.array;
  problem.heads = q.sizes[1], problem.queries = q.sizes[2], problem.head_dim = q.sizes[3];
  problem.kv_heads = k.sizes[1], problem.keys = k.sizes[2], problem.value_dim = v.sizes[3];
  Members pointers(from.next());
  for (const uint8_t** mask : {&problem.query_mask, &problem.key_mask}) *mask = pointers.pointer<const uint8_t>();
  for (const int64_t** integers : {&problem.kv_lengths, &problem.q_start, &problem.k_start, &problem.cu_seqlens_q, &problem.cu_seqlens_k,
                                   &problem.seqlens_q, &problem.seqlens_k})
    *integers = pointers.pointer<const int64_t>();
  problem.sinks = pointers.pointer<const float>();
  pointers.end();
  PyObject* bias = from.next();
  if (bias != Py_None) {
    const Tensor tensor = tensor_of(bias);
    problem.bias = static_cast<const float*>(tensor.array.data);
    for (int axis = 0; axis < 4; ++axis) problem.bias_strides[axis] = tensor.sizes[axis] == 1 ? 0 : tensor.array.strides[axis];
  }
  problem.causal = static_cast<int32_t>(from.integer());
  problem.window_left = from.integer();
  problem.window_right = from.integer();
  problem.scale = scale;
  from.end();
  return problem;
}

// dout; dlse, row_max, row_sum, dq, dk, dv, dsinks, dbias; shape of dbias.
attn_cuda_attention_gradients gradients_of(const py::tuple& values) {
  Members from(values.ptr());
  attn_cuda_attention_gradients gradients{};
  gradients.dout = tensor_of(from.next()).array;
  for (const float** row : {&gradients.dlse, &gradients.row_max, &gradients.row_sum}) *row = from.pointer<const float>();
  for (void** gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) *gradient = from.pointer<void>();
  for (float** gradient : {&gradients.dsinks, &gradients.dbias}) *gradient = from.pointer<float>();
  for (int64_t& size : gradients.dbias_shape) size = from.integer();
  from.end();
  return gradients;
}

int64_t forward_workspace(int device, const py::tuple& values, float scale) {
  const attn_cuda_attention problem = attention(values, scale);
  int64_t bytes = 0;
  check(attn_cuda_attention_forward_workspace(device, &problem, &bytes), "attn_cuda_attention_forward_workspace");
  return bytes;
}

void forward(int device, Address stream, const py::tuple& values, float scale, const py::tuple& results, Address workspace) {
  const attn_cuda_attention problem = attention(values, scale);
  Members from(results.ptr());
  attn_cuda_attention_results to{};
  to.out = from.pointer<void>();
  to.out_dtype = static_cast<int32_t>(from.integer());
  for (float** row : {&to.lse, &to.row_max, &to.row_sum}) *row = from.pointer<float>();
  from.end();
  check(attn_cuda_attention_forward(device, pointer<void>(stream), &problem, &to, pointer<void>(workspace)), "attn_cuda_attention_forward");
}

int64_t backward_workspace(int device, const py::tuple& values, float scale, const py::tuple& gradients) {
  const attn_cuda_attention problem = attention(values, scale);
  const attn_cuda_attention_gradients to = gradients_of(gradients);
  int64_t bytes = 0;
  check(attn_cuda_attention_backward_workspace(device, &problem, &to, &bytes), "attn_cuda_attention_backward_workspace");
  return bytes;
}

void backward(int device, Address stream, const py::tuple& values, float scale, const py::tuple& gradients, Address workspace) {
  const attn_cuda_attention problem = attention(values, scale);
  const attn_cuda_attention_gradients to = gradients_of(gradients);
  check(attn_cuda_attention_backward(device, pointer<void>(stream), &problem, &to, pointer<void>(workspace)),
        "attn_cuda_attention_backward");
}

// Kind; heads of the keys; left, right, out.
void product(int device, Address stream, const py::tuple& values, float scale) {
  Members from(values.ptr());
  attn_cuda_product product{};
  product.kind = static_cast<int32_t>(from.integer());
  product.kv_heads = from.integer();
  const Tensor left = tensor_of(from.next()), right = tensor_of(from.next()), out = tensor_of(from.next());
  from.end();
  product.left = left.array, product.right = right.array;
  product.batch = left.sizes[0], product.heads = left.sizes[1], product.queries = left.sizes[2];
  product.keys = product.kind == ATTN_CUDA_OVER_WIDTH ? right.sizes[2] : left.sizes[3];
  product.width = right.sizes[3];
  product.out = const_cast<void*>(out.array.data);
  product.out_dtype = out.array.dtype;
  product.scale = scale;
  check(attn_cuda_product_run(device, pointer<void>(stream), &product), "attn_cuda_product_run");
}

}  // namespace

void define_attention(py::module_& module) {
  module.attr("OVER_WIDTH") = static_cast<int>(ATTN_CUDA_OVER_WIDTH);
  module.attr("OVER_KEYS") = static_cast<int>(ATTN_CUDA_OVER_KEYS);
  module.attr("OVER_QUERIES") = static_cast<int>(ATTN_CUDA_OVER_QUERIES);
  module.def("product", &product);
  module.def("attention_forward_workspace", &forward_workspace);
  module.def("attention_forward", &forward);
  module.def("attention_backward_workspace", &backward_workspace);
  module.def("attention_backward", &backward);
}
