// Backward pass of sm90-v1: checks, workspace and the order of its kernels.
#include "hopper/backward.h"

#include "attention_plan.cuh"
#include "hopper/backward.cuh"

namespace attn_cuda::hopper {
namespace {

// Under causality blocks differ in length, and the longest ones of many heads go first, which leaves little to the end; as many as still
// share what they read. Without it those of one head stay together.
constexpr int64_t kCausalSection = 32;
constexpr int64_t kMostQueries = int64_t{1} << 30;  // their distances from keys fit 32 bits

int64_t items_of(const attn_cuda_attention& problem) { return problem.cu_seqlens_q == nullptr ? problem.batch : 1; }

Input of_queries(const attn_cuda_attention& problem, const attn_cuda_array& array) {
  return Input{array, problem.heads, problem.queries, problem.head_dim};
}

Input of_keys(const attn_cuda_attention& problem, const attn_cuda_array& array) {
  return Input{array, problem.kv_heads, problem.keys, problem.head_dim};
}

// Whether a tensor map cannot describe an input that 16-byte accesses can read: one with an expanded axis.
bool is_expanded(const attn_cuda_attention& problem, const Input& input) {
  const int64_t sizes[4] = {items_of(problem), input.heads, input.rows, input.columns};
  const int64_t strides[3] = {input.array.strides[0], input.array.strides[1], input.array.strides[2]};
  return input.rows > 0 && copy_bytes(problem, input) == 0 && !can_map(input.array.data, sizes, strides, input.array.strides[3]);
}

int64_t expanded_bytes(const attn_cuda_attention& problem, const Input& input) {
  return is_expanded(problem, input) ? aligned(items_of(problem) * input.heads * input.rows * input.columns * 2) : 0;
}

int take_expanded(const attn_cuda_attention& problem, const Input& input, Workspace& space, void* stream, Array* array) {
  return is_expanded(problem, input) ? copy_input(problem, input, space, stream, array) : 0;
}

int64_t blocks_of(const attn_cuda_attention& problem, int64_t rows) {
  return problem.cu_seqlens_q == nullptr ? (rows + kBlock - 1) / kBlock : count_packed(rows, problem.batch);
}

int64_t places(const attn_cuda_attention& problem) {
  return blocks_of(problem, problem.queries) * kBlock * problem.heads * items_of(problem);
}

int check(const attn_cuda_attention& problem, const attn_cuda_sm90_gradients& gradients) {
  if (const int refusal = check_attention(problem)) return refusal;
  const int32_t dtype = problem.q.dtype;
  if (dtype == ATTN_CUDA_FLOAT32 || gradients.dout.dtype != dtype || gradients.out.dtype != dtype) return ATTN_CUDA_BAD_DTYPE;
  if (problem.head_dim != problem.value_dim || (problem.head_dim != 64 && problem.head_dim != 128)) return ATTN_CUDA_BAD_SIZE;
  if (problem.query_mask != nullptr || problem.bias != nullptr) return ATTN_CUDA_BAD_SIZE;
  if (problem.key_mask != nullptr && !may_have_hole(problem)) return ATTN_CUDA_BAD_SIZE;
  if (problem.queries > kMostQueries) return ATTN_CUDA_BAD_SIZE;
  if (gradients.dsinks != nullptr && problem.sinks == nullptr) return ATTN_CUDA_NULL_POINTER;
  const bool has_rows = problem.heads * problem.queries * items_of(problem) > 0;
  if (has_rows && (gradients.dout.data == nullptr || gradients.out.data == nullptr || gradients.lse == nullptr))
    return ATTN_CUDA_NULL_POINTER;
  return 0;
}

// What no block writes: rows between packed segments, and everything where there are no pairs.
int fill(const attn_cuda_attention& problem, const attn_cuda_sm90_gradients& gradients, bool pairs, void* stream) {
  if (pairs && problem.cu_seqlens_q == nullptr) return 0;
  const int64_t columns = items_of(problem) * problem.head_dim * 2;
  if (gradients.dq != nullptr)
    if (const int error = fill_bytes(gradients.dq, columns * problem.heads * problem.queries, stream)) return error;
  for (void* gradient : {gradients.dk, gradients.dv})
    if (gradient != nullptr)
      if (const int error = fill_bytes(gradient, columns * problem.kv_heads * problem.keys, stream)) return error;
  return 0;
}

}  // namespace
}  // namespace attn_cuda::hopper

