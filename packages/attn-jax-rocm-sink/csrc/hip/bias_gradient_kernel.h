// dbias: a block owns 8 x 256 elements (query, stored key) of one head of one batch item, or all of an axis that the bias broadcasts, and
// adds dS in the order (batch, head, query, key).
#pragma once

#include "query_gradient_kernel.h"

namespace attn::hip {

struct BiasGradientShared {
  OwnedRows q, dout;
  Pairs scores, gradients, sums;
  Query rows[kOwned];  // `seen` counts stored keys
};

// Elements of dbias that one block owns, and what it adds up for them.
struct BiasBlock {
  int64_t batch, head, first_query, first_key;
  int64_t last_batch, last_head, last_query, last_key;
  bool over_queries, over_keys;
  int rows;  // query rows at a time: a sum over queries and keys has all keys of a query before the next query

  __device__ BiasBlock(const Config& config, int64_t id) {
    const int64_t (&shape)[4] = config.bias_shape;
    const int64_t key_blocks = (shape[3] + kTile - 1) / kTile, query_blocks = owned_blocks(shape[2]);
    over_queries = shape[2] == 1;
    over_keys = shape[3] == 1;
    rows = over_queries && over_keys ? 1 : kOwned;
    first_key = id % key_blocks * kTile;
    first_query = id / key_blocks % query_blocks * kOwned;
    head = id / (key_blocks * query_blocks) % shape[1];
    batch = id / (key_blocks * query_blocks * shape[1]);
    last_batch = shape[0] == 1 ? config.batch : batch + 1;
    last_head = shape[1] == 1 ? config.heads : head + 1;
    last_query = over_queries ? config.queries : smaller(config.queries, first_query + kOwned);
    last_key = over_keys ? config.keys : smaller(config.keys, first_key + kTile);
  }
};

// dS of queries [query, query + rows) of head `in_group` of a kv head and 256 stored keys from `first_key`, masked where there is no such
// pair.
__device__ inline void bias_pairs(const BackwardArguments& arguments, const Item& item, int64_t kv_head, int64_t in_group, int64_t query,
                                  int rows, int64_t first_key, BiasGradientShared& shared) {
  const Attention& attention = arguments.attention;
  const Tensors& tensors = attention.tensors;
  const Array q = as_q(attention, tensors.q), k = as_k(attention, tensors.k), v = as_v(attention, tensors.v);
  const Array dout = as_out(attention, tensors.dout);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t end_of_rows = attention.group * item.queries;
  if (thread < kOwned) {
    const bool exists = thread < rows && query + thread < item.queries;
    const int64_t row = exists ? in_group * item.queries + query + thread : end_of_rows;
    shared.rows[thread] = stored_query(arguments, item, kv_head, row);
  }
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    const Row row = shared.rows[r].row;
    load_owned(q, row.index == kNoRow ? kNoRow : query_offset(q, item, row), shared.q[r]);
    load_owned(dout, row.index == kNoRow ? kNoRow : query_offset(dout, item, row), shared.dout[r]);
  }
  __syncthreads();
  const int64_t key = first_key + thread;
  const bool exists = key < item.keys && is_kept(attention, item, key);
  chain_pairs(k, exists ? key_offset(k, item, kv_head, key) : kNoRow, shared.q, shared.scores);
  chain_pairs(v, exists ? key_offset(v, item, kv_head, key) : kNoRow, shared.dout, shared.gradients);
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    const Query& own = shared.rows[r];
    float& gradient = shared.gradients[r][thread];
    const bool visible = exists && own.seen.has(static_cast<int32_t>(key));
    const float score = visible ? final_score(attention, item, own.row, key, shared.scores[r][thread]) : negative_infinity();
    gradient = Pair(attention, item, own, key, score).gradient(attention, gradient, own.delta);
  }
  __syncthreads();
}

// Adds the pairs to the block's sums; an element on broadcast axes is one sum, in order. A masked pair is -0, which changes no sum from +0.
__device__ inline void add_pairs(const BiasBlock& block, BiasGradientShared& shared) {
  const int key = static_cast<int>(threadIdx.x);
  if (block.over_keys && key > 0) return;
#pragma unroll 1
  for (int r = 0; r < (block.over_queries ? 1 : kOwned); ++r) {
    float sum = shared.sums[r][key];
#pragma unroll 1
    for (int i = r; i < (block.over_queries ? kOwned : r + 1); ++i)
#pragma unroll 1
      for (int j = key; j < (block.over_keys ? kTile : key + 1); ++j) sum = add(sum, shared.gradients[i][j]);
    shared.sums[r][key] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) attention_bias_gradient_kernel(const BackwardArguments arguments) {
  __shared__ BiasGradientShared shared;
  const Attention& attention = arguments.attention;
  const int64_t (&shape)[4] = attention.config.bias_shape;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int64_t id = blockIdx.x; id < arguments.blocks; id += arguments.grid) {
    const BiasBlock block(attention.config, id);
    for (int r = 0; r < kOwned; ++r) shared.sums[r][thread] = 0.0f;
#pragma unroll 1
    for (int64_t batch = block.batch; batch < block.last_batch; ++batch) {
      const Item item = item_of(attention, batch);
#pragma unroll 1
      for (int64_t head = block.head; head < block.last_head; ++head) {
        const int64_t kv_head = head / attention.group, in_group = head - kv_head * attention.group;
#pragma unroll 1
        for (int64_t query = block.first_query; query < block.last_query; query += block.rows)
#pragma unroll 1
          for (int64_t key = block.first_key; key < block.last_key; key += kTile) {
            bias_pairs(arguments, item, kv_head, in_group, query, block.rows, key, shared);
            add_pairs(block, shared);
            __syncthreads();
          }
      }
    }
    const int64_t key = block.first_key + thread;
#pragma unroll 1
    for (int r = 0; r < kOwned && block.first_query + r < shape[2]; ++r) {
      const int64_t row = (block.batch * shape[1] + block.head) * shape[2] + block.first_query + r;
      if (key < shape[3]) attention.tensors.dbias[row * shape[3] + key] = positive_zero(shared.sums[r][thread]);
    }
  }
}

}  // namespace attn::hip
