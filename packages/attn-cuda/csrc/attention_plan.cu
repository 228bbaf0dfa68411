#include "attention_plan.cuh"

namespace attn_cuda {
namespace {

constexpr int kFillThreads = 256;
constexpr int64_t kCopyBlocks = 65536;

struct PlanArguments {
  Attention problem;
  int32_t size;
  bool of_keys;
  int64_t* plan;
};

// plan[b] = blocks before segment b, by one warp.
__global__ void __launch_bounds__(kLanes) plan_kernel(const __grid_constant__ PlanArguments arguments) {
  const Attention& problem = arguments.problem;
  const int lane = static_cast<int>(threadIdx.x);
  int64_t before = 0;
  for (int64_t base = 0; base < problem.batch; base += kLanes) {
    const int64_t batch = base + lane;
    int64_t blocks = 0;
    if (batch < problem.batch) {
      const int64_t count =
          arguments.of_keys
              ? segment_length(problem.cu_seqlens_k, problem.seqlens_k, batch, problem.keys)
              : problem.group * static_cast<int64_t>(segment_length(problem.cu_seqlens_q, problem.seqlens_q, batch, problem.queries));
      blocks = (count + arguments.size - 1) / arguments.size;
    }
    int64_t through = blocks;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(kAllLanes, through, distance);
      if (lane >= distance) through += earlier;
    }
    if (batch < problem.batch) arguments.plan[batch] = before + through - blocks;
    before += __shfl_sync(kAllLanes, through, kLanes - 1);
  }
  if (lane == 0) arguments.plan[problem.batch] = before;
}

struct EmptyRows {
  float* lse;
  float* row_max;  // null: LSE alone
  float* row_sum;
  int64_t rows;
};

__global__ void __launch_bounds__(kFillThreads) empty_rows_kernel(const __grid_constant__ EmptyRows arguments) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (row >= arguments.rows) return;
  arguments.lse[row] = attn::negative_infinity();
  if (arguments.row_max == nullptr) return;
  arguments.row_max[row] = attn::negative_infinity();
  arguments.row_sum[row] = 0.0f;
}

// Copy of an input: rows of `columns` elements, zero from `used` on, with the axes batch, head, row.
struct CopyArguments {
  Array from;
  int64_t count, heads, rows;
  int32_t used;
  void* to;
};

__global__ void __launch_bounds__(kFillThreads) copy_kernel(const __grid_constant__ CopyArguments arguments) {
  const Array& from = arguments.from;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFillThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x; index < arguments.count; index += step) {
    const int64_t row = index / from.columns;
    const auto column = static_cast<int32_t>(index - row * from.columns);
    const int64_t outer = row / arguments.rows, inner = row - outer * arguments.rows;
    const int64_t batch = outer / arguments.heads, head = outer - batch * arguments.heads;
    const int64_t offset = batch * from.batch + head * from.head + inner * from.row + column * from.column;
    const bool used = column < arguments.used;
    if (from.dtype == ATTN_CUDA_FLOAT32) {
      static_cast<uint32_t*>(arguments.to)[index] = used ? static_cast<const uint32_t*>(from.data)[offset] : 0u;
    } else {
      static_cast<uint16_t*>(arguments.to)[index] = used ? static_cast<const uint16_t*>(from.data)[offset] : static_cast<uint16_t>(0);
    }
  }
}

Input query_input(const attn_cuda_attention& problem) { return Input{problem.q, problem.heads, problem.queries, problem.head_dim}; }
Input key_input(const attn_cuda_attention& problem) { return Input{problem.k, problem.kv_heads, problem.keys, problem.head_dim}; }
Input value_input(const attn_cuda_attention& problem) { return Input{problem.v, problem.kv_heads, problem.keys, problem.value_dim}; }

int64_t outer_size(const attn_cuda_attention& problem) { return problem.cu_seqlens_q == nullptr ? problem.batch : 1; }

// Slots and the tile after the last one fit 32 bits.
bool in_range(int64_t size) { return size >= 0 && size < INT32_MAX - 4 * attn::kTile; }

int plan_blocks(const attn_cuda_attention& problem, const Attention& attention, int size, bool of_keys, Workspace& space, void* stream,
                Blocks* blocks) {
  *blocks = Blocks{count_blocks(problem, size, of_keys), 0, nullptr};
  if (blocks->count >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  if (problem.cu_seqlens_q == nullptr) {
    blocks->per_item = problem.batch == 0 ? 0 : blocks->count / (problem.batch * problem.kv_heads);
    return 0;
  }
  int64_t* plan = space.take<int64_t>(problem.batch + 1);
  blocks->plan = plan;
  return launch(plan_kernel, PlanArguments{attention, size, of_keys, plan}, 1, Block{kLanes, 1, true, false, 0}, stream);
}

}  // namespace