extern "C" int attn_cuda_sm90_backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_sm90_gradients* gradients,
                                                 int64_t* bytes) {
  using namespace attn_cuda;
  if (problem == nullptr || gradients == nullptr || bytes == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = hopper::check(*problem, *gradients)) return refusal;
  const Input dout = hopper::of_queries(*problem, gradients->dout), out = hopper::of_queries(*problem, gradients->out);
  *bytes = input_bytes(hopper::with_all_keys(*problem)) + hopper::hole_bytes(*problem) + copy_bytes(*problem, dout) +
           copy_bytes(*problem, out) + hopper::expanded_bytes(*problem, hopper::of_queries(*problem, problem->q)) +
           hopper::expanded_bytes(*problem, hopper::of_keys(*problem, problem->k)) +
           hopper::expanded_bytes(*problem, hopper::of_keys(*problem, problem->v)) + hopper::expanded_bytes(*problem, dout) +
           2 * aligned(hopper::places(*problem) * 4) + aligned(problem->batch * problem->heads * 4);
  return 0;
}

extern "C" int attn_cuda_sm90_backward(int device, void* stream, const attn_cuda_attention* problem, float factor,
                                       const attn_cuda_sm90_gradients* gradients, void* workspace) {
  using namespace attn_cuda;
  if (problem == nullptr || gradients == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (const int refusal = hopper::check(*problem, *gradients)) return refusal;
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  const bool rows = problem->heads * problem->queries * hopper::items_of(*problem) > 0, pairs = rows && problem->keys > 0;
  if (const int error = hopper::fill(*problem, *gradients, pairs, stream)) return error;
  Workspace space(workspace);
  hopper::BackwardCall call{};
  if (const int error = prepare(device, stream, hopper::with_all_keys(*problem), space, &call.problem)) return error;
  if (const int error = hopper::find_holes(*problem, space, stream, &call.holes)) return error;
  const Input dout = hopper::of_queries(*problem, gradients->dout), out = hopper::of_queries(*problem, gradients->out);
  if (const int error = take_input(*problem, dout, space, stream, &call.dout)) return error;
  if (const int error = take_input(*problem, out, space, stream, &call.out)) return error;
  const std::pair<Input, Array*> mapped[] = {{hopper::of_queries(*problem, problem->q), &call.problem.q},
                                             {hopper::of_keys(*problem, problem->k), &call.problem.k},
                                             {hopper::of_keys(*problem, problem->v), &call.problem.v},
                                             {dout, &call.dout}};
  for (const auto& [input, array] : mapped)
    if (const int error = hopper::take_expanded(*problem, input, space, stream, array)) return error;
  const int64_t right = problem->window_right < 0 ? hopper::kUnbounded : problem->window_right;
  call.left = problem->window_left < 0 ? hopper::kUnbounded : problem->window_left;
  call.right = problem->causal != 0 && right > 0 ? 0 : right;
  call.query_blocks = hopper::blocks_of(*problem, problem->queries);
  call.key_blocks = hopper::blocks_of(*problem, problem->keys);
  call.section = call.right == 0 ? hopper::kCausalSection : 1;
  call.factor = factor;
  call.lse = gradients->lse;
  call.dlse = gradients->dlse;
  call.origin = space.take<float>(hopper::places(*problem));
  call.delta = space.take<float>(hopper::places(*problem));
  call.items = space.take<float>(problem->batch * problem->heads);
  call.dq = gradients->dq;
  call.dk = gradients->dk;
  call.dv = gradients->dv;
  call.dsinks = gradients->dsinks;
  if (rows)
    if (const int error = hopper::launch_row_values(call, stream)) return error;
  if (pairs && (call.dk != nullptr || call.dv != nullptr))
    if (const int error = hopper::launch_key_gradients(call, stream)) return error;
  if (pairs && call.dq != nullptr)
    if (const int error = hopper::launch_query_gradients(call, stream)) return error;
  return call.dsinks == nullptr ? 0 : hopper::launch_sink_gradients(call, stream);
}
