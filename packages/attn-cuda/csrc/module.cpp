// Python face of attn_cuda.h: pointers and streams are integers, so that neither torch nor numpy is needed to build or load it.
#include "members.h"

namespace {

attn_cuda_shape shape_of(const py::tuple& sizes, int64_t keys) {
  Members from(sizes.ptr());
  attn_cuda_shape shape{};
  for (int64_t& size : shape.sizes) size = from.integer();
  shape.keys = keys;
  from.end();
  return shape;
}

// Address, dtype code, strides.
attn_cuda_rows rows_of(const py::tuple& rows) {
  Members from(rows.ptr());
  attn_cuda_rows found{};
  found.data = from.pointer<const void>();
  found.dtype = static_cast<int32_t>(from.integer());
  Members strides(from.next());
  for (int64_t& stride : found.strides) stride = strides.integer();
  strides.end();
  from.end();
  return found;
}

// Kept, positions, counts, rows of a batch item; or None.
attn_cuda_mask mask_of(const py::object& mask) {
  attn_cuda_mask found{};
  if (mask.is_none()) return found;
  Members from(mask.ptr());
  found.kept = from.pointer<const uint8_t>();
  found.positions = from.pointer<const int32_t>();
  found.counts = from.pointer<const int32_t>();
  found.rows_per_batch = from.integer();
  from.end();
  return found;
}

void compact_keys(int device, Address stream, Address kept, int64_t batch, int64_t keys, Address positions, Address counts) {
  check(attn_cuda_compact_keys(device, pointer<void>(stream), pointer<const uint8_t>(kept), batch, keys, pointer<int32_t>(positions),
                               pointer<int32_t>(counts)),
        "attn_cuda_compact_keys");
}

template <auto Run>
void softmax_forward(int device, Address stream, const py::tuple& sizes, int64_t keys, const py::tuple& scores, const py::object& mask,
                     Address probs, int probs_dtype, Address row_max, Address row_sum) {
  const attn_cuda_shape shape = shape_of(sizes, keys);
  const attn_cuda_rows input = rows_of(scores);
  const attn_cuda_mask padding = mask_of(mask);
  check(Run(device, pointer<void>(stream), &shape, &input, mask.is_none() ? nullptr : &padding, pointer<void>(probs), probs_dtype,
            pointer<float>(row_max), pointer<float>(row_sum)),
        "attn_cuda softmax forward");
}

template <auto Run>
void softmax_backward(int device, Address stream, const py::tuple& sizes, int64_t keys, const py::tuple& scores, const py::tuple& dprobs,
                      const py::object& mask, Address row_max, Address row_sum, Address dscores) {
  const attn_cuda_shape shape = shape_of(sizes, keys);
  const attn_cuda_rows input = rows_of(scores);
  const attn_cuda_rows cotangent = rows_of(dprobs);
  const attn_cuda_mask padding = mask_of(mask);
  check(Run(device, pointer<void>(stream), &shape, &input, &cotangent, mask.is_none() ? nullptr : &padding, pointer<const float>(row_max),
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
void define_kinds(py::module_& module);
#ifdef ATTN_CUDA_SM90
void define_sm90(py::module_& module);
#endif

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
  define_kinds(module);
#ifdef ATTN_CUDA_SM90
  module.attr("SM90") = true;
  define_sm90(module);
#else
  module.attr("SM90") = false;
#endif
}
