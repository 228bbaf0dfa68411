// Python face of attn_cuda.h: pointers and streams are integers, so that neither torch nor numpy is needed to build or load it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attn_cuda.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using Sizes = std::array<int64_t, 3>;
using Rows = std::tuple<Address, int, Sizes>;                 // data, dtype, strides
using Mask = std::tuple<Address, Address, Address, int64_t>;  // kept, positions, counts, rows per batch item

void check(int code, const char* function) {
  if (code != 0) throw std::runtime_error(std::string(function) + ": " + attn_cuda_message(code) + " (code " + std::to_string(code) + ")");
}

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

attn_cuda_shape shape_of(const Sizes& sizes, int64_t keys) { return {{sizes[0], sizes[1], sizes[2]}, keys}; }

attn_cuda_rows rows_of(const Rows& rows) {
  const auto& [data, dtype, strides] = rows;
  return {pointer<const void>(data), dtype, {strides[0], strides[1], strides[2]}};
}

attn_cuda_mask mask_of(const std::optional<Mask>& mask) {
  if (!mask) return {};
  const auto& [kept, positions, counts, rows_per_batch] = *mask;
  return {pointer<const uint8_t>(kept), pointer<const int32_t>(positions), pointer<const int32_t>(counts), rows_per_batch};
}

void compact_keys(int device, Address stream, Address kept, int64_t batch, int64_t keys, Address positions, Address counts) {
  check(attn_cuda_compact_keys(device, pointer<void>(stream), pointer<const uint8_t>(kept), batch, keys, pointer<int32_t>(positions),
                               pointer<int32_t>(counts)),
        "attn_cuda_compact_keys");
}

template <auto Run>
void softmax_forward(int device, Address stream, const Sizes& sizes, int64_t keys, const Rows& scores, const std::optional<Mask>& mask,
                     Address probs, int probs_dtype, Address row_max, Address row_sum) {
  const attn_cuda_shape shape = shape_of(sizes, keys);
  const attn_cuda_rows input = rows_of(scores);
  const attn_cuda_mask padding = mask_of(mask);
  check(Run(device, pointer<void>(stream), &shape, &input, mask ? &padding : nullptr, pointer<void>(probs), probs_dtype,
            pointer<float>(row_max), pointer<float>(row_sum)),
        "attn_cuda softmax forward");
}

template <auto Run>
void softmax_backward(int device, Address stream, const Sizes& sizes, int64_t keys, const Rows& scores, const Rows& dprobs,
                      const std::optional<Mask>& mask, Address row_max, Address row_sum, Address dscores) {
  const attn_cuda_shape shape = shape_of(sizes, keys);
  const attn_cuda_rows input = rows_of(scores);
  const attn_cuda_rows cotangent = rows_of(dprobs);
  const attn_cuda_mask padding = mask_of(mask);
  check(Run(device, pointer<void>(stream), &shape, &input, &cotangent, mask ? &padding : nullptr, pointer<const float>(row_max),
            pointer<const float>(row_sum), pointer<void>(dscores)),
        "attn_cuda softmax backward");
}

uint32_t probe(int device) {
  uint32_t failed = 0;
  check(attn_cuda_probe(device, &failed), "attn_cuda_probe");
  return failed;
}

int capability(int device) {
  int found = 0;
  check(attn_cuda_capability(device, &found), "attn_cuda_capability");
  return found;
}

}  // namespace

void define_attention(py::module_& module);

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "Raw entry points of attn_cuda.h; RuntimeError carries the CUDA error or the refusal.";
  module.attr("FLOAT32") = static_cast<int>(ATTN_CUDA_FLOAT32);
  module.attr("BFLOAT16") = static_cast<int>(ATTN_CUDA_BFLOAT16);
  module.attr("FLOAT16") = static_cast<int>(ATTN_CUDA_FLOAT16);
  module.attr("ARCHITECTURES") = attn_cuda_architectures();
  module.attr("FLAGS") = attn_cuda_flags();
  module.attr("COMPILER") = attn_cuda_compiler();
  module.attr("FINGERPRINT") = attn_cuda_fingerprint();
  module.attr("SOFTMAX_TILE") = attn_cuda_softmax_tile();
  module.attr("PROBE_NAMES") = attn_cuda_probe_names();
  module.def("compact_keys", &compact_keys);
  module.def("softmax_forward", &softmax_forward<attn_cuda_softmax_forward>);
  module.def("softmax_backward", &softmax_backward<attn_cuda_softmax_backward>);
  module.def("softmax_v2_forward", &softmax_forward<attn_cuda_softmax_v2_forward>);
  module.def("softmax_v2_backward", &softmax_backward<attn_cuda_softmax_v2_backward>);
  module.def("probe", &probe);
  module.def("capability", &capability);
  define_attention(module);
}
