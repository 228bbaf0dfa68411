// Device view of a call: batch items or packed segments, the rows of query heads that share a kv head, logical keys in slots, and the keys
// that a row sees.
#pragma once

#include "../tensors.h"
#include "attn/logical_keys.h"
#include "attn/ordered.h"
#include "attn/philox.h"

namespace attn::hip {

using engine::Config;
using engine::DType;
using engine::Strides;
using engine::Tensors;

// Parameter of every attention kernel: the call, and what its launch has made of it.
struct Attention {
  Config config;
  Tensors tensors;
  Strides bias_strides;
  int64_t group;                 // query heads of a kv head
  const int32_t* key_positions;  // stored positions of the kept keys [B, T]; null without a key mask
  const int32_t* key_counts;     // their number [B]
  float scale;
  Dropout dropout;  // without its seed
};

// An input or result with contiguous columns; strides in elements.
struct Array {
  void* data;
  DType dtype;
  int columns;
  Strides strides;

  // Element offset of a row.
  __device__ int64_t offset(int64_t batch, int64_t head, int64_t row) const {
    return batch * strides.batch + head * strides.head + row * strides.row;
  }

  __device__ float load(int64_t index) const {
    switch (dtype) {
      case DType::bfloat16:
        return to_float(static_cast<const bfloat16*>(data)[index]);
      case DType::float16:
        return to_float(static_cast<const float16*>(data)[index]);
      default:
        return static_cast<const float*>(data)[index];
    }
  }

  // The zero rule, then one rounding.
  __device__ void store(int64_t index, float value) const {
    const float result = positive_zero(value);
    switch (dtype) {
      case DType::bfloat16:
        static_cast<bfloat16*>(data)[index] = from_float<bfloat16>(result);
        break;
      case DType::float16:
        static_cast<float16*>(data)[index] = from_float<float16>(result);
        break;
      default:
        static_cast<float*>(data)[index] = result;
    }
  }
};

// Arrays in the layout of q, k, v and out, for inputs and gradients alike.
__device__ inline Array as_q(const Attention& attention, const void* data) {
  const Config& config = attention.config;
  return {const_cast<void*>(data), config.dtype, static_cast<int>(config.head_dim), config.q};
}
__device__ inline Array as_k(const Attention& attention, const void* data) {
  const Config& config = attention.config;
  return {const_cast<void*>(data), config.dtype, static_cast<int>(config.head_dim), config.k};
}
__device__ inline Array as_v(const Attention& attention, const void* data) {
  const Config& config = attention.config;
  return {const_cast<void*>(data), config.dtype, static_cast<int>(config.value_dim), config.v};
}
__device__ inline Array as_out(const Attention& attention, const void* data) {
  const Config& config = attention.config;
  return {const_cast<void*>(data), config.out_dtype, static_cast<int>(config.value_dim), config.out};
}

constexpr int64_t kNoRow = -1;

__device__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
__device__ inline int64_t clamped(int64_t value, int64_t low, int64_t high) { return larger(low, smaller(value, high)); }

// One batch item or segment. A kernel cannot raise: lengths and offsets are clamped into the arrays.
struct Item {
  int64_t batch;                   // index of the item
  int64_t outer;                   // its index on the batch axis of arrays: 0 when packed
  int64_t first_query, first_key;  // packed: row of query 0 and of key 0
  int64_t queries;
  int64_t keys;    // stored keys in use, T_b
  int64_t offset;  // q_start - k_start: query i is on the diagonal of stored key i + offset
  int32_t shift;   // slot of logical key 0
  int32_t count;   // logical keys
  const int32_t* positions;
};

__device__ inline int64_t segment_length(const int64_t* offsets, const int64_t* used, int64_t segment, int64_t total) {
  const int64_t begin = clamped(offsets[segment], 0, total), room = larger(0, clamped(offsets[segment + 1], 0, total) - begin);
  return used == nullptr ? room : clamped(used[segment], 0, room);
}

__device__ inline int64_t queries_of(const Attention& attention, int64_t batch) {
  const Config& config = attention.config;
  const Tensors& tensors = attention.tensors;
  return config.packed != 0 ? segment_length(tensors.cu_seqlens_q, tensors.seqlens_q, batch, config.queries) : config.queries;
}

__device__ inline int64_t keys_of(const Attention& attention, int64_t batch) {
  const Config& config = attention.config;
  const Tensors& tensors = attention.tensors;
  return config.packed != 0 ? segment_length(tensors.cu_seqlens_k, tensors.seqlens_k, batch, config.keys) : config.keys;
}

__device__ inline Item item_of(const Attention& attention, int64_t batch) {
  const Config& config = attention.config;
  const Tensors& tensors = attention.tensors;
  const bool packed = config.packed != 0, masked = attention.key_positions != nullptr;
  const int64_t queries = queries_of(attention, batch), stored = keys_of(attention, batch);
  const int64_t keys = tensors.kv_lengths == nullptr ? stored : clamped(tensors.kv_lengths[batch], 0, stored);
  const int64_t k_start = tensors.k_start == nullptr ? 0 : tensors.k_start[batch];
  return Item{batch,
              packed ? 0 : batch,
              packed ? clamped(tensors.cu_seqlens_q[batch], 0, config.queries) : 0,
              packed ? clamped(tensors.cu_seqlens_k[batch], 0, config.keys) : 0,
              queries,
              keys,
              tensors.q_start == nullptr ? keys - queries : tensors.q_start[batch] - k_start,
              static_cast<int32_t>(((k_start % kTile) + kTile) % kTile),
              masked ? attention.key_counts[batch] : static_cast<int32_t>(stored),
              masked ? attention.key_positions + batch * config.keys : nullptr};
}

// Keys [begin, end), as stored keys or as slots.
struct Range {
  int32_t begin, end;

