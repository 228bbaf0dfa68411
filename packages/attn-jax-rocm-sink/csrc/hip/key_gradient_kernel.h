// Backward over keys: a block owns eight stored keys of a kv head and streams the rows of its query heads, 256 at a time, in the order in
// which dk and dv are summed.
#pragma once

#include "query_gradient_kernel.h"

namespace attn::hip {

struct KeyGradientShared {
  OwnedRows k, v;
  Pairs probs, gradients;
  int64_t queries[kTile], upstream[kTile];  // element offsets of the streamed rows of q and dout
  int any[kOwned];                          // whether a streamed row of these lanes' wavefront sees an owned key
};

__device__ inline void load_owned_keys(const Array& array, const Work& work, OwnedRows& to) {
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    const int64_t key = work.first + r;
    load_owned(array, key < work.item.count ? key_offset(array, work.item, work.kv_head, key) : kNoRow, to[r]);
  }
}

__device__ inline bool any_of(const int (&flags)[kOwned]) {
  bool any = false;
  for (const int flag : flags) any |= flag != 0;
  return any;
}

// Factors of dO and dS of the thread's row and the owned keys.
__device__ inline void key_pairs(const BackwardArguments& arguments, const Work& work, const Query& query, KeyGradientShared& shared) {
  const Attention& attention = arguments.attention;
  chain_pairs(as_q(attention, attention.tensors.q), shared.queries[threadIdx.x], shared.k, shared.probs);
  chain_pairs(as_out(attention, attention.tensors.dout), shared.upstream[threadIdx.x], shared.v, shared.gradients);
#pragma unroll 1
  for (int r = 0; r < kOwned; ++r) {
    const int64_t key = work.first + r;
    float &prob = shared.probs[r][threadIdx.x], &gradient = shared.gradients[r][threadIdx.x];
    const bool visible = query.seen.has(static_cast<int32_t>(key)) && is_kept(attention, work.item, key);
    const float score = visible ? final_score(attention, work.item, query.row, key, prob) : negative_infinity();
    const Pair pair(attention, work.item, query, key, score);
    gradient = pair.gradient(attention, gradient, query.delta);
    prob = pair.dropped(attention);
  }
}

// The thread's column of the sums of each key, times `scale`.
__device__ inline void store_keys(const Array& array, const Work& work, const float (&sums)[kOwned], float scale) {
  const int column = static_cast<int>(threadIdx.x);
  if (array.data == nullptr || column >= array.columns) return;
#pragma unroll
  for (int r = 0; r < kOwned; ++r)
    if (work.first + r < work.item.count)
      array.store(key_offset(array, work.item, work.kv_head, work.first + r) + column, mul(sums[r], scale));
}

__global__ void __launch_bounds__(kThreads) attention_key_gradient_kernel(const BackwardArguments arguments) {
  __shared__ KeyGradientShared shared;
  const Attention& attention = arguments.attention;
  const Tensors& tensors = attention.tensors;
  const Array q = as_q(attention, tensors.q), dout = as_out(attention, tensors.dout);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int64_t id = blockIdx.x; id < arguments.blocks; id += arguments.grid) {
    Work work = find_work(attention, id, [&](int64_t batch) { return keys_of(attention, batch); });
    if (!work.exists) return;
    work.item.count = static_cast<int32_t>(keys_of(attention, work.item.batch));  // stored keys, kept or not
    load_owned_keys(as_k(attention, tensors.k), work, shared.k);
    load_owned_keys(as_v(attention, tensors.v), work, shared.v);
    const int64_t rows = attention.group * work.item.queries;
    float dk[kOwned] = {}, dv[kOwned] = {};
#pragma unroll 1
    for (int64_t first_row = 0; first_row < rows; first_row += kTile) {
      const Query query = stored_query(arguments, work.item, work.kv_head, first_row + thread);
      const bool sees = !query.seen.empty() && query.seen.begin < work.first + kOwned && query.seen.end > work.first;
      shared.queries[thread] = sees ? query_offset(q, work.item, query.row) : kNoRow;
      shared.upstream[thread] = sees ? query_offset(dout, work.item, query.row) : kNoRow;
      const int any = __any(sees);
      if (lane() == 0) shared.any[row_of_lane()] = any;
      __syncthreads();
      if (any_of(shared.any)) {
        key_pairs(arguments, work, query, shared);
        __syncthreads();
        const int count = static_cast<int>(smaller(kTile, rows - first_row));
        if (tensors.dk != nullptr) append_terms(q, shared.queries, shared.gradients, 0, count, dk);
        if (tensors.dv != nullptr) append_terms(dout, shared.upstream, shared.probs, 0, count, dv);
      }
      __syncthreads();
    }
    store_keys(as_k(attention, tensors.dk), work, dk, attention.scale);
    store_keys(as_v(attention, tensors.dv), work, dv, 1.0f);
    __syncthreads();
  }
}

}  // namespace attn::hip
