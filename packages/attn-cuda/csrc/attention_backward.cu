// Attention backward: the order of its kernels and their workspace.
#include "attention_backward.cuh"

namespace attn_cuda {
namespace {

Input upstream_input(const attn_cuda_attention& problem, const attn_cuda_attention_gradients& gradients) {
  return Input{gradients.dout, problem.heads, problem.queries, problem.value_dim};
}

int check_gradients(const attn_cuda_attention& problem, const attn_cuda_attention_gradients& gradients) {
  if (const int refusal = check_attention(problem)) return refusal;
  if (!is_dtype(gradients.dout.dtype)) return ATTN_CUDA_BAD_DTYPE;
  if (gradients.dsinks != nullptr && problem.sinks == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (gradients.dbias == nullptr) return 0;
  if (problem.bias == nullptr) return ATTN_CUDA_NULL_POINTER;
  const int64_t sizes[4] = {problem.batch, problem.heads, problem.queries, problem.keys};
  for (int axis = 0; axis < 4; ++axis)
    if (gradients.dbias_shape[axis] != 1 && gradients.dbias_shape[axis] != sizes[axis]) return ATTN_CUDA_BAD_SIZE;
  return 0;
}

// Everything that no block writes: keys that a mask drops, rows between packed segments, sums over nothing.
int fill_gradients(const attn_cuda_attention& problem, const attn_cuda_attention_gradients& gradients, void* stream) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int64_t outer = packed ? 1 : problem.batch, size = size_of(problem.q.dtype);
  const int64_t query_rows = outer * problem.heads * problem.queries, key_rows = outer * problem.kv_heads * problem.keys;
  if (gradients.dq != nullptr && packed)
    if (const int error = fill_bytes(gradients.dq, query_rows * problem.head_dim * size, stream)) return error;
  if (!packed && problem.key_mask == nullptr) return 0;
  if (gradients.dk != nullptr)
    if (const int error = fill_bytes(gradients.dk, key_rows * problem.head_dim * size, stream)) return error;
  if (gradients.dv != nullptr)
    if (const int error = fill_bytes(gradients.dv, key_rows * problem.value_dim * size, stream)) return error;
  return 0;
}

}  // namespace
}  // namespace attn_cuda

extern "C" int attn_cuda_attention_backward_workspace(int device, const attn_cuda_attention* problem,
                                                      const attn_cuda_attention_gradients* gradients, int64_t* bytes) {
  using namespace attn_cuda;
  if (problem == nullptr || gradients == nullptr || bytes == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check_gradients(*problem, *gradients)) return refusal;
  const int64_t rows = problem->heads * problem->queries * (problem->cu_seqlens_q == nullptr ? problem->batch : 1);
  Limits limits;
  if (const int error = find_limits(device, &limits)) return error;
  *bytes = input_bytes(*problem) + copy_bytes(*problem, upstream_input(*problem, *gradients)) + plan_bytes(*problem, 2) +
           2 * aligned(rows * 4) + aligned(problem->batch * problem->heads * 4) +
           (gradients->dq != nullptr ? query_sum_rows(limits, *problem).bytes : 0) +
           (gradients->dk != nullptr || gradients->dv != nullptr ? key_sum_keys(limits, *problem, gradients->dout.dtype).bytes : 0);
  return 0;
}

extern "C" int attn_cuda_attention_backward(int device, void* stream, const attn_cuda_attention* problem,
                                            const attn_cuda_attention_gradients* gradients, void* workspace) {
  using namespace attn_cuda;
  if (problem == nullptr || gradients == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = check_gradients(*problem, *gradients)) return refusal;
  const int64_t outer = problem->cu_seqlens_q == nullptr ? problem->batch : 1;
  const int64_t rows = problem->heads * problem->queries * outer;
  const bool needs_delta =
      gradients->dq != nullptr || gradients->dk != nullptr || gradients->dsinks != nullptr || gradients->dbias != nullptr;
  if (rows > 0 && (gradients->dout.data == nullptr || gradients->row_max == nullptr || gradients->row_sum == nullptr))
    return ATTN_CUDA_NULL_POINTER;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  Workspace space(workspace);
  BackwardInputs inputs{};
  if (const int error = prepare(device, stream, *problem, space, &inputs.problem)) return error;
  if (const int error = take_input(*problem, upstream_input(*problem, *gradients), space, stream, &inputs.dout)) return error;
  inputs.dlse = gradients->dlse;
  inputs.row_max = gradients->row_max;
  inputs.row_sum = gradients->row_sum;
  if (const int error = fill_gradients(*problem, *gradients, stream)) return error;

  Limits limits;
  if (const int error = find_limits(device, &limits)) return error;
  const RowsInWork in_work = query_sum_rows(limits, *problem);
  float* delta = needs_delta ? space.take<float>(rows) : nullptr;
  float* dsink = gradients->dsinks != nullptr ? space.take<float>(rows) : nullptr;
  Blocks blocks;
  if (needs_delta && rows > 0) {
    auto* held = gradients->dq == nullptr ? nullptr : reinterpret_cast<float*>(space.take<char>(in_work.bytes));
    if (const int error = plan_rows(*problem, inputs.problem, in_work.warps * kWarpRows, space, stream, &blocks)) return error;
    if (const int error = launch_query_sums(*problem, inputs, in_work, blocks, held, delta, dsink, gradients->dq, stream)) return error;
  }
  if ((gradients->dk != nullptr || gradients->dv != nullptr) && problem->keys * outer * problem->kv_heads > 0) {
    const RowsInWork keys = key_sum_keys(limits, *problem, gradients->dout.dtype);
    auto* held = reinterpret_cast<float*>(space.take<char>(keys.bytes));
    if (const int error = plan_keys(*problem, inputs.problem, keys.warps * kWarpRows, space, stream, &blocks)) return error;
    if (const int error = launch_key_sums(inputs, keys, blocks, held, delta, gradients->dk, gradients->dv, stream)) return error;
  }
  if (gradients->dsinks != nullptr && problem->heads > 0) {
    float* items = space.take<float>(problem->batch * problem->heads);
    if (const int error = launch_sinks(inputs.problem, dsink, items, gradients->dsinks, stream)) return error;
  }
  if (gradients->dbias == nullptr) return 0;
  return launch_bias_sums(limits, inputs, delta, gradients->dbias, gradients->dbias_shape, stream);
}
