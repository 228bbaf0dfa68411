// What Python gives of an attention call, as the C interface takes it. A struct comes as a tuple in its own order, with addresses for
// pointers, and a tensor as (address, dtype code, shape, strides): pybind11's conversion of nested tuples took longer than a launch, so
// they are read here.
#pragma once

#include "attn/cuda/interface.h"
#include "members.h"

// A tensor over the axes batch, head, row, column. One of three axes is packed: row, head, column.
struct Tensor {
  attn_cuda_array array;
  int64_t sizes[4];
};

// An axis of size 1 has stride 0, since torch leaves its stride open.
inline Tensor tensor_of(PyObject* values) {
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
inline attn_cuda_attention attention(const py::tuple& values, float scale) {
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
