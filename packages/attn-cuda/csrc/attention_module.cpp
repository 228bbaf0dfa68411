// Python face of attention.h, in the manner of module.cpp, with the values of attention_values.h.
#include "attention.h"
#include "attention_values.h"

namespace {

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
