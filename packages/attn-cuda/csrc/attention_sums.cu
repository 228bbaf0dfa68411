// dq, dk and dv from recomputed P and dS: a block owns rows or keys, the other side streams by in ascending order, one thread owns a whole
// chain.
#include "attention_pairs.cuh"

namespace attn_cuda {
namespace {

struct SumArguments {
  BackwardInputs inputs;
  const float* delta;
  int64_t per_item;
  const int64_t* plan;
  void* dq;
  void* dk;
  void* dv;
  bool q_vectors, k_vectors, v_vectors;
};

// Shared memory of a block.
template <int Width, int Edge>
struct Squares {
  static constexpr int kPitch = Width + 4;
  float owner_scores[Edge * kPitch];  // k, or q
  float owner_values[Edge * kPitch];  // v, or dout
  float stream_scores[Edge * kPitch];
  float stream_values[Edge * kPitch];
  float probs[Edge * (Edge + 4)];
  float gradients[Edge * (Edge + 4)];
  PairRow rows[2][Edge];  // of this square and of the next
};

// The two arrays of a side.
template <int Width, int Edge>
struct SideInFlight {
  RowsInFlight<kPairThreads, Edge, Width> scores, values;

  __device__ __forceinline__ void load_queries(const BackwardInputs& inputs, const Item& item, const PairRow* rows) {
    const Array &q = inputs.problem.q, &dout = inputs.dout;
    scores.load(q, 0, [&](int i) { return rows[i].row.head < 0 ? kNoRow : query_offset(q, item, rows[i].row); });
    values.load(dout, 0, [&](int i) { return rows[i].row.head < 0 ? kNoRow : query_offset(dout, item, rows[i].row); });
  }

  __device__ __forceinline__ void load_keys(const Attention& problem, const Work& work, int64_t slot) {
    scores.load(problem.k, 0, [&](int i) { return key_offset(problem.k, work.item, work.k_base, static_cast<int32_t>(slot) + i); });
    values.load(problem.v, 0, [&](int i) { return key_offset(problem.v, work.item, work.v_base, static_cast<int32_t>(slot) + i); });
  }

