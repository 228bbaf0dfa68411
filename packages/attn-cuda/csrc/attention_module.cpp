// Python face of attention.h, in the manner of module.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using Strides = std::array<int64_t, 4>;
using Array = std::tuple<Address, int, Strides>;  // data, dtype, strides
using Inputs = std::tuple<Array, Array, Array>;   // q, k, v

// query_mask, key_mask, kv_lengths, q_start, k_start, cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, sinks, bias
using Options = std::array<Address, 11>;

// batch, heads, kv_heads, queries, keys, head_dim, value_dim; inputs; options; bias strides; causal, window left and right, scale
using Problem = std::tuple<std::array<int64_t, 7>, Inputs, Options, Strides, bool, int64_t, int64_t, float>;
using Results = std::tuple<Address, int, Address, Address, Address>;  // out and its dtype, lse, row_max, row_sum

// dout; dlse, row_max, row_sum, dq, dk, dv, dsinks, dbias; shape of dbias
using Gradients = std::tuple<Array, std::array<Address, 8>, Strides>;

void check(int code, const char* function) {
  if (code != 0) throw std::runtime_error(std::string(function) + ": " + attn_cuda_message(code) + " (code " + std::to_string(code) + ")");
}

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

attn_cuda_array array_of(const Array& array) {
  const auto& [data, dtype, strides] = array;
  return {pointer<const void>(data), dtype, {strides[0], strides[1], strides[2], strides[3]}};
}

attn_cuda_attention problem_of(const Problem& problem) {
  const auto& [sizes, inputs, options, bias_strides, causal, left, right, scale] = problem;
  const auto& [q, k, v] = inputs;
  return {sizes[0],
          sizes[1],
          sizes[2],
          sizes[3],
          sizes[4],
          sizes[5],
          sizes[6],
          array_of(q),
          array_of(k),
          array_of(v),
          pointer<const uint8_t>(options[0]),
          pointer<const uint8_t>(options[1]),
          pointer<const int64_t>(options[2]),
          pointer<const int64_t>(options[3]),
          pointer<const int64_t>(options[4]),
          pointer<const int64_t>(options[5]),
          pointer<const int64_t>(options[6]),
          pointer<const int64_t>(options[7]),
          pointer<const int64_t>(options[8]),
          pointer<const float>(options[9]),
          pointer<const float>(options[10]),
          {bias_strides[0], bias_strides[1], bias_strides[2], bias_strides[3]},
          causal ? 1 : 0,
          left,
          right,
          scale};
}

attn_cuda_attention_gradients gradients_of(const Gradients& gradients) {
  const auto& [dout, pointers, shape] = gradients;
  return {array_of(dout),
          pointer<const float>(pointers[0]),
          pointer<const float>(pointers[1]),
          pointer<const float>(pointers[2]),
          pointer<void>(pointers[3]),
          pointer<void>(pointers[4]),
          pointer<void>(pointers[5]),
          pointer<float>(pointers[6]),
          pointer<float>(pointers[7]),
          {shape[0], shape[1], shape[2], shape[3]}};
}

int64_t forward_workspace(int device, const Problem& problem) {
  const attn_cuda_attention attention = problem_of(problem);
  int64_t bytes = 0;
  check(attn_cuda_attention_forward_workspace(device, &attention, &bytes), "attn_cuda_attention_forward_workspace");
  return bytes;
}

void forward(int device, Address stream, const Problem& problem, const Results& results, Address workspace) {
  const attn_cuda_attention attention = problem_of(problem);
  const auto& [out, out_dtype, lse, row_max, row_sum] = results;
  const attn_cuda_attention_results to{pointer<void>(out), out_dtype, pointer<float>(lse), pointer<float>(row_max),
                                       pointer<float>(row_sum)};
  check(attn_cuda_attention_forward(device, pointer<void>(stream), &attention, &to, pointer<void>(workspace)),
        "attn_cuda_attention_forward");
}

int64_t backward_workspace(int device, const Problem& problem, const Gradients& gradients) {
  const attn_cuda_attention attention = problem_of(problem);
  const attn_cuda_attention_gradients to = gradients_of(gradients);
  int64_t bytes = 0;
  check(attn_cuda_attention_backward_workspace(device, &attention, &to, &bytes), "attn_cuda_attention_backward_workspace");
  return bytes;
}

void backward(int device, Address stream, const Problem& problem, const Gradients& gradients, Address workspace) {
  const attn_cuda_attention attention = problem_of(problem);
  const attn_cuda_attention_gradients to = gradients_of(gradients);
  check(attn_cuda_attention_backward(device, pointer<void>(stream), &attention, &to, pointer<void>(workspace)),
        "attn_cuda_attention_backward");
}

void product(int device, Address stream, int kind, const std::array<int64_t, 6>& sizes, float scale, const Array& left, const Array& right,
             Address out, int out_dtype) {
  const attn_cuda_product problem{kind,     sizes[0], sizes[1],       sizes[2],        sizes[3],           sizes[4],
                                  sizes[5], scale,    array_of(left), array_of(right), pointer<void>(out), out_dtype};
  check(attn_cuda_product_run(device, pointer<void>(stream), &problem), "attn_cuda_product_run");
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
