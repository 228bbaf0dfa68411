// Backward over query rows: delta and the gradient of each row's sink in a first pass over the keys, dq in a second.
#pragma once

#include "query_rows.h"

namespace attn::hip {

// Parameter of the backward kernels. `delta` and `dsink` hold a float for each row of LSE; dsink is null when not asked for.
struct BackwardArguments {
  Attention attention;
  float* delta;
  float* dsink;
  int64_t blocks, grid;
};

// Row `index` of a kv head with its delta; `seen` counts stored keys.
__device__ inline Query stored_query(const BackwardArguments& arguments, const Item& item, int64_t kv_head, int64_t index) {
  const Attention& attention = arguments.attention;
  Query query{};
  query.row = row_of(attention, item, kv_head, index);
  if (query.row.index == kNoRow) return query;
  query.seen = stored_range(attention.config, item, query.row.query);
  query.state = RowState{attention.tensors.row_max[query.row.index], attention.tensors.row_sum[query.row.index]};
  query.delta = arguments.delta[query.row.index];
  return query;
}

struct QueryGradientShared {
  OwnedRows q, dout;
  Pairs scores, gradients;
  int64_t keys[kTile];  // element offset of each slot's row of k
  OwnedQueries queries;
};

// One lane of each row.
__device__ inline void store_delta(const BackwardArguments& arguments, float sum, Query& query) {
  const Tensors& tensors = arguments.attention.tensors;
  const int64_t index = query.row.index;
  if (index == kNoRow) return;
  query.delta = tensors.dlse == nullptr ? sum : sub(sum, tensors.dlse[index]);
  arguments.delta[index] = query.delta;
  if (arguments.dsink == nullptr) return;
  const float sink = tensors.sinks[query.row.head];
  arguments.dsink[index] = sink == negative_infinity() ? 0.0f : mul(-probability(sink, query.state), query.delta);
}

// Final scores and chains of dP of one tile of slots, to the terms of delta in the first pass and to dS in the second.
__device__ inline void gradient_tile(const Attention& attention, const Work& work, int32_t tile, int pass, QueryGradientShared& shared) {
  const int64_t key = score_tile(attention, work, tile, shared.queries, shared.q, shared.scores);
  const Array k = as_k(attention, attention.tensors.k), v = as_v(attention, attention.tensors.v);
  chain_pairs(v, key == kNoRow ? kNoRow : key_offset(v, work.item, work.kv_head, key), shared.dout, shared.gradients);
  shared.keys[threadIdx.x] = key == kNoRow ? kNoRow : key_offset(k, work.item, work.kv_head, key);
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    const Query& query = shared.queries.rows[r];
    const Pair pair(attention, work.item, query, key, shared.scores[r][threadIdx.x]);
    float& gradient = shared.gradients[r][threadIdx.x];
    gradient = pass == 0 ? pair.product(attention, gradient) : pair.gradient(attention, gradient, query.delta);
  }
}

// The rows of one block. One loop for both passes, so that the chains are compiled once.
__device__ inline void differentiate_rows(const BackwardArguments& arguments, const Work& work, QueryGradientShared& shared) {
  const Attention& attention = arguments.attention;
  const Range seen = shared.queries.seen();
  const int passes = attention.tensors.dq != nullptr ? 2 : 1;
  float delta = 0.0f;  // of the row in the thread's lanes
  float dq[kOwned] = {};
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 1
    for (int32_t tile = seen.begin / kTile * kTile; tile < seen.end; tile += kTile) {
      gradient_tile(attention, work, tile, pass, shared);
      __syncthreads();
      if (pass == 0) {
        delta = add(delta, tile_sum(shared.gradients[row_of_lane()]));
      } else {
        append_terms(as_k(attention, attention.tensors.k), shared.keys, shared.gradients, first_column(seen, tile), last_column(seen, tile),
                     dq);
      }
      __syncthreads();
    }
    if (pass == 0 && lane() == 0) store_delta(arguments, delta, shared.queries.rows[row_of_lane()]);
    __syncthreads();
  }
  if (passes == 2) shared.queries.store(as_q(attention, attention.tensors.dq), work.item, dq, attention.scale);
}

__global__ void __launch_bounds__(kThreads) attention_query_gradient_kernel(const BackwardArguments arguments) {
  __shared__ QueryGradientShared shared;
  const Attention& attention = arguments.attention;
#pragma unroll 1
  for (int64_t id = blockIdx.x; id < arguments.blocks; id += arguments.grid) {
    const Work work = find_work(attention, id, [&](int64_t batch) { return attention.group * queries_of(attention, batch); });
    if (!work.exists) return;
    shared.queries.find(attention, work);
    __syncthreads();
    shared.queries.load(as_q(attention, attention.tensors.q), work.item, shared.q);
    shared.queries.load(as_out(attention, attention.tensors.dout), work.item, shared.dout);
    __syncthreads();
    differentiate_rows(arguments, work, shared);
    __syncthreads();
  }
}

}  // namespace attn::hip
