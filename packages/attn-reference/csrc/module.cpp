// attn_reference._host: the host kernels of ordered-v1, ordered-v2 and sm90-v1 over raw addresses and element strides. The GIL is released
// while they run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "attn/host/attention.h"
#include "attn/host/joint.h"
#include "attn/host/sm90.h"

namespace py = pybind11;
namespace host = attn::host;

namespace {

using Address = uintptr_t;

// (address, element strides over [B, H, S, D], dtype)
struct Array {
  Address address;
  host::Strides strides;
  host::DType dtype;

  host::Input input() const { return host::Input{reinterpret_cast<const void*>(address), strides}; }
  host::Output output() const { return host::Output{reinterpret_cast<void*>(address), strides}; }
};

host::Strides strides_of(const std::array<int64_t, 4>& strides) { return host::Strides{strides[0], strides[1], strides[2], strides[3]}; }

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

host::Variant variant_of(const std::string& name) {
  if (name == "automatic") return host::Variant::automatic;
  for (host::Variant variant : {host::Variant::baseline, host::Variant::avx2, host::Variant::avx512, host::Variant::neon})
    if (name == host::variant_name(variant)) {
      if (host::has_variant(variant)) return variant;
      throw py::value_error("host kernels: variant " + name + " was not compiled or this CPU does not run it");
    }
  throw py::value_error("host kernels: unknown variant " + name);
}

void check(const host::AttentionProblem& problem) {
  if (const char* reason = host::check_attention(problem)) throw py::value_error(std::string("attention: ") + reason);
}

host::AttentionProblem attention_problem(const std::array<int64_t, 7>& sizes, const Array& q, const Array& k, const Array& v,
                                         Address query_mask, Address key_mask, Address kv_lengths, Address q_start, Address k_start,
                                         Address cu_seqlens_q, Address cu_seqlens_k, Address seqlens_q, Address seqlens_k, Address sinks,
                                         Address bias, const std::array<int64_t, 4>& bias_strides, bool causal, int64_t window_left,
                                         int64_t window_right, double scale, double dropout_p, uint64_t dropout_seed) {
  host::AttentionProblem problem{};
  problem.batch = sizes[0];
  problem.heads = sizes[1];
  problem.kv_heads = sizes[2];
  problem.queries = sizes[3];
  problem.keys = sizes[4];
  problem.head_dim = sizes[5];
  problem.value_dim = sizes[6];
  problem.dtype = q.dtype;
  problem.q = q.input();
  problem.k = k.input();
  problem.v = v.input();
  problem.query_mask = pointer<const uint8_t>(query_mask);
  problem.key_mask = pointer<const uint8_t>(key_mask);
  problem.kv_lengths = pointer<const int64_t>(kv_lengths);
  problem.q_start = pointer<const int64_t>(q_start);
  problem.k_start = pointer<const int64_t>(k_start);
  problem.cu_seqlens_q = pointer<const int64_t>(cu_seqlens_q);
  problem.cu_seqlens_k = pointer<const int64_t>(cu_seqlens_k);
  problem.seqlens_q = pointer<const int64_t>(seqlens_q);
  problem.seqlens_k = pointer<const int64_t>(seqlens_k);
  problem.sinks = pointer<const float>(sinks);
  problem.bias = pointer<const float>(bias);
  problem.bias_strides = strides_of(bias_strides);
  problem.causal = causal;
  problem.window_left = window_left;
  problem.window_right = window_right;
  problem.scale = static_cast<float>(scale);
  problem.dropout_p = dropout_p;
  problem.dropout_seed = dropout_seed;
  return problem;
}

host::SoftmaxProblem softmax_problem(const std::array<int64_t, 4>& sizes, const Array& scores, Address mask) {
  return host::SoftmaxProblem{sizes[0], sizes[1], sizes[2], sizes[3], scores.dtype, scores.input(), pointer<const uint8_t>(mask)};
}

using ProductFunction = void (*)(const host::Product&, int, host::Variant);

void define_product(py::module_& module, const char* name, ProductFunction function) {
  module.def(
      name,
      [function](const std::array<int64_t, 6>& sizes, double scale, const Array& left, const Array& right, const Array& out, int threads,
                 const std::string& variant) {
        const host::Product product{sizes[0],     sizes[1],   sizes[2],      sizes[3],    sizes[4],     sizes[5], static_cast<float>(scale),
                                    left.input(), left.dtype, right.input(), right.dtype, out.output(), out.dtype};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        function(product, threads, chosen);
      },
      py::arg("sizes"), py::arg("scale"), py::arg("left"), py::arg("right"), py::arg("out"), py::arg("threads"), py::arg("variant"));
}

using SoftmaxForwardFunction = void (*)(const host::SoftmaxProblem&, const host::SoftmaxForward&, int, host::Variant);
using SoftmaxBackwardFunction = void (*)(const host::SoftmaxProblem&, const host::SoftmaxBackward&, int, host::Variant);

void define_softmax(py::module_& module, const char* forward_name, SoftmaxForwardFunction forward, const char* backward_name,
                    SoftmaxBackwardFunction backward) {
  module.def(
      forward_name,
      [forward](const std::array<int64_t, 4>& sizes, const Array& scores, Address mask, const Array& probs, Address row_max,
                Address row_sum, int threads, const std::string& variant) {
        const host::SoftmaxForward results{probs.output(), probs.dtype, pointer<float>(row_max), pointer<float>(row_sum)};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        forward(softmax_problem(sizes, scores, mask), results, threads, chosen);
      },
      py::arg("sizes"), py::arg("scores"), py::arg("mask"), py::arg("probs"), py::arg("row_max"), py::arg("row_sum"), py::arg("threads"),
      py::arg("variant"));
  module.def(
      backward_name,
      [backward](const std::array<int64_t, 4>& sizes, const Array& scores, Address mask, const Array& dprobs, Address row_max,
                 Address row_sum, const Array& dscores, int threads, const std::string& variant) {
        const host::SoftmaxBackward gradients{dprobs.input(), dprobs.dtype, pointer<const float>(row_max), pointer<const float>(row_sum),
                                              dscores.output()};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        backward(softmax_problem(sizes, scores, mask), gradients, threads, chosen);
      },
      py::arg("sizes"), py::arg("scores"), py::arg("mask"), py::arg("dprobs"), py::arg("row_max"), py::arg("row_sum"), py::arg("dscores"),
      py::arg("threads"), py::arg("variant"));
}

void define_attention(py::module_& module) {
  py::class_<host::AttentionProblem>(module, "AttentionProblem")
      .def(py::init(&attention_problem), py::kw_only(), py::arg("sizes"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("query_mask"),
           py::arg("key_mask"), py::arg("kv_lengths"), py::arg("q_start"), py::arg("k_start"), py::arg("cu_seqlens_q"),
           py::arg("cu_seqlens_k"), py::arg("seqlens_q"), py::arg("seqlens_k"), py::arg("sinks"), py::arg("bias"), py::arg("bias_strides"),
           py::arg("causal"), py::arg("window_left"), py::arg("window_right"), py::arg("scale"), py::arg("dropout_p"),
           py::arg("dropout_seed"));
  module.def(
      "attention_forward",
      [](const host::AttentionProblem& problem, const Array& out, Address lse, Address row_max, Address row_sum, int threads,
         const std::string& variant) {
        check(problem);
        const host::AttentionForward results{out.output(), out.dtype, pointer<float>(lse), pointer<float>(row_max),
                                             pointer<float>(row_sum)};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        host::attention_forward(problem, results, threads, chosen);
      },
      py::arg("problem"), py::arg("out"), py::arg("lse"), py::arg("row_max"), py::arg("row_sum"), py::arg("threads"), py::arg("variant"));
  module.def(
      "attention_backward",
      [](const host::AttentionProblem& problem, const Array& dout, Address dlse, Address row_max, Address row_sum, Address dq, Address dk,
         Address dv, Address dsinks, Address dbias, const std::array<int64_t, 4>& dbias_shape, int threads, const std::string& variant) {
        check(problem);
        host::AttentionBackward gradients{dout.input(),
                                          dout.dtype,
                                          pointer<const float>(dlse),
                                          pointer<const float>(row_max),
                                          pointer<const float>(row_sum),
                                          pointer<void>(dq),
                                          pointer<void>(dk),
                                          pointer<void>(dv),
                                          pointer<float>(dsinks),
                                          pointer<float>(dbias),
                                          {}};
        for (size_t axis = 0; axis < dbias_shape.size(); ++axis) gradients.dbias_shape[axis] = dbias_shape[axis];
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        host::attention_backward(problem, gradients, threads, chosen);
      },
      py::arg("problem"), py::arg("dout"), py::arg("dlse"), py::arg("row_max"), py::arg("row_sum"), py::arg("dq"), py::arg("dk"),
      py::arg("dv"), py::arg("dsinks"), py::arg("dbias"), py::arg("dbias_shape"), py::arg("threads"), py::arg("variant"));
}

void check_sm90(const host::AttentionProblem& problem) {
  check(problem);
  const bool widths = problem.head_dim == 64 || problem.head_dim == 128 || problem.head_dim == 256;
  if (!widths || problem.value_dim != problem.head_dim)
    throw py::value_error("attention: sm90-v1 takes head dims 64, 128 and 256, one for q, k, v");
  if (problem.dtype == host::DType::float32) throw py::value_error("attention: sm90-v1 takes bfloat16 and float16");
  if (problem.query_mask || problem.bias || problem.dropout_p > 0.0)
    throw py::value_error("attention: sm90-v1 takes no query mask, bias or dropout");
}

void define_sm90(py::module_& module) {
  module.def(
      "sm90_chain",
      [](const std::array<int64_t, 3>& sizes, host::DType dtype, Address a, Address b, Address c, int threads, const std::string& variant) {
        const host::Sm90Chain chain{sizes[0], sizes[1], sizes[2], dtype, pointer<void>(a), pointer<void>(b), pointer<float>(c)};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        host::sm90_chain(chain, threads, chosen);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("a"), py::arg("b"), py::arg("c"), py::arg("threads"), py::arg("variant"));
  module.def(
      "sm90_forward",
      [](const host::AttentionProblem& problem, double factor, Address table, const Array& out, Address lse, Address n, Address l,
         Address o, int threads, const std::string& variant) {
        check_sm90(problem);
        const host::Sm90Options options{static_cast<float>(factor), pointer<const float>(table)};
        const host::Sm90Forward results{out.output(), pointer<float>(lse), pointer<float>(n), pointer<float>(l), pointer<float>(o)};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        host::sm90_forward(problem, options, results, threads, chosen);
      },
      py::arg("problem"), py::arg("factor"), py::arg("table"), py::arg("out"), py::arg("lse"), py::arg("n"), py::arg("l"), py::arg("o"),
      py::arg("threads"), py::arg("variant"));
  module.def(
      "sm90_backward",
      [](const host::AttentionProblem& problem, double factor, Address table, const Array& dout, const Array& out, Address lse,
         Address dlse, Address dq, Address dk, Address dv, Address dsinks, int threads, const std::string& variant) {
        check_sm90(problem);
        const host::Sm90Options options{static_cast<float>(factor), pointer<const float>(table)};
        const host::Sm90Backward gradients{dout.input(),      out.input(),       pointer<const float>(lse), pointer<const float>(dlse),
                                           pointer<void>(dq), pointer<void>(dk), pointer<void>(dv),         pointer<float>(dsinks)};
        const host::Variant chosen = variant_of(variant);
        const py::gil_scoped_release release;
        host::sm90_backward(problem, options, gradients, threads, chosen);
      },
      py::arg("problem"), py::arg("factor"), py::arg("table"), py::arg("dout"), py::arg("out"), py::arg("lse"), py::arg("dlse"),
      py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("dsinks"), py::arg("threads"), py::arg("variant"));
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "Host kernels of ordered-v1, ordered-v2 and sm90-v1 over raw addresses.";
  py::enum_<host::DType>(module, "DType")
      .value("float32", host::DType::float32)
      .value("bfloat16", host::DType::bfloat16)
      .value("float16", host::DType::float16);
  py::class_<Array>(module, "Array")
      .def(py::init([](Address address, const std::array<int64_t, 4>& strides, host::DType dtype) {
             return Array{address, strides_of(strides), dtype};
           }),
           py::arg("address"), py::arg("strides"), py::arg("dtype"));
  module.def("fingerprint", [] { return std::string(host::build_fingerprint()); });
  module.def("variants", [] {
    std::vector<std::string> names;
    for (host::Variant variant : {host::Variant::baseline, host::Variant::avx2, host::Variant::avx512, host::Variant::neon})
      if (host::has_variant(variant)) names.emplace_back(host::variant_name(variant));
    return names;
  });
  module.def("best_variant", [] { return std::string(host::variant_name(host::best_variant())); });
  define_softmax(module, "softmax_forward", host::softmax_forward, "softmax_backward", host::softmax_backward);
  define_softmax(module, "softmax_v2_forward", host::softmax_v2_forward, "softmax_v2_backward", host::softmax_v2_backward);
  define_product(module, "product_over_width", host::product_over_width);
  define_product(module, "product_over_keys", host::product_over_keys);
  define_product(module, "product_over_queries", host::product_over_queries);
  define_attention(module);
  define_sm90(module);
}
