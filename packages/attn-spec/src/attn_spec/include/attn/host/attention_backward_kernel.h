// Backward: P is computed again from (row max, row sum). One sweep over row blocks can give dq, dk and dv at once, since the chains of dk
// and dv ascend over the same rows; split by rows and by keys it gives the same bits in parallel.
#pragma once

#include "attn/host/attention_forward_kernel.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

ATTN_HD Slots overlap(Slots a, Slots b) { return Slots{larger(a.begin, b.begin), smaller(a.end, b.end)}; }

// delta of one row and its dsink, from P and dP of every tile that it sees.
inline float row_delta(const AttentionCall& call, const Geometry& geometry, int64_t row, Slots visible, int64_t base, const float* p,
                       const float* dp) {
  const int64_t index = geometry.row_index(row);
  float delta = 0.0f;  // a tile without an unmasked slot adds +0
  if (!visible.empty())
    for (int64_t tile = visible.first_tile(); tile < visible.last_tile(); ++tile)
      delta = add(delta, tile_products(p + (tile - base) * kTile, dp + (tile - base) * kTile));
  if (call.backward.dlse != nullptr) delta = sub(delta, call.backward.dlse[index]);
  call.delta[index] = delta;
  if (call.problem.sinks != nullptr) {
    const float sink = call.problem.sinks[geometry.head(row)];
    const RowState state{call.backward.row_max[index], call.backward.row_sum[index]};
    call.dsink[index] = sink == negative_infinity() ? 0.0f : mul(-probability(sink, state), delta);
  }
  return delta;
}

// One row of a block: chains of scores become factors of dO, chains of dP become dS. `limit` bounds the slots that are computed.
inline void backward_row(const AttentionCall& call, const Geometry& geometry, int64_t row, Slots limit, Slots seen, bool find_delta,
                         bool* kept, float* p, float* dp) {
  const Slots visible = overlap(geometry.visible(row), limit);
  const int64_t base = seen.first_tile(), index = geometry.row_index(row);
  const RowState state{call.backward.row_max[index], call.backward.row_sum[index]};
  const bool dropout = call.dropout.threshold != 0;
  const auto is_visible = [&](int64_t tile) { return !visible.empty() && tile >= visible.first_tile() && tile < visible.last_tile(); };
  for (int64_t tile = base; tile < seen.last_tile(); ++tile) {
    float *x = p + (tile - base) * kTile, *dx = dp + (tile - base) * kTile;
    if (!is_visible(tile)) {
      fill(x, kTile, bits_to_float(kMaskedBits));
      fill(dx, kTile, bits_to_float(kMaskedBits));
      continue;
    }
    final_scores(geometry, row, visible, tile, x);
    tile_probabilities(x, state);
    if (!dropout) continue;
    kept_pairs(geometry, call.dropout, row, visible, tile, kept + (tile - base) * kTile);
    drop_gradients(call.dropout, kept + (tile - base) * kTile, dx);
  }
  const float delta = find_delta ? row_delta(call, geometry, row, visible, base, p, dp) : call.delta[index];
  for (int64_t tile = base; tile < seen.last_tile(); ++tile) {
    if (!is_visible(tile)) continue;
    float *x = p + (tile - base) * kTile, *dx = dp + (tile - base) * kTile;
    tile_gradients(x, dx, delta);
    if (dropout) drop_probabilities(call.dropout, kept + (tile - base) * kTile, x);
  }
}

struct BlockOperands {
  Slots seen;
  bool q_finite, dout_finite;
};

// Factors of dO (scratch.scores) and dS (scratch.products) of rows [begin, end) over the slots of `limit` that one of them sees.
inline BlockOperands backward_block(const AttentionCall& call, const Geometry& geometry, int64_t begin, int64_t end, Slots limit,
                                    bool find_delta, const BlockScratch& scratch) {
  const AttentionProblem& problem = call.problem;
  BlockOperands operands{};
  operands.seen = overlap(union_of(geometry, begin, end), limit);
  if (operands.seen.empty()) operands.seen = Slots{0, 0};
  const Slots seen = operands.seen;
  if (seen.empty() && !find_delta) return operands;
  const int64_t first_tile = seen.first_tile(), tiles = seen.last_tile() - first_tile, width = score_row(tiles), rows = end - begin;
  operands.q_finite = read_queries(geometry, problem.q, problem.dtype, begin, end, problem.head_dim, scratch.q);
  operands.dout_finite = read_queries(geometry, call.backward.dout, call.backward.dout_dtype, begin, end, problem.value_dim, scratch.dout);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    tile_chains(geometry, problem.k, problem.head_dim, first_tile + tile, seen, rows, scratch.q, scratch.tile, scratch.k_panels,
                scratch.scores + tile * kTile, width);
    tile_chains(geometry, problem.v, problem.value_dim, first_tile + tile, seen, rows, scratch.dout, scratch.tile, scratch.v_panels,
                scratch.products + tile * kTile, width);
  }
  for (int64_t r = 0; r < rows; ++r)
    backward_row(call, geometry, begin + r, limit, seen, find_delta, scratch.kept, scratch.scores + r * width,
                 scratch.products + r * width);
  return operands;
}