  __device__ __forceinline__ void store(int32_t scores_dtype, int32_t values_dtype, float* scores_to, float* values_to) const {
    scores.store(scores_dtype, scores_to, Width + 4);
    values.store(values_dtype, values_to, Width + 4);
  }
};

// P and, if wanted, dS of the square whose first key is in `key_slot`, to shared memory.
template <int Width, int Edge, bool OwnsKeys>
__device__ __forceinline__ void find_square(const BackwardInputs& inputs, const Item& item, const PairRow* rows, int32_t key_slot,
                                            bool gradients, Squares<Width, Edge>* shared) {
  const Attention& problem = inputs.problem;
  Square<Edge> probs;
  multiply_square<Edge>(shared->stream_scores, shared->owner_scores, Squares<Width, Edge>::kPitch, problem.q.columns, probs);
  square_probabilities<Edge, OwnsKeys>(problem, item, rows, key_slot, [](const PairRow&, int32_t) { return true; }, probs);
  if (OwnsKeys) store_square<Edge>(probs, shared->probs);
  if (!gradients) return;
  Square<Edge> dp;
  multiply_square<Edge>(shared->stream_values, shared->owner_values, Squares<Width, Edge>::kPitch, problem.v.columns, dp);
  square_gradients<Edge, OwnsKeys>(rows, probs, dp);
  store_square<Edge>(dp, shared->gradients);
}

template <int Width, int Edge>
__global__ void __launch_bounds__(kPairThreads, Width <= 64 ? 2 : 1) query_sums_kernel(const __grid_constant__ SumArguments arguments) {
  using Shared = Squares<Width, Edge>;
  const BackwardInputs& inputs = arguments.inputs;
  const Attention& problem = inputs.problem;
  extern __shared__ float4 storage[];
  auto* shared = reinterpret_cast<Shared*>(storage);
  __shared__ Work work;
  if (!share_work(problem, blockIdx.x, arguments.per_item, arguments.plan, &work)) return;
  const PairRow* rows = shared->rows[0];
  const int i = static_cast<int>(threadIdx.x);
  if (i < Edge) {
    const Row row = row_of(problem, work.item, work.kv_head, work.block * Edge + i);
    const Range range = row.head < 0 ? no_range() : range_of(problem, work.item, row.query);
    shared->rows[0][i] = pair_row(inputs, arguments.delta, work.item, row, range);
  }
  __syncthreads();
  SideInFlight<Width, Edge> side;
  side.load_queries(inputs, work.item, rows);
  side.store(problem.q.dtype, inputs.dout.dtype, shared->owner_scores, shared->owner_values);
  Range any = no_range();
  for (int row = 0; row < Edge; ++row) {
    any.begin = min(any.begin, rows[row].range.begin);
    any.end = max(any.end, rows[row].range.end);
  }

  OwnerSums<Width, Edge> dq;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    dq.clear();
    if (any.begin < any.end) side.load_keys(problem, work, any.begin);
#pragma unroll 1
    for (int64_t key = any.begin; key < any.end; key += Edge) {
      side.store(problem.k.dtype, problem.v.dtype, shared->stream_scores, shared->stream_values);
      __syncthreads();
      find_square<Width, Edge, false>(inputs, work.item, rows, static_cast<int32_t>(key), true, shared);
      __syncthreads();
      if (key + Edge < any.end) side.load_keys(problem, work, key + Edge);
      if (pass == 0) {
        dq.template add<false>(shared->gradients, shared->stream_scores, Shared::kPitch);
      } else {
        dq.template add<true>(shared->gradients, shared->stream_scores, Shared::kPitch);
      }
      __syncthreads();
    }
    // As in the forward kernel: a NaN may come from a masked pair, so sum again without those.
    if (!__syncthreads_or(dq.has_nan())) break;
  }
  dq.store(arguments.dq, problem.q.dtype, problem.scale, problem.head_dim, arguments.q_vectors, [&](int owner) {
    const Row row = rows[owner].row;
    return row.head < 0 ? kNoRow : query_result(problem, work.item, row, problem.head_dim);
  });
}

// Queries of one head that may see stored keys [first, last] by position: [begin, end).
__device__ __forceinline__ Range queries_of_keys(const Attention& problem, const Item& item, int64_t first, int64_t last) {
  int64_t begin = 0, end = item.queries;
  if (first >= item.used) return Range{0, 0};
  if (problem.causal) begin = max(begin, first - item.offset);
  if (problem.window_right >= 0) begin = max(begin, first - problem.window_right - item.offset);
  if (problem.window_left >= 0) end = min(end, last + problem.window_left - item.offset + 1);
  return begin < end ? Range{static_cast<int32_t>(begin), static_cast<int32_t>(end)} : Range{0, 0};
}

template <int Width, int Edge>
__global__ void __launch_bounds__(kPairThreads, Width <= 64 ? 2 : 1) key_sums_kernel(const __grid_constant__ SumArguments arguments) {
  using Shared = Squares<Width, Edge>;
  const BackwardInputs& inputs = arguments.inputs;
  const Attention& problem = inputs.problem;
  extern __shared__ float4 storage[];
  auto* shared = reinterpret_cast<Shared*>(storage);
  __shared__ Work work;
  if (!share_work(problem, blockIdx.x, arguments.per_item, arguments.plan, &work)) return;
  const int64_t first_key = work.block * Edge;
  if (first_key >= work.item.count) return;
  const auto first = static_cast<int32_t>(first_key);
  const int32_t last = min(first + Edge, work.item.count) - 1;
  const int32_t slot = first + work.item.shift;
  SideInFlight<Width, Edge> side;
  side.load_keys(problem, work, slot);
  side.store(problem.k.dtype, problem.v.dtype, shared->owner_scores, shared->owner_values);
  const Range queries = queries_of_keys(problem, work.item, stored_key(work.item, slot), stored_key(work.item, last + work.item.shift));
  const int32_t count = queries.end - queries.begin;
  const int64_t rows = static_cast<int64_t>(problem.group) * count;
  const bool gradients = arguments.dk != nullptr;

  const auto find_rows = [&](int64_t base, PairRow* to) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= Edge) return;
    Row row{-1, 0};
    Range range = no_range();
    if (base + i < rows) {
      const auto head = static_cast<int32_t>((base + i) / count);
      row = Row{work.kv_head * problem.group + head, static_cast<int32_t>(base + i - static_cast<int64_t>(head) * count) + queries.begin};
      range = range_of(problem, work.item, row.query);
    }
    to[i] = pair_row(inputs, arguments.delta, work.item, row, range);
  };

  OwnerSums<Width, Edge> dk, dv;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    dk.clear();
    dv.clear();
    int current = 0;
    find_rows(0, shared->rows[0]);
    __syncthreads();
    side.load_queries(inputs, work.item, shared->rows[0]);
