#include "engine.h"

#include <thread>

namespace attn::engine {

int worker_threads() {
  const unsigned found = std::thread::hardware_concurrency();
  return found == 0 ? 1 : static_cast<int>(found);
}

host::Strides strides_of(const Strides& strides) { return {strides.batch, strides.head, strides.row, strides.column}; }

namespace {

host::DType dtype_of(DType dtype) { return static_cast<host::DType>(dtype); }

}  // namespace

host::AttentionProblem host_problem(const Config& config, const Tensors& tensors) {
  host::AttentionProblem problem{};
  problem.batch = config.batch;
  problem.heads = config.heads;
  problem.kv_heads = config.kv_heads;
  problem.queries = config.queries;
  problem.keys = config.keys;
  problem.head_dim = config.head_dim;
  problem.value_dim = config.value_dim;
  problem.dtype = dtype_of(config.dtype);
  problem.q = {tensors.q, strides_of(config.q)};
  problem.k = {tensors.k, strides_of(config.k)};
  problem.v = {tensors.v, strides_of(config.v)};
  problem.key_mask = tensors.key_padding_mask;
  problem.kv_lengths = tensors.kv_lengths;
  problem.q_start = tensors.q_start;
  problem.k_start = tensors.k_start;
  problem.cu_seqlens_q = tensors.cu_seqlens_q;
  problem.cu_seqlens_k = tensors.cu_seqlens_k;
  problem.seqlens_q = tensors.seqlens_q;
  problem.seqlens_k = tensors.seqlens_k;
  problem.sinks = has_sinks(config) ? tensors.sinks : nullptr;
  if (has_bias(config)) {
    problem.bias = static_cast<const float*>(tensors.bias);
    problem.bias_strides = strides_of(bias_strides(config));
  }
  problem.causal = config.causal != 0;
  problem.window_left = config.window_left;
  problem.window_right = config.window_right;
  problem.scale = static_cast<float>(config.scale);
  problem.dropout_p = config.dropout_p;
  if (has_dropout(config)) {
    problem.dropout_seed = static_cast<uint64_t>(tensors.dropout_seed[1]) << 32 | tensors.dropout_seed[0];
    problem.dropout_item = tensors.dropout_seed[2];
    problem.dropout_head = tensors.dropout_seed[3];
  }
  if (const char* message = host::check_attention(problem)) throw InvalidCall(message);
  return problem;
}

std::string HostEngine::refuse(const Config& config, Pass) const {
  Reasons reasons;
  reasons.add(config.alignment == Alignment::top_left, "top-left alignment without q_start (supported: q_start)");
  reasons.add(config.packed != 0 && has_bias(config), "a bias of packed input");
  return reasons.text();
}

void HostEngine::run_forward(const Config& config, const Tensors& tensors, const Workspace&, void*) const {
  host::AttentionForward forward{};
  forward.out = {tensors.out, strides_of(config.out)};
  forward.out_dtype = dtype_of(config.out_dtype);
  forward.lse = tensors.lse;
  forward.row_max = tensors.row_max;
  forward.row_sum = tensors.row_sum;
  host::attention_forward(host_problem(config, tensors), forward, worker_threads());
}

void HostEngine::run_backward(const Config& config, const Tensors& tensors, const Workspace&, void*) const {
  host::AttentionBackward backward{};
  backward.dout = {tensors.dout, strides_of(config.out)};
  backward.dout_dtype = dtype_of(config.out_dtype);
  backward.dlse = tensors.dlse;
  backward.row_max = tensors.row_max;
  backward.row_sum = tensors.row_sum;
  backward.dq = tensors.dq;
  backward.dk = tensors.dk;
  backward.dv = tensors.dv;
  backward.dsinks = tensors.dsinks;
  backward.dbias = tensors.dbias;
  for (int axis = 0; axis < 4; ++axis) backward.dbias_shape[axis] = config.bias_shape[axis];
  host::attention_backward(host_problem(config, tensors), backward, worker_threads());
}

}  // namespace attn::engine
