// XLA FFI handlers of the host engine: named buffers in, the host kernels of contract ordered-v1, an XLA error out. CPU only.
#include <exception>
#include <thread>

#include "problem.h"

namespace attn::xla_host {
namespace {

int worker_threads() {
  const unsigned found = std::thread::hardware_concurrency();
  return found == 0 ? 1 : static_cast<int>(found);
}

// No exception may cross into XLA.
template <typename Function>
ffi::Error guarded(Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return ffi::Error::InvalidArgument(std::string("attn_jax_rocm_sink: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("attn_jax_rocm_sink: ") + error.what());
  }
}

float* rows(const Buffers& buffers, std::string_view name, const Call& call) {
  const ffi::AnyBuffer& buffer = buffers.at(name);
  require_type(name, buffer, ffi::F32);
  require_shape(name, buffer, call.row_shape());
  return static_cast<float*>(data_of(buffer));
}

// Dense gradients have the shape and dtype of their input; null when not asked for.
void* gradient(const Buffers& results, std::string_view name, const ffi::AnyBuffer& input) {
  const ffi::AnyBuffer* buffer = results.find(name);
  if (buffer == nullptr) return nullptr;
  require_type(name, *buffer, input.element_type());
  require_shape(name, *buffer, {input.dimensions().begin(), input.dimensions().end()});
  return data_of(*buffer);
}

ffi::Error forward(ffi::RemainingArgs arguments, ffi::RemainingRets returns, std::string_view operand_names, std::string_view result_names,
                   bool causal, int64_t window_left, int64_t window_right, float scale, double dropout_p) {
  return guarded([&] {
    const Buffers operands = name_buffers(operand_names, arguments);
    const Buffers results = name_buffers(result_names, returns);
    const Call call(operands, {causal, window_left, window_right, scale, dropout_p});
    const ffi::AnyBuffer& out = results.at("out");
    require_shape("out", out, call.out_shape());
    const host::AttentionProblem& problem = call.problem;
    host::AttentionForward forward{};
    forward.out = {data_of(out), Call::dense(problem.heads, problem.queries, problem.value_dim)};
    forward.out_dtype = float_type("out", out);
    forward.lse = rows(results, "lse", call);
    forward.row_max = rows(results, "row_max", call);
    forward.row_sum = rows(results, "row_sum", call);
    host::attention_forward(problem, forward, worker_threads());
  });
}

ffi::Error backward(ffi::RemainingArgs arguments, ffi::RemainingRets returns, std::string_view operand_names, std::string_view result_names,
                    bool causal, int64_t window_left, int64_t window_right, float scale, double dropout_p) {
  return guarded([&] {
    const Buffers operands = name_buffers(operand_names, arguments);
    const Buffers results = name_buffers(result_names, returns);
    const Call call(operands, {causal, window_left, window_right, scale, dropout_p});
    const host::AttentionProblem& problem = call.problem;
    const ffi::AnyBuffer& dout = operands.at("dout");
    require_shape("dout", dout, call.out_shape());
    host::AttentionBackward backward{};
    backward.dout = {data_of(dout), Call::dense(problem.heads, problem.queries, problem.value_dim)};
    backward.dout_dtype = float_type("dout", dout);
    if (operands.find("dlse") != nullptr) backward.dlse = rows(operands, "dlse", call);
    backward.row_max = rows(operands, "row_max", call);
    backward.row_sum = rows(operands, "row_sum", call);
    backward.dq = gradient(results, "dq", operands.at("q"));
    backward.dk = gradient(results, "dk", operands.at("k"));
    backward.dv = gradient(results, "dv", operands.at("v"));
    FloatResult dsinks, dbias;
    if (const ffi::AnyBuffer* buffer = results.find("dsinks")) {
      gradient(results, "dsinks", operands.at("sinks"));
      dsinks = FloatResult("dsinks", *buffer);
      backward.dsinks = dsinks.data();
    }
    if (const ffi::AnyBuffer* buffer = results.find("dbias")) {
      gradient(results, "dbias", operands.at("bias"));
      dbias = FloatResult("dbias", *buffer);
      backward.dbias = dbias.data();
      for (int axis = 0; axis < 4; ++axis) backward.dbias_shape[axis] = buffer->dimensions()[axis];
    }
    host::attention_backward(problem, backward, worker_threads());
    dsinks.store();
    dbias.store();
  });
}

}  // namespace
}  // namespace attn::xla_host

#define ATTN_BINDING                      \
  ::xla::ffi::Ffi::Bind()                 \
      .RemainingArgs()                    \
      .RemainingRets()                    \
      .Attr<std::string_view>("operands") \
      .Attr<std::string_view>("results")  \
      .Attr<bool>("causal")               \
      .Attr<int64_t>("window_left")       \
      .Attr<int64_t>("window_right")      \
      .Attr<float>("scale")               \
      .Attr<double>("dropout_p")

XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_attention_forward, attn::xla_host::forward, ATTN_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_attention_backward, attn::xla_host::backward, ATTN_BINDING);