#pragma unroll 1
    for (int64_t base = 0; base < rows; base += Edge) {
      side.store(problem.q.dtype, inputs.dout.dtype, shared->stream_scores, shared->stream_values);
      find_rows(base + Edge, shared->rows[current ^ 1]);
      __syncthreads();
      find_square<Width, Edge, true>(inputs, work.item, shared->rows[current], slot, gradients, shared);
      __syncthreads();
      current ^= 1;
      side.load_queries(inputs, work.item, shared->rows[current]);
      if (pass == 0) {
        if (arguments.dv != nullptr) dv.template add<false>(shared->probs, shared->stream_values, Shared::kPitch);
        if (gradients) dk.template add<false>(shared->gradients, shared->stream_scores, Shared::kPitch);
      } else {
        if (arguments.dv != nullptr) dv.template add<true>(shared->probs, shared->stream_values, Shared::kPitch);
        if (gradients) dk.template add<true>(shared->gradients, shared->stream_scores, Shared::kPitch);
      }
      __syncthreads();
    }
    if (!__syncthreads_or(dk.has_nan() || dv.has_nan())) break;
  }
  const auto offset_of = [&](int owner, int32_t width) {
    return first + owner > last ? kNoRow : key_result(problem, work.item, work.kv_head, first + owner, width);
  };
  if (gradients) {
    dk.store(arguments.dk, problem.k.dtype, problem.scale, problem.head_dim, arguments.k_vectors,
             [&](int owner) { return offset_of(owner, problem.head_dim); });
  }
  if (arguments.dv != nullptr) {
    dv.store(arguments.dv, problem.v.dtype, 1.0f, problem.value_dim, arguments.v_vectors,
             [&](int owner) { return offset_of(owner, problem.value_dim); });
  }
}

template <int Width, int Edge>
int launch_sums(const SumArguments& arguments, int64_t blocks, void* stream) {
  const auto kernel = arguments.dq != nullptr ? query_sums_kernel<Width, Edge> : key_sums_kernel<Width, Edge>;
  return launch(kernel, arguments, blocks, Block{kPairThreads, 1, true, false, sizeof(Squares<Width, Edge>)}, stream);
}

int launch_sums(const SumArguments& arguments, PairShape shape, int64_t blocks, void* stream) {
  if (blocks == 0) return 0;
  if (shape.width == 64) return launch_sums<64, 64>(arguments, blocks, stream);
  if (shape.width == 128)
    return shape.edge == 64 ? launch_sums<128, 64>(arguments, blocks, stream) : launch_sums<128, 32>(arguments, blocks, stream);
  return shape.edge == 32 ? launch_sums<256, 32>(arguments, blocks, stream) : launch_sums<256, 16>(arguments, blocks, stream);
}

}  // namespace

PairShape pair_shape(const Limits& limits, const Attention& problem) {
  const int32_t width = max(problem.head_dim, problem.value_dim);
  if (width <= 64 && fits(limits, sizeof(Squares<64, 64>))) return PairShape{64, 64};
  if (width <= 128) return PairShape{128, fits(limits, sizeof(Squares<128, 64>)) ? 64 : 32};
  return PairShape{256, fits(limits, sizeof(Squares<256, 32>)) ? 32 : 16};
}

int launch_query_sums(const BackwardInputs& inputs, const float* delta, const Blocks& blocks, PairShape shape, void* dq, void* stream) {
  SumArguments arguments{inputs, delta, blocks.per_item, blocks.plan, dq, nullptr, nullptr, false, false, false};
  arguments.q_vectors = stores_fours(dq, inputs.problem.q.dtype, inputs.problem.head_dim);
  return launch_sums(arguments, shape, blocks.count, stream);
}

int launch_key_sums(const BackwardInputs& inputs, const float* delta, const Blocks& blocks, PairShape shape, void* dk, void* dv,
                    void* stream) {
  SumArguments arguments{inputs, delta, blocks.per_item, blocks.plan, nullptr, dk, dv, false, false, false};
  arguments.k_vectors = stores_fours(dk, inputs.problem.k.dtype, inputs.problem.head_dim);
  arguments.v_vectors = stores_fours(dv, inputs.problem.v.dtype, inputs.problem.value_dim);
  return launch_sums(arguments, shape, blocks.count, stream);
}

}  // namespace attn_cuda
