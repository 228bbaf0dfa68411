// Python face of attention.h, in the manner of module.cpp, with the values of attention_values.h.
#include <vector>

#include "attention.h"
#include "attention_values.h"

namespace {

constexpr int64_t kInputs = 14;

// Addresses of q, k, v; the optional pointers; the bias.
void set_addresses(const Address (&of)[kInputs], attn_cuda_attention* problem) {
  problem->q.data = pointer<const void>(of[0]);
  problem->k.data = pointer<const void>(of[1]);
  problem->v.data = pointer<const void>(of[2]);
  problem->query_mask = pointer<const uint8_t>(of[3]);
  problem->key_mask = pointer<const uint8_t>(of[4]);
  problem->kv_lengths = pointer<const int64_t>(of[5]);
  problem->q_start = pointer<const int64_t>(of[6]);
  problem->k_start = pointer<const int64_t>(of[7]);
  problem->cu_seqlens_q = pointer<const int64_t>(of[8]);
  problem->cu_seqlens_k = pointer<const int64_t>(of[9]);
  problem->seqlens_q = pointer<const int64_t>(of[10]);
  problem->seqlens_k = pointer<const int64_t>(of[11]);
  problem->sinks = pointer<const float>(of[12]);
  problem->bias = pointer<const float>(of[13]);
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

// The forward of one kind of calls, read once. `order` tells the place of each given input among all.
class Forward {
 public:
  Forward(int device, const py::tuple& values, float scale, int out_dtype, const py::tuple& order)
      : device_(device), out_dtype_(out_dtype), problem_(attention(values, scale)) {
    for (Members from(order.ptr()); !from.ended();) {
      places_.push_back(from.integer());
      if (places_.back() < 0 || places_.back() >= kInputs) throw std::runtime_error("attn_cuda: attention has no such input");
    }
  }

  // Addresses of the given inputs; of out and of the first of LSE, row max and row sum.
  void run(Address stream, const py::list& inputs, const py::list& results, Address workspace) const {
    attn_cuda_attention problem = problem_;
    Address addresses[kInputs] = {};
    Members given(inputs.ptr());
    for (const int64_t place : places_) addresses[place] = given.integer();
    given.end();
    set_addresses(addresses, &problem);
    attn_cuda_attention_results to{};
    Members wanted(results.ptr());
    to.out = wanted.pointer<void>();
    to.out_dtype = out_dtype_;
    for (float** row : {&to.lse, &to.row_max, &to.row_sum})
      if (!wanted.ended()) *row = wanted.pointer<float>();
    wanted.end();
    check(attn_cuda_attention_forward(device_, pointer<void>(stream), &problem, &to, pointer<void>(workspace)),
          "attn_cuda_attention_forward");
  }

 private:
  int device_;
  int32_t out_dtype_;
  attn_cuda_attention problem_;
  std::vector<int64_t> places_;
};

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

// A product of one kind of calls, read once.
class Product {
 public:
  // Kind; heads of the keys; left, right, out.
  Product(int device, const py::tuple& values, float scale) : device_(device), product_{} {
    Members from(values.ptr());
    product_.kind = static_cast<int32_t>(from.integer());
    product_.kv_heads = from.integer();
    const Tensor left = tensor_of(from.next()), right = tensor_of(from.next()), out = tensor_of(from.next());
    from.end();
    product_.left = left.array, product_.right = right.array;
    product_.batch = left.sizes[0], product_.heads = left.sizes[1], product_.queries = left.sizes[2];
    product_.keys = product_.kind == ATTN_CUDA_OVER_WIDTH ? right.sizes[2] : left.sizes[3];
    product_.width = right.sizes[3];
    product_.out_dtype = out.array.dtype;
    product_.scale = scale;
  }

  void run(Address stream, Address left, Address right, Address out) const {
    attn_cuda_product product = product_;
    product.left.data = pointer<const void>(left);
    product.right.data = pointer<const void>(right);
    product.out = pointer<void>(out);
    check(attn_cuda_product_run(device_, pointer<void>(stream), &product), "attn_cuda_product_run");
  }

 private:
  int device_;
  attn_cuda_product product_;
};

}  // namespace

void define_attention(py::module_& module) {
  module.attr("OVER_WIDTH") = static_cast<int>(ATTN_CUDA_OVER_WIDTH);
  module.attr("OVER_KEYS") = static_cast<int>(ATTN_CUDA_OVER_KEYS);
  module.attr("OVER_QUERIES") = static_cast<int>(ATTN_CUDA_OVER_QUERIES);
  py::class_<Product>(module, "Product").def(py::init<int, const py::tuple&, float>()).def("run", &Product::run);
  module.def("attention_forward_workspace", &forward_workspace);
  py::class_<Forward>(module, "AttentionForward")
      .def(py::init<int, const py::tuple&, float, int, const py::tuple&>())
      .def("run", &Forward::run);
  module.def("attention_backward_workspace", &backward_workspace);
  module.def("attention_backward", &backward);
}
