// dbias: dS of squares of one head of one batch item, added in the order (batch, head, query, key) on the axes that the bias broadcasts.
#include "attention_backward.cuh"
#include "attention_rows.cuh"

namespace attn_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 256;
constexpr int kPitch = kWidth + 4;

// What a square needs of a query row.
struct QueryRow {
  Row row;
  Range range;
  RowConstants constants;
  float delta;
};

__device__ __forceinline__ QueryRow query_row(const BackwardInputs& inputs, const float* delta, const Item& item, Row row, Range range) {
  QueryRow query{row, range, RowConstants{0.0f, Divisor{1.0f, 1.0f, 0.0f}}, 0.0f};
  if (row.head < 0 || range.begin >= range.end) return query;
  const int64_t index = row_index(inputs.problem, item, row);
  query.constants = RowConstants{inputs.row_max[index], divisor(inputs.row_sum[index])};
  query.delta = delta[index];
  return query;
}

// Edge keys and queries. A thread has keys key() + 8 i and queries query() + 4 j, of which a warp reads few at a time.
template <int Edge>
struct Square {
  static constexpr int kPer = Edge / 16;
  float pair[kPer][kPer];  // [key][query]

  __device__ static __forceinline__ int key() { return warp_id() % 2 * (Edge / 2) + lane_id() % 8; }
  __device__ static __forceinline__ int query() { return warp_id() / 2 * (Edge / 4) + lane_id() / 8; }

  // Chains over `columns` of the keys' and the queries' rows.
  __device__ __forceinline__ void multiply(const float* keys, const float* queries, int columns) {
    const float* left = keys + key() * kPitch;
    const float* right = queries + query() * kPitch;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) pair[i][j] = 0.0f;
#pragma unroll 4
    for (int column = 0; column < columns; ++column)
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) pair[i][j] = exact_fma(left[8 * i * kPitch + column], right[4 * j * kPitch + column], pair[i][j]);
  }

  // Chains of q and k to P, kMaskedBits where masked. `first` is the slot of the first key; `kept(slot)` leaves out what the ranges do not.
  template <typename Kept>
  __device__ __forceinline__ void to_probabilities(const Attention& problem, const Item& item, const QueryRow* rows, int32_t first,
                                                   Kept kept) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int32_t slot = first + key() + 8 * i;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const QueryRow& row = rows[query() + 4 * j];
        float score = attn::negative_infinity();
        if (row.range.has(slot) && kept(slot))
          score = add(mul(pair[i][j], problem.scale), bias_of_row(problem, item, row.row)[stored_key(item, slot) * problem.bias_key]);
        pair[i][j] = score;
      }
    }
    probabilities_of(pair, [&](int, int j) { return rows[query() + 4 * j].constants; });
  }

  // dP to dS, kMaskedBits where P says so.
  __device__ __forceinline__ void to_gradients(const QueryRow* rows, const Square& probs) {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j)
        pair[i][j] =
            is_masked(probs.pair[i][j]) ? masked_value() : attn::score_gradient(probs.pair[i][j], pair[i][j], rows[query() + 4 * j].delta);
  }

  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) to[(key() + 8 * i) * (Edge + 4) + query() + 4 * j] = pair[i][j];
  }
};

struct BiasArguments {
  BackwardInputs inputs;
  const float* delta;
  float* dbias;
  int64_t shape[4];
  int64_t query_blocks, key_blocks;  // that own separate elements
};

template <int Edge>
struct BiasShared {
  float queries[Edge * kPitch], upstream[Edge * kPitch], keys[Edge * kPitch], values[Edge * kPitch];
  float gradients[Edge * (Edge + 4)];  // [key][query]
  float sums[Edge * Edge];             // [query][key]
  QueryRow rows[Edge];
};

// dS of queries [query, query + queries) of a head and stored keys [key, key + Edge), to shared memory.
template <int Edge>
__device__ __forceinline__ void find_gradients(const BiasArguments& arguments, const Item& item, int32_t head, int64_t query, int queries,
                                               int64_t key, BiasShared<Edge>* shared) {
  const BackwardInputs& inputs = arguments.inputs;
  const Attention& problem = inputs.problem;
  const int32_t kv_head = head / problem.group;
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i < Edge) {
    Row row{-1, 0};
    Range range = no_range();
    if (i < queries && query + i < item.queries) {
      row = Row{head, static_cast<int32_t>(query + i)};
      range = range_of(problem, item, row.query);
    }
    shared->rows[i] = query_row(inputs, arguments.delta, item, row, range);
  }
  __syncthreads();
  const auto rows_of = [&](const Array& array, float* to) {
    load_rows<kThreads, Edge, kWidth>(array, 0, kPitch, to, [&](int j) {
      return shared->rows[j].row.head < 0 ? kNoRow : query_offset(array, item, shared->rows[j].row);
    });
  };
  const auto keys_of = [&](const Array& array, float* to) {
    const int64_t base = key_base(array, item, kv_head);
    load_rows<kThreads, Edge, kWidth>(array, 0, kPitch, to,
                                      [&](int j) { return key_offset(array, item, base, static_cast<int32_t>(key + j)); });
  };
  rows_of(problem.q, shared->queries);
  rows_of(inputs.dout, shared->upstream);
  keys_of(problem.k, shared->keys);
  keys_of(problem.v, shared->values);
  __syncthreads();
  Square<Edge> probs, gradients;
  probs.multiply(shared->keys, shared->queries, problem.q.columns);
  probs.to_probabilities(problem, item, shared->rows, static_cast<int32_t>(key), [&](int32_t slot) {
    return problem.key_mask == nullptr || problem.key_mask[item.batch * problem.keys + slot] != 0;
  });
  gradients.multiply(shared->values, shared->upstream, problem.v.columns);
  gradients.to_gradients(shared->rows, probs);
  gradients.store(shared->gradients);
  __syncthreads();
}

