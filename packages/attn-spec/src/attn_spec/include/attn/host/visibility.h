// Geometry of one batch item (or packed segment) and one kv head: rows, logical keys in slots, and the slots that each row sees.
#pragma once

#include "attn/host/pack.h"
#include "attn/host/plan.h"
#include "attn/host/softmax_row.h"
#include "attn/logical_keys.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

ATTN_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ATTN_HD int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Geometry {
  const AttentionProblem& problem;
  int64_t batch, kv_head;
  int64_t group;        // query heads of the kv head
  int64_t queries;      // S of this item
  int64_t keys;         // T_b: stored keys in use
  int64_t first_query;  // offset of the item in packed arrays
  int64_t first_key;
  int64_t q_start, k_start;
  int64_t shift;  // slot of logical key 0
  int64_t logical_keys;
  const int32_t* stored;  // stored index of a logical key; null: the same

  Geometry(const AttentionCall& call, int64_t b, int64_t kv) : problem(call.problem), batch(b), kv_head(kv), stored(nullptr) {
    group = problem.heads / problem.kv_heads;
    const bool packed = problem.cu_seqlens_q != nullptr;
    first_query = packed ? problem.cu_seqlens_q[b] : 0;
    first_key = packed ? problem.cu_seqlens_k[b] : 0;
    queries = !packed ? problem.queries : problem.seqlens_q ? problem.seqlens_q[b] : problem.cu_seqlens_q[b + 1] - first_query;
    keys = !packed             ? (problem.kv_lengths ? problem.kv_lengths[b] : problem.keys)
           : problem.seqlens_k ? problem.seqlens_k[b]
                               : problem.cu_seqlens_k[b + 1] - first_key;
    k_start = problem.k_start ? problem.k_start[b] : 0;
    q_start = problem.q_start ? problem.q_start[b] : k_start + keys - queries;
    shift = k_start % kTile;
    logical_keys = keys;
    if (call.kept.stored != nullptr) {
      stored = call.kept.stored + b * problem.keys;
      logical_keys = call.kept.counts[b];
    }
  }

  int64_t rows() const { return group * queries; }
  int64_t head(int64_t row) const { return kv_head * group + row / queries; }
  int64_t query(int64_t row) const { return row % queries; }
  int64_t stored_key(int64_t logical) const { return stored ? stored[logical] : logical; }

  // Index of a row in LSE and the other row results.
  int64_t row_index(int64_t row) const {
    if (problem.cu_seqlens_q != nullptr) return head(row) * problem.queries + first_query + query(row);
    return (batch * problem.heads + head(row)) * problem.queries + query(row);
  }

  // Element offset of a row in an array laid out as q.
  int64_t row_offset(const Strides& strides, int64_t row) const {
    const int64_t item = problem.cu_seqlens_q != nullptr ? 0 : batch * strides.batch;
    return item + head(row) * strides.head + (first_query + query(row)) * strides.row;
  }

  // Element offset of stored key j in an array laid out as k.
  int64_t key_offset(const Strides& strides, int64_t j) const {
    const int64_t item = problem.cu_seqlens_k != nullptr ? 0 : batch * strides.batch;
    return item + kv_head * strides.head + (first_key + j) * strides.row;
  }

  // First logical key at or after stored key j.
  int64_t logical_at(int64_t j) const { return logical_before(stored, logical_keys, j); }

  // Slots of the keys that a row sees, before scores of -inf.
  Slots visible(int64_t row) const {
    const Slots none{shift, shift};
    if (problem.query_mask != nullptr && problem.query_mask[batch * problem.queries + query(row)] == 0) return none;
    const int64_t diagonal = q_start + query(row) - k_start;
    int64_t first = 0, last = keys;
    if (problem.causal) last = smaller(last, diagonal + 1);
    if (problem.window_right >= 0) last = smaller(last, diagonal + problem.window_right + 1);
    if (problem.window_left >= 0) first = larger(first, diagonal - problem.window_left);
    if (first >= last) return none;
    const Slots slots{logical_at(first) + shift, logical_at(last) + shift};
    return slots.empty() ? none : slots;
  }
};