inline void query_gradients(const AttentionCall& call, const Geometry& geometry, const RowBlock& block, Slots seen,
                            const BlockScratch& scratch) {
  const AttentionProblem& problem = call.problem;
  const int64_t rows = block.end - block.begin, row = padded(problem.head_dim);
  const int64_t width = score_row(seen.last_tile() - seen.first_tile());
  fill(scratch.sums, rows * row, 0.0f);
  for (int64_t tile = seen.first_tile(); tile < seen.last_tile(); ++tile) {
    const bool finite = read_keys(geometry, problem.k, problem.head_dim, tile, seen, scratch.tile);
    Panels panels;
    pack_rows(scratch.tile, row, kTile, problem.head_dim, finite, scratch.k_panels, panels);
    const Left left{scratch.products + (tile - seen.first_tile()) * kTile, width, 1};
    multiply(rows, left, panels, larger(seen.begin - tile * kTile, 0), smaller(seen.end - tile * kTile, kTile), scratch.sums, row, false,
             Terms::unmasked);
  }
  const bool packed = problem.cu_seqlens_q != nullptr;
  const Strides strides =
      packed ? Strides{0, problem.head_dim, problem.heads * problem.head_dim, 1}
             : Strides{problem.heads * problem.queries * problem.head_dim, problem.queries * problem.head_dim, problem.head_dim, 1};
  for (int64_t r = 0; r < rows; ++r)
    write(scratch.sums + r * row, problem.scale, problem.head_dim, call.backward.dq, problem.dtype,
          geometry.row_offset(strides, block.begin + r), 1);
}

// Appends the terms of one block of rows to the chains of dk and dv.
inline void append_key_terms(const AttentionCall& call, const Geometry& geometry, const RowBlock& block, const BlockOperands& operands,
                             int64_t first_tile, const BlockScratch& scratch) {
  const AttentionProblem& problem = call.problem;
  const int64_t rows = block.end - block.begin, d = padded(problem.head_dim), v = padded(problem.value_dim);
  const Slots seen = operands.seen;
  const int64_t width = score_row(seen.last_tile() - seen.first_tile());
  Panels q, dout;
  pack_rows(scratch.q, d, rows, problem.head_dim, operands.q_finite, scratch.q_panels, q);
  pack_rows(scratch.dout, v, rows, problem.value_dim, operands.dout_finite, scratch.dout_panels, dout);
  for (int64_t tile = seen.first_tile(); tile < seen.last_tile(); ++tile) {
    const int64_t begin = larger(seen.begin, tile * kTile), end = smaller(seen.end, (tile + 1) * kTile);
    int64_t first = rows, last = 0;
    for (int64_t r = 0; r < rows; ++r) {
      if (overlap(geometry.visible(block.begin + r), Slots{begin, end}).empty()) continue;
      first = smaller(first, r);
      last = r + 1;
    }
    if (first >= last) continue;
    const int64_t column = begin - seen.first_tile() * kTile, slot = begin - first_tile * kTile;
    if (call.backward.dk != nullptr)
      multiply(end - begin, Left{scratch.products + column, 1, width}, q, first, last, scratch.dk + slot * d, d, false, Terms::unmasked);
    if (call.backward.dv != nullptr)
      multiply(end - begin, Left{scratch.scores + column, 1, width}, dout, first, last, scratch.dv + slot * v, v, false, Terms::unmasked);
  }
}

inline void store_key_gradients(const Geometry& geometry, int64_t first_tile, int64_t last_tile, const float* sums, int64_t columns,
                                float scale, void* data) {
  if (data == nullptr) return;
  const AttentionProblem& problem = geometry.problem;
  const bool packed = problem.cu_seqlens_k != nullptr;
  const Strides strides = packed ? Strides{0, columns, problem.kv_heads * columns, 1}
                                 : Strides{problem.kv_heads * problem.keys * columns, problem.keys * columns, columns, 1};
  const int64_t begin = larger(first_tile * kTile, geometry.shift);
  const int64_t end = smaller(last_tile * kTile, geometry.shift + geometry.logical_keys);
  for (int64_t slot = begin; slot < end; ++slot)
    write(sums + (slot - first_tile * kTile) * padded(columns), scale, columns, data, problem.dtype,
          geometry.key_offset(strides, geometry.stored_key(slot - geometry.shift)), 1);
}

inline void attention_backward(const AttentionCall& call, const BackwardPart& part, float* base) {
  const AttentionProblem& problem = call.problem;
  const Geometry geometry(call, call.blocks[part.first_block].batch, call.blocks[part.first_block].kv_head);
  Arena arena{base};
  const BlockScratch scratch(arena, call.row_limit, call.tile_limit, problem.head_dim, problem.value_dim, true, part.keys);
  const Slots limit{part.first_tile * kTile, part.last_tile * kTile};
  if (part.keys) {
    fill(scratch.dk, (part.last_tile - part.first_tile) * kTile * padded(problem.head_dim), 0.0f);
    fill(scratch.dv, (part.last_tile - part.first_tile) * kTile * padded(problem.value_dim), 0.0f);
  }
  for (int64_t index = part.first_block; index < part.last_block; ++index) {
    const RowBlock& block = call.blocks[index];
    const BlockOperands operands = backward_block(call, geometry, block.begin, block.end, limit, part.rows, scratch);
    if (part.rows && call.backward.dq != nullptr) query_gradients(call, geometry, block, operands.seen, scratch);
    if (part.keys && !operands.seen.empty()) append_key_terms(call, geometry, block, operands, part.first_tile, scratch);
  }
  if (part.keys) {
    store_key_gradients(geometry, part.first_tile, part.last_tile, scratch.dk, problem.head_dim, problem.scale, call.backward.dk);
    store_key_gradients(geometry, part.first_tile, part.last_tile, scratch.dv, problem.value_dim, 1.0f, call.backward.dv);
  }
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