// Adds the square to the block's sums; elements on broadcast axes are one sum, in order.
template <int Edge>
__device__ __forceinline__ void add_square(bool over_queries, bool over_keys, BiasShared<Edge>* shared) {
  for (int element = static_cast<int>(threadIdx.x); element < Edge * Edge; element += kThreads) {
    const int query = element / Edge, key = element % Edge;
    if ((over_queries && query > 0) || (over_keys && key > 0)) continue;
    float sum = shared->sums[element];
    for (int i = query; i < (over_queries ? Edge : query + 1); ++i)
      for (int j = key; j < (over_keys ? Edge : key + 1); ++j) sum = add(sum, attn::positive_zero(shared->gradients[j * (Edge + 4) + i]));
    shared->sums[element] = sum;
  }
}

template <int Edge>
__global__ void __launch_bounds__(kThreads) bias_sums_kernel(const __grid_constant__ BiasArguments arguments) {
  const Attention& problem = arguments.inputs.problem;
  extern __shared__ float4 storage[];
  auto* shared = reinterpret_cast<BiasShared<Edge>*>(storage);
  const int64_t key_block = blockIdx.x % arguments.key_blocks, after_key = blockIdx.x / arguments.key_blocks;
  const int64_t query_block = after_key % arguments.query_blocks, outer = after_key / arguments.query_blocks;
  const int64_t head_index = outer % arguments.shape[1], batch_index = outer / arguments.shape[1];
  const bool over_queries = arguments.shape[2] == 1, over_keys = arguments.shape[3] == 1;
  // A sum over queries and keys needs all keys of a query before the next query.
  const int queries = over_queries && over_keys ? 1 : Edge;
  for (int element = static_cast<int>(threadIdx.x); element < Edge * Edge; element += kThreads) shared->sums[element] = 0.0f;
  const int64_t last_batch = arguments.shape[0] == 1 ? problem.batch : batch_index + 1,
                last_head = arguments.shape[1] == 1 ? problem.heads : head_index + 1;
  const int64_t last_query = over_queries ? problem.queries : min(problem.queries, (query_block + 1) * Edge);
  const int64_t last_key = over_keys ? problem.keys : min(problem.keys, (key_block + 1) * Edge);
  for (int64_t batch = batch_index; batch < last_batch; ++batch) {
    // Stored keys, since those of different items may be compacted differently.
    Attention stored = problem;
    stored.key_positions = nullptr;
    stored.k_start = nullptr;
    Item item = item_of(stored, batch);
    item.offset = item_of(problem, batch).offset;
    for (int64_t head = head_index; head < last_head; ++head)
      for (int64_t query = query_block * Edge; query < last_query; query += queries)
        for (int64_t key = key_block * Edge; key < last_key; key += Edge) {
          find_gradients(arguments, item, static_cast<int32_t>(head), query, queries, key, shared);
          add_square(over_queries, over_keys, shared);
        }
  }
  __syncthreads();
  for (int element = static_cast<int>(threadIdx.x); element < Edge * Edge; element += kThreads) {
    const int64_t query = query_block * Edge + element / Edge, key = key_block * Edge + element % Edge;
    if (query >= arguments.shape[2] || key >= arguments.shape[3]) continue;
    const int64_t index = ((batch_index * arguments.shape[1] + head_index) * arguments.shape[2] + query) * arguments.shape[3] + key;
    arguments.dbias[index] = attn::positive_zero(shared->sums[element]);
  }
}

}  // namespace

int launch_bias_sums(const Limits& limits, const BackwardInputs& inputs, const float* delta, float* dbias, const int64_t (&shape)[4],
                     void* stream) {
  const bool large = fits(limits, sizeof(BiasShared<32>));
  const int edge = large ? 32 : 16;
  const BiasArguments arguments{
      inputs, delta, dbias, {shape[0], shape[1], shape[2], shape[3]}, (shape[2] + edge - 1) / edge, (shape[3] + edge - 1) / edge};
  const int64_t blocks = shape[0] * shape[1] * arguments.query_blocks * arguments.key_blocks;
  if (blocks == 0) return 0;
  if (blocks >= INT32_MAX) return ATTN_CUDA_BAD_SIZE;
  const size_t bytes = large ? sizeof(BiasShared<32>) : sizeof(BiasShared<16>);
  return launch(large ? bias_sums_kernel<32> : bias_sums_kernel<16>, arguments, blocks, Block{kThreads, 1, true, false, bytes}, stream);
}

}  // namespace attn_cuda
