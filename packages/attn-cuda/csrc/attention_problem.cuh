// The problem as the kernels see it: batch items or packed segments, rows of query heads that share a kv head, logical keys, visible
// ranges.
#pragma once

#include "attention_array.cuh"
#include "attn/logical_keys.h"
#include "launch.cuh"

namespace attn_cuda {

constexpr int kWarpRows = 8;  // query rows that a warp owns, where it owns rows

// Parameter of every attention kernel.
struct Attention {
  Array q, k, v;
  int64_t batch, queries, keys;  // packed: totals of queries and keys
  int32_t heads, kv_heads, group, head_dim, value_dim;
  const uint8_t* query_mask;
  const uint8_t* key_mask;
  const int32_t* key_positions;  // stored positions of the kept keys [B, T], with a key mask
  const int32_t* key_counts;     // their number [B]
  const int64_t* kv_lengths;
  const int64_t* q_start;
  const int64_t* k_start;
  const int64_t* cu_seqlens_q;
  const int64_t* cu_seqlens_k;
  const int64_t* seqlens_q;
  const int64_t* seqlens_k;
  const float* sinks;
  const float* bias;
  int64_t bias_batch, bias_head, bias_query, bias_key;
  bool causal;
  int64_t window_left, window_right;
  float scale;
};

// One batch item or segment. Slots count from the tile boundary before stored key 0: logical key l is in slot `shift` + l.
struct Item {
  int64_t batch;
  int64_t first_query, first_key;  // packed: row of query 0 and of key 0
  int32_t queries, keys;           // rows of this item
  int32_t used;                    // T_b
  int32_t count;                   // logical keys
  int32_t shift;
  const int32_t* positions;  // null: logical key l is stored key l
  int64_t offset;            // q_start - k_start: stored key j is on the diagonal of query j - offset
};

__host__ __device__ __forceinline__ int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : (value > high ? high : value);
}

__device__ __forceinline__ int32_t segment_length(const int64_t* offsets, const int64_t* used, int64_t item, int64_t total) {
  const int64_t begin = clamped(offsets[item], 0, total), end = clamped(offsets[item + 1], 0, total);
  const int64_t room = end > begin ? end - begin : 0;
  return static_cast<int32_t>(used == nullptr ? room : clamped(used[item], 0, room));
}

__device__ __forceinline__ Item item_of(const Attention& problem, int64_t batch) {
  Item item{};
  item.batch = batch;
  int64_t k_start = 0;
  if (problem.cu_seqlens_q != nullptr) {
    item.first_query = clamped(problem.cu_seqlens_q[batch], 0, problem.queries);
    item.first_key = clamped(problem.cu_seqlens_k[batch], 0, problem.keys);
    item.queries = segment_length(problem.cu_seqlens_q, problem.seqlens_q, batch, problem.queries);
    item.keys = segment_length(problem.cu_seqlens_k, problem.seqlens_k, batch, problem.keys);
    item.used = item.keys;
  } else {
    item.queries = static_cast<int32_t>(problem.queries);
    item.keys = static_cast<int32_t>(problem.keys);
    item.used = problem.kv_lengths == nullptr ? item.keys : static_cast<int32_t>(clamped(problem.kv_lengths[batch], 0, problem.keys));
    if (problem.k_start != nullptr) k_start = problem.k_start[batch];
  }
  item.offset = item.used - item.queries;
  if (problem.q_start != nullptr) item.offset = problem.q_start[batch] - k_start;
  item.shift = static_cast<int32_t>(((k_start % attn::kTile) + attn::kTile) % attn::kTile);
  item.count = item.keys;
  if (problem.key_positions != nullptr) {
    item.positions = problem.key_positions + batch * problem.keys;
    item.count = problem.key_counts[batch];
  }
  return item;
}

// Slots [begin, end) that a row sees; begin > end when it sees none. -inf scores are masked besides.
struct Range {
  int32_t begin, end;

  __device__ __forceinline__ bool has(int32_t slot) const { return slot >= begin && slot < end; }
};

__device__ __forceinline__ Range no_range() { return Range{INT32_MAX, 0}; }

// The query mask is left out: see range_of.
__device__ __forceinline__ Range positional_range(const Attention& problem, const Item& item, int32_t query) {
  const int64_t diagonal = query + item.offset;
  int64_t begin = 0, end = item.used;
  if (problem.causal && diagonal + 1 < end) end = diagonal + 1;
  if (problem.window_right >= 0 && diagonal + problem.window_right + 1 < end) end = diagonal + problem.window_right + 1;
  if (problem.window_left >= 0 && diagonal - problem.window_left > begin) begin = diagonal - problem.window_left;
  if (begin >= end) return no_range();
  const int32_t first = attn::logical_before(item.positions, item.count, static_cast<int32_t>(begin));
  const int32_t last = attn::logical_before(item.positions, item.count, static_cast<int32_t>(end));
  return first < last ? Range{item.shift + first, item.shift + last} : no_range();
}

__device__ __forceinline__ Range range_of(const Attention& problem, const Item& item, int32_t query) {
  if (problem.query_mask != nullptr && problem.query_mask[item.batch * problem.queries + query] == 0) return no_range();
  return positional_range(problem, item, query);
}

// The rows of one kv head, those of a query side by side: row r is query r div group of head r mod group. So a block of rows has few
// queries, and sees few keys that some of its rows do not.
struct Row {
  int32_t head, query;  // head < 0: no such row
};

__device__ __forceinline__ int64_t rows_of(const Attention& problem, const Item& item) {
  return static_cast<int64_t>(problem.group) * item.queries;
}

