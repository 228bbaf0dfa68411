// Forward of one block of rows: scores of all visible tiles, softmax rows, then the chain over keys.
#pragma once

#include "attn/host/visibility.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// Chains of q and k (or dout and v) for one tile: c[row][slot] for the rows of a block.
inline void tile_chains(const Geometry& geometry, const Input& keys, int64_t columns, int64_t tile, Slots seen, int64_t rows,
                        const float* left, float* rows_of_keys, float* panels_data, float* c, int64_t c_row) {
  const bool finite = read_keys(geometry, keys, columns, tile, seen, rows_of_keys);
  Panels panels;
  pack_transposed(rows_of_keys, padded(columns), columns, finite, panels_data, panels);
  const int64_t begin = larger(seen.begin - tile * kTile, 0) / kPanel * kPanel;
  const int64_t end = smaller(seen.end - tile * kTile, kTile);
  multiply(rows, Left{left, padded(columns), 1}, panels, 0, columns, c, c_row, true, Terms::all, begin, end);
}

inline void store_row_state(const AttentionCall& call, int64_t index, RowState state) {
  call.forward.lse[index] = positive_zero(log_sum_exp(state));
  call.forward.row_max[index] = state.max;
  call.forward.row_sum[index] = state.sum;
}

// Final scores of one row to the factors of v, in place; tiles of the block that the row does not see have no term.
inline void forward_row(const AttentionCall& call, const Geometry& geometry, int64_t row, Slots seen, float* x) {
  const Slots visible = geometry.visible(row);
  const int64_t base = seen.first_tile();
  RowState state = empty_row();
  for (int64_t tile = base; tile < seen.last_tile(); ++tile) {
    float* scores = x + (tile - base) * kTile;
    if (visible.empty() || tile < visible.first_tile() || tile >= visible.last_tile()) {
      fill(scores, kTile, negative_infinity());
      continue;
    }
    final_scores(geometry, row, visible, tile, scores);
    state = merge(state, tile_state(scores));
  }
  if (call.problem.sinks != nullptr) state = merge_sink(state, call.problem.sinks[geometry.head(row)]);
  store_row_state(call, geometry.row_index(row), state);
  for (int64_t tile = base; tile < seen.last_tile(); ++tile) {
    float* p = x + (tile - base) * kTile;
    tile_probabilities(p, state);
    if (call.dropout.threshold != 0) {
      bool kept[kTile];
      kept_pairs(geometry, call.dropout, row, visible, tile, kept);
      drop_probabilities(call.dropout, kept, p);
    }
  }
}

inline void attention_forward(const AttentionCall& call, const RowBlock& block, float* base) {
  const AttentionProblem& problem = call.problem;
  const Geometry geometry(call, block.batch, block.kv_head);
  Arena arena{base};
  const BlockScratch scratch(arena, call.row_limit, call.tile_limit, problem.head_dim, problem.value_dim, false, false);
  const int64_t rows = block.end - block.begin;
  const Slots seen = union_of(geometry, block.begin, block.end);
  const int64_t first_tile = seen.first_tile(), tiles = seen.empty() ? 0 : seen.last_tile() - first_tile;
  const int64_t width = score_row(tiles);

  read_queries(geometry, problem.q, problem.dtype, block.begin, block.end, problem.head_dim, scratch.q);
  for (int64_t tile = 0; tile < tiles; ++tile)
    tile_chains(geometry, problem.k, problem.head_dim, first_tile + tile, seen, rows, scratch.q, scratch.tile, scratch.k_panels,
                scratch.scores + tile * kTile, width);
  for (int64_t r = 0; r < rows; ++r) forward_row(call, geometry, block.begin + r, seen, scratch.scores + r * width);

  const int64_t out_row = padded(problem.value_dim);
  fill(scratch.sums, rows * out_row, 0.0f);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = (first_tile + tile) * kTile;
    const bool finite = read_keys(geometry, problem.v, problem.value_dim, first_tile + tile, seen, scratch.tile);
    Panels panels;
    pack_rows(scratch.tile, out_row, kTile, problem.value_dim, finite, scratch.v_panels, panels);
    multiply(rows, Left{scratch.scores + tile * kTile, width, 1}, panels, larger(seen.begin - begin, 0), smaller(seen.end - begin, kTile),
             scratch.sums, out_row, false, Terms::unmasked);
  }
  const Output& out = call.forward.out;
  for (int64_t r = 0; r < rows; ++r)
    write(scratch.sums + r * out_row, 1.0f, problem.value_dim, out.data, call.forward.out_dtype,
          geometry.row_offset(out.strides, block.begin + r), out.strides.column);
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
