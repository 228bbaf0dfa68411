// Forward: row states in a first pass over the keys, P and the chains of out in a second that computes the scores again.
#pragma once

#include "query_rows.h"

namespace attn::hip {

struct ForwardArguments {
  Attention attention;
  int64_t blocks, grid;
};

struct ForwardShared {
  OwnedRows q;
  Pairs pairs;
  int64_t values[kTile];  // element offset of each slot's row of v
  OwnedQueries queries;
};

__device__ inline RowState with_sink(const Attention& attention, const Row& row, RowState state) {
  const float* sinks = attention.tensors.sinks;
  return sinks == nullptr || row.index == kNoRow ? state : merge(state, RowState{sinks[row.head], 1.0f});
}

__device__ inline void store_state(const Tensors& tensors, RowState state, Query& query) {
  query.state = state;
  const int64_t index = query.row.index;
  if (index == kNoRow) return;
  tensors.lse[index] = positive_zero(log_sum_exp(state));
  tensors.row_max[index] = state.max;
  tensors.row_sum[index] = state.sum;
}

// Final scores of the thread's slot to the factors of v.
__device__ inline void to_factors(const Attention& attention, const Work& work, int64_t key, ForwardShared& shared) {
  const Array v = as_v(attention, attention.tensors.v);
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    float& pair = shared.pairs[r][threadIdx.x];
    pair = Pair(attention, work.item, shared.queries.rows[r], key, pair).dropped(attention);
  }
  shared.values[threadIdx.x] = key == kNoRow ? kNoRow : key_offset(v, work.item, work.kv_head, key);
}

// The rows of one block. One loop for both passes, so that the chains are compiled once.
__device__ inline void attend_rows(const Attention& attention, const Work& work, ForwardShared& shared) {
  const Range seen = shared.queries.seen();
  RowState state = empty_row();  // of the row in the thread's lanes
  float out[kOwned] = {};
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int32_t tile = seen.begin / kTile * kTile; tile < seen.end; tile += kTile) {
      const int64_t key = score_tile(attention, work, tile, shared.queries, shared.q, shared.pairs);
      if (pass == 1) to_factors(attention, work, key, shared);
      __syncthreads();
      if (pass == 0) {
        state = merge(state, tile_state(shared.pairs[row_of_lane()]));
      } else {
        append_terms(as_v(attention, attention.tensors.v), shared.values, shared.pairs, first_column(seen, tile), last_column(seen, tile),
                     out);
      }
      __syncthreads();
    }
    if (pass == 0 && lane() == 0) {
      Query& query = shared.queries.rows[row_of_lane()];
      store_state(attention.tensors, with_sink(attention, query.row, state), query);
    }
    __syncthreads();
  }
  shared.queries.store(as_out(attention, attention.tensors.out), work.item, out, 1.0f);
}

__global__ void __launch_bounds__(kThreads) attention_forward_kernel(const ForwardArguments arguments) {
  __shared__ ForwardShared shared;
  const Attention& attention = arguments.attention;
#pragma unroll 1
  for (int64_t id = blockIdx.x; id < arguments.blocks; id += arguments.grid) {
    const Work work = find_work(attention, id, [&](int64_t batch) { return attention.group * queries_of(attention, batch); });
    if (!work.exists) return;
    shared.queries.find(attention, work);
    __syncthreads();
    shared.queries.load(as_q(attention, attention.tensors.q), work.item, shared.q);
    __syncthreads();
    attend_rows(attention, work, shared);
    __syncthreads();
  }
}

}  // namespace attn::hip