int find_limits(int device, Limits* limits) {
  const cudaError_t error = cudaDeviceGetAttribute(&limits->processors, cudaDevAttrMultiProcessorCount, device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

int check_attention(const attn_cuda_attention& problem) {
  if (!is_dtype(problem.q.dtype) || problem.k.dtype != problem.q.dtype || problem.v.dtype != problem.q.dtype) return ATTN_CUDA_BAD_DTYPE;
  for (const int64_t size : {problem.batch, problem.heads, problem.queries, problem.keys})
    if (!in_range(size)) return ATTN_CUDA_BAD_SIZE;
  for (const int64_t size : {problem.head_dim, problem.value_dim})
    if (size < 1 || size > 256) return ATTN_CUDA_BAD_SIZE;
  if (problem.kv_heads < 1 || problem.heads % problem.kv_heads != 0) return ATTN_CUDA_BAD_SIZE;
  const bool has_rows = problem.queries > 0 && (problem.batch > 0 || problem.cu_seqlens_q != nullptr);
  if (has_rows && problem.q.data == nullptr) return ATTN_CUDA_NULL_POINTER;
  if (problem.keys > 0 && has_rows && (problem.k.data == nullptr || problem.v.data == nullptr)) return ATTN_CUDA_NULL_POINTER;
  if ((problem.cu_seqlens_q == nullptr) != (problem.cu_seqlens_k == nullptr)) return ATTN_CUDA_NULL_POINTER;
  return 0;
}

int64_t count_blocks(const attn_cuda_attention& problem, int size, bool of_keys) {
  const int64_t total = of_keys ? problem.keys : problem.queries * (problem.heads / problem.kv_heads);
  if (problem.cu_seqlens_q != nullptr) return (total / size + problem.batch) * problem.kv_heads;
  return (total + size - 1) / size * problem.batch * problem.kv_heads;
}

RowsInWork rows_in_work(const Limits& limits, const attn_cuda_attention& problem, int warps, size_t shared_bytes, int most_blocks,
                        int64_t warp_tile) {
  constexpr int64_t kMostBytes = int64_t{512} << 20;
  const int rows = warps * kWarpRows;
  const int64_t resident = limits.processors * blocks_that_fit(limits, shared_bytes, most_blocks);
  const int64_t blocks = count_blocks(problem, rows, false);
  RowsInWork in_work{warps, resident < blocks ? resident : blocks, 0, 0};
  // Slots that a block sees at most: behind a window that is closed on both sides, unless its rows are of several heads.
  int64_t slots = problem.keys;
  const int64_t right = problem.causal != 0 ? 0 : problem.window_right;
  const bool one_head = problem.cu_seqlens_q == nullptr && (problem.queries % rows == 0 || problem.heads == problem.kv_heads);
  if (problem.window_left >= 0 && right >= 0 && one_head) slots = clamped(problem.window_left + right + rows, 0, slots);
  const int64_t tiles = (slots + 2 * attn::kTile - 1) / attn::kTile;  // wherever the first one lies in its tile
  const int64_t tile_bytes = in_work.count * warps * warp_tile * static_cast<int64_t>(sizeof(float));
  in_work.held_tiles = tile_bytes == 0 ? 1 : clamped(kMostBytes / tile_bytes - 1, 1, tiles);
  in_work.bytes = aligned(tile_bytes * (in_work.held_tiles + 1));
  return in_work;
}

int64_t copy_bytes(const attn_cuda_attention& problem, const Input& input) {
  if (array_of(input.array, input.columns).vectors) return 0;
  const int64_t columns = (input.columns + 7) / 8 * 8;
  return aligned(outer_size(problem) * input.heads * input.rows * columns * size_of(input.array.dtype));
}

int take_input(const attn_cuda_attention& problem, const Input& input, Workspace& space, void* stream, Array* array) {
  *array = array_of(input.array, input.columns);
  if (problem.cu_seqlens_q != nullptr) array->batch = 0;
  return array->vectors ? 0 : copy_input(problem, input, space, stream, array);
}

int copy_input(const attn_cuda_attention& problem, const Input& input, Workspace& space, void* stream, Array* array) {
  *array = array_of(input.array, input.columns);
  const bool packed = problem.cu_seqlens_q != nullptr;
  if (packed) array->batch = 0;
  const int64_t columns = (input.columns + 7) / 8 * 8;
  const int64_t count = outer_size(problem) * input.heads * input.rows * columns;
  void* copy = space.take<char>(count * size_of(input.array.dtype));
  CopyArguments arguments{*array, count, input.heads, input.rows, static_cast<int32_t>(input.columns), copy};
  arguments.from.columns = static_cast<int32_t>(columns);
  *array = Array{copy,
                 packed ? 0 : input.heads * input.rows * columns,
                 input.rows * columns,
                 columns,
                 1,
                 input.array.dtype,
                 static_cast<int32_t>(columns),
                 true};
  if (count == 0) return 0;
  const int64_t blocks = (count + kFillThreads - 1) / kFillThreads;
  return launch(copy_kernel, arguments, blocks < kCopyBlocks ? blocks : kCopyBlocks, Block{kFillThreads, 1, true, false, 0}, stream);
}

int64_t input_bytes(const attn_cuda_attention& problem) {
  const int64_t mask = problem.key_mask == nullptr ? 0 : aligned(problem.batch * problem.keys * 4) + aligned(problem.batch * 4);
  return mask + copy_bytes(problem, query_input(problem)) + copy_bytes(problem, key_input(problem)) +
         copy_bytes(problem, value_input(problem));
}

int prepare(int device, void* stream, const attn_cuda_attention& problem, Workspace& space, Attention* attention) {
  *attention = Attention{};
  if (const int error = take_input(problem, query_input(problem), space, stream, &attention->q)) return error;
  if (const int error = take_input(problem, key_input(problem), space, stream, &attention->k)) return error;
  if (const int error = take_input(problem, value_input(problem), space, stream, &attention->v)) return error;
  attention->batch = problem.batch;
  attention->queries = problem.queries;
  attention->keys = problem.keys;
  attention->heads = static_cast<int32_t>(problem.heads);
  attention->kv_heads = static_cast<int32_t>(problem.kv_heads);
  attention->group = static_cast<int32_t>(problem.heads / problem.kv_heads);
  attention->head_dim = static_cast<int32_t>(problem.head_dim);
  attention->value_dim = static_cast<int32_t>(problem.value_dim);
  attention->query_mask = problem.query_mask;
  attention->key_mask = problem.key_mask;
  attention->kv_lengths = problem.kv_lengths;
  attention->q_start = problem.q_start;
  attention->k_start = problem.k_start;
  attention->cu_seqlens_q = problem.cu_seqlens_q;
  attention->cu_seqlens_k = problem.cu_seqlens_k;
  attention->seqlens_q = problem.seqlens_q;
  attention->seqlens_k = problem.seqlens_k;
  attention->sinks = problem.sinks;
  attention->bias = problem.bias;
  attention->bias_batch = problem.bias_strides[0];
  attention->bias_head = problem.bias_strides[1];
  attention->bias_query = problem.bias_strides[2];
  attention->bias_key = problem.bias_strides[3];
  attention->causal = problem.causal != 0;
  attention->window_left = problem.window_left;
  attention->window_right = problem.window_right;
  attention->scale = problem.scale;
  if (problem.key_mask == nullptr || problem.keys == 0) return 0;
  auto* positions = space.take<int32_t>(problem.batch * problem.keys);
  auto* counts = space.take<int32_t>(problem.batch);
  attention->key_positions = positions;
  attention->key_counts = counts;
  return attn_cuda_compact_keys(device, stream, problem.key_mask, problem.batch, problem.keys, positions, counts);
}

int plan_rows(const attn_cuda_attention& problem, const Attention& attention, int size, Workspace& space, void* stream, Blocks* blocks) {
  return plan_blocks(problem, attention, size, false, space, stream, blocks);
}

int plan_keys(const attn_cuda_attention& problem, const Attention& attention, int size, Workspace& space, void* stream, Blocks* blocks) {
  return plan_blocks(problem, attention, size, true, space, stream, blocks);
}

int fill_bytes(void* data, int64_t bytes, void* stream) {
  return bytes == 0 ? 0 : cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream));
}

int fill_dead(float* lse, int64_t rows, void* stream) { return fill_empty_rows(lse, nullptr, nullptr, rows, stream); }

int fill_empty_rows(float* lse, float* row_max, float* row_sum, int64_t rows, void* stream) {
  return launch(empty_rows_kernel, EmptyRows{lse, row_max, row_sum, rows}, (rows + kFillThreads - 1) / kFillThreads,
                Block{kFillThreads, 1, true, false, 0}, stream);
}

}  // namespace attn_cuda
