// joint_attn_softmax: one row [b, h, i] at a time, read into slots of its kept keys.
#pragma once

#include "attn/host/visibility.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// Position of one row of a softmax call.
struct SoftmaxRow {
  int64_t batch, head, query;
  const int32_t* stored;
  int64_t keys;  // kept keys
  int64_t tile, tiles;

  SoftmaxRow(const SoftmaxCall& call, int64_t row, int64_t slots = kTile) : stored(nullptr), keys(call.problem.keys), tile(slots) {
    const SoftmaxProblem& problem = call.problem;
    query = row % problem.queries;
    head = row / problem.queries % problem.heads;
    batch = row / (problem.queries * problem.heads);
    if (call.kept.stored != nullptr) {
      stored = call.kept.stored + batch * problem.keys;
      keys = call.kept.counts[batch];
    }
    tiles = (keys + tile - 1) / tile;
  }

  int64_t offset(const Strides& strides) const { return batch * strides.batch + head * strides.head + query * strides.row; }

  // Kept keys of a strided row to whole tiles, `empty` after the last key. `whole` holds a row of all keys.
  void gather(const Input& input, DType dtype, int64_t all, float empty, float* slots, float* whole) const {
    float* to = stored == nullptr ? slots : whole;
    read(input.data, dtype, offset(input.strides), input.strides.column, all, to);
    if (stored != nullptr)
      for (int64_t l = 0; l < keys; ++l) slots[l] = whole[stored[l]];
    fill(slots + keys, tiles * tile - keys, empty);
  }

  // Slots to a strided row of `all` keys, +0 at dropped ones.
  void scatter(const float* slots, const Output& output, DType dtype, int64_t all, float* whole) const {
    const float* from = slots;
    if (stored != nullptr) {
      fill(whole, all, 0.0f);
      for (int64_t l = 0; l < keys; ++l) whole[stored[l]] = slots[l];
      from = whole;
    }
    write(from, 1.0f, all, output.data, dtype, offset(output.strides), output.strides.column);
  }
};

inline void softmax_forward(const SoftmaxCall& call, int64_t index, float* scratch) {
  const SoftmaxRow row(call, index);
  float* whole = scratch + call.tile_limit * kTile;
  row.gather(call.problem.scores, call.problem.dtype, call.problem.keys, negative_infinity(), scratch, whole);
  RowState state = empty_row();
  for (int64_t tile = 0; tile < row.tiles; ++tile) state = merge(state, tile_state(scratch + tile * kTile));
  call.forward.row_max[index] = state.max;
  call.forward.row_sum[index] = state.sum;
  for (int64_t tile = 0; tile < row.tiles; ++tile) tile_probabilities(scratch + tile * kTile, state);
  row.scatter(scratch, call.forward.probs, call.forward.probs_dtype, call.problem.keys, whole);
}

inline void softmax_backward(const SoftmaxCall& call, int64_t index, float* scratch) {
  const SoftmaxRow row(call, index);
  const int64_t all = call.problem.keys;
  float *p = scratch, *dp = p + call.tile_limit * kTile, *whole = dp + call.tile_limit * kTile;
  row.gather(call.problem.scores, call.problem.dtype, all, negative_infinity(), p, whole);
  row.gather(call.backward.dprobs, call.backward.dprobs_dtype, all, 0.0f, dp, whole);
  const RowState state{call.backward.row_max[index], call.backward.row_sum[index]};
  float delta = 0.0f;
  for (int64_t tile = 0; tile < row.tiles; ++tile) {
    tile_probabilities(p + tile * kTile, state);
    delta = add(delta, tile_products(p + tile * kTile, dp + tile * kTile));
  }
  for (int64_t tile = 0; tile < row.tiles; ++tile) tile_gradients(p + tile * kTile, dp + tile * kTile, delta);
  row.scatter(dp, call.backward.dscores, call.problem.dtype, all, whole);
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