__device__ __forceinline__ Row row_of(const Attention& problem, const Item& item, int32_t kv_head, int64_t row) {
  if (row >= rows_of(problem, item)) return Row{-1, 0};
  const int64_t query = row / problem.group;
  return Row{static_cast<int32_t>(kv_head * problem.group + (row - query * problem.group)), static_cast<int32_t>(query)};
}

// Element offset of a query row in q or dout.
__device__ __forceinline__ int64_t query_offset(const Array& array, const Item& item, Row row) {
  return item.batch * array.batch + row.head * array.head + (item.first_query + row.query) * array.row;
}

// Element offset of stored key 0 in k or v.
__device__ __forceinline__ int64_t key_base(const Array& array, const Item& item, int32_t kv_head) {
  return item.batch * array.batch + kv_head * array.head + item.first_key * array.row;
}

// Element offset of the key in `slot`, kNoRow where there is none.
__device__ __forceinline__ int64_t key_offset(const Array& array, const Item& item, int64_t base, int32_t slot) {
  const int32_t logical = slot - item.shift;
  if (logical < 0 || logical >= item.count) return kNoRow;
  return base + (item.positions == nullptr ? logical : item.positions[logical]) * array.row;
}

// Index of a row in LSE, row maximum and row sum, and element offsets in contiguous results with `width` columns.
__device__ __forceinline__ int64_t row_index(const Attention& problem, const Item& item, Row row) {
  return (problem.cu_seqlens_q != nullptr ? row.head : item.batch * problem.heads + row.head) * problem.queries + item.first_query +
         row.query;
}

__device__ __forceinline__ int64_t query_result(const Attention& problem, const Item& item, Row row, int32_t width) {
  if (problem.cu_seqlens_q != nullptr) return ((item.first_query + row.query) * problem.heads + row.head) * width;
  return row_index(problem, item, row) * width;
}

__device__ __forceinline__ int64_t key_result(const Attention& problem, const Item& item, int32_t kv_head, int32_t logical, int32_t width) {
  const int64_t stored = item.positions == nullptr ? logical : item.positions[logical];
  if (problem.cu_seqlens_q != nullptr) return ((item.first_key + stored) * problem.kv_heads + kv_head) * width;
  return ((item.batch * problem.kv_heads + kv_head) * problem.keys + stored) * width;
}

__device__ __forceinline__ int64_t stored_key(const Item& item, int32_t slot) {
  const int32_t logical = slot - item.shift;
  return item.positions == nullptr ? logical : item.positions[logical];
}

// Bias of a row; its keys are bias_key apart.
__device__ __forceinline__ const float* bias_of_row(const Attention& problem, const Item& item, Row row) {
  return problem.bias + (item.batch * problem.bias_batch + row.head * problem.bias_head + row.query * problem.bias_query);
}

// P or dS of a masked pair. It has no term; against a finite operand its zero product changes nothing but the sign of a zero.
constexpr uint32_t kMaskedBits = 0x80000000u;

__device__ __forceinline__ float masked_value() { return bits_to_float(kMaskedBits); }
__device__ __forceinline__ bool is_masked(float value) { return float_to_bits(value) == kMaskedBits; }

// Work of one block: `block` of the blocks of one kv head of one item.
struct Work {
  Item item;
  int32_t kv_head;
  int64_t block;
  int64_t k_base, v_base;  // of stored key 0
};

// Work number `id`, called by one thread. Dense: blocks of an item are `per_item`, and the last ones, which see most keys under causality,
// start first. Packed: `plan` [batch + 1] holds the number of blocks before each segment; false for blocks beyond the last.
__device__ __forceinline__ bool find_work(const Attention& problem, int64_t id, int64_t per_item, const int64_t* plan, Work* work) {
  if (plan == nullptr) {
    const int64_t items = problem.batch * problem.kv_heads;
    const int64_t which = id / items, item = id - which * items;
    work->block = per_item - 1 - which;
    work->kv_head = static_cast<int32_t>(item % problem.kv_heads);
    work->item = item_of(problem, item / problem.kv_heads);
    return true;
  }
  const int64_t block = id / problem.kv_heads;
  work->kv_head = static_cast<int32_t>(id - block * problem.kv_heads);
  if (block >= plan[problem.batch]) return false;
  int64_t low = 0, high = problem.batch;  // plan[low] <= block < plan[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (plan[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  work->item = item_of(problem, low);
  work->block = plan[low + 1] - 1 - block;
  return true;
}

// use(id) for the works below `count` that fall to this block, in turns of opposite direction, so that heavy and light ones meet.
template <typename Use>
__device__ __forceinline__ void each_turn(int64_t count, Use use) {
#pragma unroll 1
  for (int64_t turn = 0; turn * gridDim.x < count; ++turn) {
    const int64_t id = turn * gridDim.x + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    __syncthreads();
    if (id < count) use(id);
  }
}

// The block's work in shared memory, where it costs no registers; false: nothing to do.
__device__ __forceinline__ bool share_work(const Attention& problem, int64_t id, int64_t per_item, const int64_t* plan, Work* work) {
  if (threadIdx.x == 0) {
    if (find_work(problem, id, per_item, plan, work)) {
      work->k_base = key_base(problem.k, work->item, work->kv_head);
      work->v_base = key_base(problem.v, work->item, work->kv_head);
    } else {
      work->block = -1;
    }
  }
  __syncthreads();
  return work->block >= 0;
}

}  // namespace attn_cuda
