// A table of attn-cuda that records what it is given and computes with the host kernels, on pointers to host memory.
#include "attn_cuda.h"

#include <cstring>

namespace fakes {

attn::host::Input input_of(const attn_cuda_array& array) {
  return {array.data, {array.strides[0], array.strides[1], array.strides[2], array.strides[3]}};
}

attn::host::AttentionProblem problem_of(const attn_cuda_attention& from) {
  attn::host::AttentionProblem problem{};
  problem.batch = from.batch;
  problem.heads = from.heads;
  problem.kv_heads = from.kv_heads;
  problem.queries = from.queries;
  problem.keys = from.keys;
  problem.head_dim = from.head_dim;
  problem.value_dim = from.value_dim;
  problem.dtype = static_cast<attn::host::DType>(from.q.dtype);
  problem.q = input_of(from.q);
  problem.k = input_of(from.k);
  problem.v = input_of(from.v);
  problem.query_mask = from.query_mask;
  problem.key_mask = from.key_mask;
  problem.kv_lengths = from.kv_lengths;
  problem.q_start = from.q_start;
  problem.k_start = from.k_start;
  problem.cu_seqlens_q = from.cu_seqlens_q;
  problem.cu_seqlens_k = from.cu_seqlens_k;
  problem.seqlens_q = from.seqlens_q;
  problem.seqlens_k = from.seqlens_k;
  problem.sinks = from.sinks;
  problem.bias = from.bias;
  problem.bias_strides = {from.bias_strides[0], from.bias_strides[1], from.bias_strides[2], from.bias_strides[3]};
  problem.causal = from.causal != 0;
  problem.window_left = from.window_left;
  problem.window_right = from.window_right;
  problem.scale = from.scale;
  return problem;
}

void record(Line& line, int device, void* stream, const attn_cuda_attention& problem) {
  line("device", device)("stream", reinterpret_cast<uintptr_t>(stream));
  line("batch", problem.batch)("heads", problem.heads)("kv_heads", problem.kv_heads)("queries", problem.queries)("keys", problem.keys);
  line("head_dim", problem.head_dim)("value_dim", problem.value_dim)("dtype", problem.q.dtype);
  line("q_row", problem.q.strides[2])("k_head", problem.k.strides[1])("v_batch", problem.v.strides[0])("v_column", problem.v.strides[3]);
  line("mask", problem.key_mask != nullptr)("lengths", problem.kv_lengths != nullptr)("q_start", problem.q_start != nullptr);
  line("k_start", problem.k_start != nullptr)("sinks", problem.sinks != nullptr)("bias", problem.bias != nullptr);
  line("bias_strides", problem.bias_strides[0])("", problem.bias_strides[1])("", problem.bias_strides[2])("", problem.bias_strides[3]);
  line("packed", problem.cu_seqlens_q != nullptr)("causal", problem.causal);
  line("left", problem.window_left)("right", problem.window_right)("scale", problem.scale);
}

int failing_code = 0;

}  // namespace fakes

namespace {

using namespace fakes;

uint32_t failing_probe = 0;
int64_t more_workspace = 0;

int64_t bytes_of(const attn_cuda_attention& problem) { return problem.batch * 3 + 1000 + more_workspace; }

const char* text_fingerprint() { return "fake"; }
const char* text_architectures() { return "90a-real"; }
const char* text_message(int code) { return code < 0 ? "refused by the fake" : "a CUDA error of the fake"; }
const char* text_probe_names() { return "subnormals,division,contraction"; }

int probe(int, uint32_t* failed) {
  *failed = failing_probe;
  return failing_code;
}

int forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes) {
  *bytes = bytes_of(*problem) + device;
  return failing_code;
}

int backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_attention_gradients* gradients, int64_t* bytes) {
  *bytes = 2 * bytes_of(*problem) + device + (gradients->dq != nullptr ? 64 : 0);
  return failing_code;
}

int forward(int device, void* stream, const attn_cuda_attention* problem, const attn_cuda_attention_results* results, void* workspace) {
  {
    Line line("forward");
    record(line, device, stream, *problem);
    line("out_dtype", results->out_dtype)("workspace", workspace != nullptr);
  }
  if (failing_code != 0) return failing_code;
  std::memset(workspace, 0xA5, static_cast<size_t>(bytes_of(*problem) + device));
  const bool packed = problem->cu_seqlens_q != nullptr;
  const int64_t row = packed ? problem->heads * problem->value_dim : problem->value_dim;
  const int64_t head = packed ? problem->value_dim : problem->queries * row;
  attn::host::attention_forward(problem_of(*problem),
                                {{results->out, {packed ? 0 : problem->heads * head, head, row, 1}},
                                 static_cast<attn::host::DType>(results->out_dtype),
                                 results->lse,
                                 results->row_max,
                                 results->row_sum},
                                1);
  return 0;
}

int backward(int device, void* stream, const attn_cuda_attention* problem, const attn_cuda_attention_gradients* gradients,
             void* workspace) {
  {
    Line line("backward");
    record(line, device, stream, *problem);
    line("dout_dtype", gradients->dout.dtype)("dlse", gradients->dlse != nullptr)("dq", gradients->dq != nullptr);
    line("dk", gradients->dk != nullptr)("dv", gradients->dv != nullptr)("dsinks", gradients->dsinks != nullptr);
    line("dbias", gradients->dbias != nullptr)("dbias_shape", gradients->dbias_shape[0])("", gradients->dbias_shape[1]);
  }
  if (failing_code != 0) return failing_code;
  std::memset(workspace, 0xA5, static_cast<size_t>(2 * bytes_of(*problem) + device + (gradients->dq != nullptr ? 64 : 0)));
  attn::host::AttentionBackward to{};
  to.dout = input_of(gradients->dout);
  to.dout_dtype = static_cast<attn::host::DType>(gradients->dout.dtype);
  to.dlse = gradients->dlse;
  to.row_max = gradients->row_max;
  to.row_sum = gradients->row_sum;
  to.dq = gradients->dq;
  to.dk = gradients->dk;
  to.dv = gradients->dv;
  to.dsinks = gradients->dsinks;
  to.dbias = gradients->dbias;
  for (int axis = 0; axis < 4; ++axis) to.dbias_shape[axis] = gradients->dbias_shape[axis];
  attn::host::attention_backward(problem_of(*problem), to, 1);
  return 0;
}

attn_cuda_interface table_of(int64_t version, int64_t attention_bytes) {
  return {version,
          attention_bytes,
          sizeof(attn_cuda_attention_results),
          sizeof(attn_cuda_attention_gradients),
          text_fingerprint,
          text_architectures,
          text_message,
          probe,
          text_probe_names,
          forward_workspace,
          backward_workspace,
          forward,
          backward};
}

}  // namespace

extern "C" const attn_cuda_interface* attn_cuda_interface_v1() {
  static const attn_cuda_interface table = table_of(ATTN_CUDA_INTERFACE_VERSION, sizeof(attn_cuda_attention));
  return &table;
}

extern "C" const attn_cuda_interface* fake_table_of_version(int64_t version) {
  static attn_cuda_interface table;
  table = table_of(version, sizeof(attn_cuda_attention));
  return &table;
}

extern "C" const attn_cuda_interface* fake_table_of_size(int64_t bytes) {
  static attn_cuda_interface table;
  table = table_of(ATTN_CUDA_INTERFACE_VERSION, bytes);
  return &table;
}

extern "C" void fake_cuda_set(int code, uint32_t probe_bits, int64_t workspace) {
  failing_code = code;
  failing_probe = probe_bits;
  more_workspace = workspace;
}