// Smallest range that covers the slots of rows [begin, end).
inline Slots union_of(const Geometry& geometry, int64_t begin, int64_t end) {
  Slots all{0, 0};
  for (int64_t row = begin; row < end; ++row) {
    const Slots slots = geometry.visible(row);
    if (slots.empty()) continue;
    all = all.empty() ? slots : Slots{smaller(all.begin, slots.begin), larger(all.end, slots.end)};
  }
  return all;
}

// Rows [begin, end) of q or dout as binary32 [rows][width rounded up]; rows that see no key are zero. True when all are finite.
inline bool read_queries(const Geometry& geometry, const Input& input, DType dtype, int64_t begin, int64_t end, int64_t columns,
                         float* to) {
  bool finite = true;
  const int64_t width = padded(columns);
  for (int64_t row = begin; row < end; ++row, to += width) {
    fill(to, width, 0.0f);
    if (geometry.visible(row).empty()) continue;
    finite &= read(input.data, dtype, geometry.row_offset(input.strides, row), input.strides.column, columns, to);
  }
  return finite;
}

// Keys of one tile of slots as binary32 [kTile][width rounded up]; slots outside `seen` are zero. True when all are finite.
inline bool read_keys(const Geometry& geometry, const Input& input, int64_t columns, int64_t tile, Slots seen, float* to) {
  bool finite = true;
  const int64_t width = padded(columns);
  for (int64_t slot = tile * kTile; slot < (tile + 1) * kTile; ++slot, to += width) {
    if (slot < seen.begin || slot >= seen.end) {
      fill(to, width, 0.0f);
      continue;
    }
    const int64_t offset = geometry.key_offset(input.strides, geometry.stored_key(slot - geometry.shift));
    finite &= read(input.data, geometry.problem.dtype, offset, input.strides.column, columns, to);
    fill(to + columns, width - columns, 0.0f);
  }
  return finite;
}

// Final scores of one row and tile: scaled, biased, -inf where not visible.
inline void final_scores(const Geometry& geometry, int64_t row, Slots visible, int64_t tile, float* x) {
  const AttentionProblem& problem = geometry.problem;
  const int64_t begin = tile * kTile;
  finish_scores(x, problem.scale, begin, visible);
  if (problem.bias == nullptr) return;
  const Strides& strides = problem.bias_strides;
  const float* bias = problem.bias + geometry.batch * strides.batch + geometry.head(row) * strides.head + geometry.query(row) * strides.row;
  const int64_t first = larger(begin, visible.begin), last = smaller(begin + kTile, visible.end);
  for (int64_t slot = first; slot < last; ++slot)
    x[slot - begin] = add(x[slot - begin], bias[geometry.stored_key(slot - geometry.shift) * strides.column]);
}

// Whether dropout keeps the pair in each slot of a tile; slots without a key are left out.
inline void kept_pairs(const Geometry& geometry, const Dropout& dropout, int64_t row, Slots visible, int64_t tile, bool* kept) {
  const int64_t begin = tile * kTile;
  const int64_t first = larger(begin, visible.begin), last = smaller(begin + kTile, visible.end);
  const uint32_t batch = geometry.problem.dropout_item + static_cast<uint32_t>(geometry.batch);
  const uint32_t head = geometry.problem.dropout_head + static_cast<uint32_t>(geometry.head(row));
  const uint32_t query = static_cast<uint32_t>(geometry.query(row));
  for (int i = 0; i < kTile; ++i) kept[i] = false;
  for (int64_t slot = first; slot < last; ++slot)
    kept[slot - begin] = keeps(dropout, batch, head, query, static_cast<uint32_t>(geometry.stored_key(slot - geometry.shift)));
}

// P to the factor of v: RN(P * keep_scale), no term where dropped.
inline void drop_probabilities(const Dropout& dropout, const bool* kept, float* p) {
  for (int i = 0; i < kTile; ++i) p[i] = (kept[i] && !is_masked(p[i])) ? mul(p[i], dropout.keep_scale) : bits_to_float(kMaskedBits);
}

inline void drop_gradients(const Dropout& dropout, const bool* kept, float* dp) {
  for (int i = 0; i < kTile; ++i) dp[i] = kept[i] ? mul(dp[i], dropout.keep_scale) : 0.0f;
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