  __device__ bool has(int32_t key) const { return key >= begin && key < end; }
  __device__ bool empty() const { return begin >= end; }
};

__device__ inline Range stored_range(const Config& config, const Item& item, int64_t query) {
  const int64_t diagonal = query + item.offset;
  int64_t begin = 0, end = item.keys;
  if (config.causal != 0) end = smaller(end, diagonal + 1);
  if (config.window_right >= 0) end = smaller(end, diagonal + config.window_right + 1);
  if (config.window_left >= 0) begin = larger(begin, diagonal - config.window_left);
  return begin < end ? Range{static_cast<int32_t>(begin), static_cast<int32_t>(end)} : Range{0, 0};
}

__device__ inline Range slot_range(const Config& config, const Item& item, int64_t query) {
  const Range stored = stored_range(config, item, query);
  if (stored.empty()) return stored;
  const int32_t first = logical_before(item.positions, item.count, stored.begin);
  const int32_t last = logical_before(item.positions, item.count, stored.end);
  return first < last ? Range{item.shift + first, item.shift + last} : Range{0, 0};
}

// Stored key in a slot, kNoRow where there is none.
__device__ inline int64_t stored_key(const Item& item, int32_t slot) {
  const int32_t logical = slot - item.shift;
  if (logical < 0 || logical >= item.count) return kNoRow;
  return item.positions == nullptr ? logical : item.positions[logical];
}

__device__ inline bool is_kept(const Attention& attention, const Item& item, int64_t key) {
  const uint8_t* mask = attention.tensors.key_padding_mask;
  return mask == nullptr || mask[item.batch * attention.config.keys + key] != 0;
}

// Row r of a kv head is query r mod S of head r div S of its group: the order in which dk and dv are summed.
struct Row {
  int64_t head, query;
  int64_t index;  // in LSE and the other row results; kNoRow: no such row
};

__device__ inline Row row_of(const Attention& attention, const Item& item, int64_t kv_head, int64_t row) {
  if (row >= attention.group * item.queries) return Row{0, 0, kNoRow};
  const int64_t head = kv_head * attention.group + row / item.queries, query = row % item.queries;
  return Row{head, query, (item.outer * attention.config.heads + head) * attention.config.queries + item.first_query + query};
}

// Element offset of a query row, or of a stored key.
__device__ inline int64_t query_offset(const Array& array, const Item& item, const Row& row) {
  return array.offset(item.outer, row.head, item.first_query + row.query);
}
__device__ inline int64_t key_offset(const Array& array, const Item& item, int64_t kv_head, int64_t key) {
  return array.offset(item.outer, kv_head, item.first_key + key);
}

}  // namespace attn::hip
