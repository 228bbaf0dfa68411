// What needs no pairs: the stored positions of the keys that a mask keeps, the sums of dsinks, and rows that see no key.
#pragma once

#include "query_gradient_kernel.h"

namespace attn::hip {

struct CompactArguments {
  const uint8_t* mask;
  int64_t keys;
  int32_t* positions;
  int32_t* counts;
  int64_t blocks, grid;
};

// A thread has a run of keys: it counts those that are kept, and writes them after those of the threads before it.
__global__ void __launch_bounds__(kThreads) compact_keys_kernel(const CompactArguments arguments) {
  __shared__ int32_t counts[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t batch = blockIdx.x; batch < arguments.blocks; batch += arguments.grid) {
    const uint8_t* mask = arguments.mask + batch * arguments.keys;
    const int64_t run = (arguments.keys + kThreads - 1) / kThreads;
    const int64_t begin = smaller(thread * run, arguments.keys), end = smaller(begin + run, arguments.keys);
    int32_t count = 0;
#pragma unroll 1
    for (int64_t key = begin; key < end; ++key) count += mask[key] != 0;
    counts[thread] = count;
    __syncthreads();
    int32_t before = 0;
#pragma unroll 4
    for (int i = 0; i < thread; ++i) before += counts[i];
    if (thread == kThreads - 1) arguments.counts[batch] = before + count;
    int32_t* to = arguments.positions + batch * arguments.keys + before;
#pragma unroll 1
    for (int64_t key = begin; key < end; ++key)
      if (mask[key] != 0) *to++ = static_cast<int32_t>(key);
    __syncthreads();
  }
}

struct SinkArguments {
  Attention attention;
  const float* rows;  // of LSE
  float* items;       // [H, B]
  int64_t blocks, grid;
};

// For each head, sums over the queries of each batch item, then over the batch.
__global__ void __launch_bounds__(kThreads) attention_sink_gradient_kernel(const SinkArguments arguments) {
  const Attention& attention = arguments.attention;
  const Config& config = attention.config;
#pragma unroll 1
  for (int64_t head = blockIdx.x; head < arguments.blocks; head += arguments.grid) {
    float* items = arguments.items + head * config.batch;
#pragma unroll 1
    for (int64_t batch = threadIdx.x; batch < config.batch; batch += kThreads) {
      const Item item = item_of(attention, batch);
      const float* rows = arguments.rows + (item.outer * config.heads + head) * config.queries + item.first_query;
      float sum = 0.0f;
#pragma unroll 4
      for (int64_t query = 0; query < item.queries; ++query) sum = add(sum, rows[query]);
      items[batch] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    float sum = 0.0f;
#pragma unroll 1
    for (int64_t batch = 0; batch < config.batch; ++batch) sum = add(sum, items[batch]);
    attention.tensors.dsinks[head] = positive_zero(sum);
  }
}

struct EmptyRowsArguments {
  Tensors tensors;
  int64_t rows;
  int64_t blocks, grid;
};

// Rows outside every segment see no key.
__global__ void __launch_bounds__(kThreads) empty_rows_kernel(const EmptyRowsArguments arguments) {
  for (int64_t block = blockIdx.x; block < arguments.blocks; block += arguments.grid) {
    const int64_t row = block * kThreads + threadIdx.x;
    if (row >= arguments.rows) return;
    arguments.tensors.lse[row] = arguments.tensors.row_max[row] = negative_infinity();
    arguments.tensors.row_sum[row] = 0.0f;
  }
}

}  // namespace attn::hip
