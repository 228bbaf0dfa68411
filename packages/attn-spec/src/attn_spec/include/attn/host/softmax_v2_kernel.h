// joint_attn_softmax of ordered-v2: one row at a time, in tiles of 1024 slots, one exponential a slot.
#pragma once

#include <initializer_list>

#include "attn/host/softmax_kernel.h"
#include "attn/ordered_v2.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// v2::exp_nonpositive in every lane, without its selects: arguments below the least one, -inf included, are replaced by 0 before and the
// result by +0 after; NaN passes through.
ATTN_HD void exp_v2(Vec (&x)[kLockstep]) {
  Vec rounded[kLockstep], p[kLockstep];
  Mask none[kLockstep];
  const Vec least = broadcast(bits_to_float(v2::kLeastBits)), round = broadcast(bits_to_float(v2::kRoundBits));
  lockstep([&](int i) { none[i] = x[i] < least; });
  lockstep([&](int i) { x[i] = none[i] ? Vec{} : x[i]; });
  lockstep([&](int i) { rounded[i] = fma(x[i], broadcast(bits_to_float(v2::kLog2EBits)), round); });
  lockstep([&](int i) { p[i] = rounded[i] - round; });
  lockstep([&](int i) { x[i] = fma(p[i], broadcast(bits_to_float(v2::kLn2HighBits)), x[i]); });
  lockstep([&](int i) { x[i] = fma(p[i], broadcast(bits_to_float(v2::kLn2LowBits)), x[i]); });
  lockstep([&](int i) { p[i] = broadcast(bits_to_float(v2::kExp6Bits)); });
  for (const uint32_t coefficient : {v2::kExp5Bits, v2::kExp4Bits, v2::kExp3Bits, v2::kExp2Bits})
    lockstep([&](int i) { p[i] = fma(p[i], x[i], broadcast(bits_to_float(coefficient))); });
  lockstep([&](int i) { p[i] = fma(p[i], x[i], broadcast(1.0f)); });
  lockstep([&](int i) { p[i] = fma(p[i], x[i], broadcast(1.0f)); });
  lockstep([&](int i) {
    const Mask bits = reinterpret_cast<Mask>(p[i]) + (reinterpret_cast<Mask>(rounded[i]) << 23);
    const Vec result = p[i] == p[i] ? reinterpret_cast<Vec>(bits) : p[i];
    x[i] = none[i] ? Vec{} : result;
  });
}

// tree_sum over the slots of a tile of ordered-v2, which it destroys.
inline float long_tile_sum(float* slots) {
  for (int half = v2::kTile / 2; half >= kTile; half /= 2)
    for (int i = 0; i < half; ++i) slots[i] = add(slots[i], slots[i + half]);
  return tile_sum(slots);
}

// Scores of one tile to their exponentials, +0 where masked; the state of the tile. `terms` holds a tile.
inline RowState long_tile_state(float* x, float* terms) {
  float max = negative_infinity();
  bool has_nan = false;
  for (int part = 0; part < v2::kTile; part += kTile) {
    const float found = tile_max_of_numbers(x + part);
    max = found > max ? found : max;
    has_nan |= tile_has_nan(x + part);
  }
  const float not_a_number = bits_to_float(kQuietNaNBits);
  if (has_nan) max = not_a_number;
  if (max == negative_infinity()) {
    fill(x, v2::kTile, 0.0f);
    return empty_row();
  }
  for (int begin = 0; begin < v2::kTile; begin += kLockstep * kLanes) {
    Vec score[kLockstep], value[kLockstep];
    lockstep([&](int i) { score[i] = load(x + begin + i * kLanes); });
    lockstep([&](int i) { value[i] = score[i] - max; });
    exp_v2(value);
    lockstep([&](int i) {
      const Vec e = score[i] == negative_infinity() ? Vec{} : value[i];
      store(x + begin + i * kLanes, e);
      store(terms + begin + i * kLanes, e);
    });
  }
  const float sum = long_tile_sum(terms);
  return RowState{max, sum};
}

// Exponentials of a row to P, kMaskedBits where masked; `scores` says where. `tiles` are the states of the tiles.
inline void long_probabilities(float* e, const float* scores, const RowState* tiles, int64_t count, RowState row) {
  const float masked = bits_to_float(kMaskedBits);
  for (int64_t tile = 0; tile < count; ++tile) {
    const bool live = is_live(tiles[tile]);
    const float factor = live ? v2::tile_factor(tiles[tile].max, row) : 0.0f;
    for (int64_t i = tile * v2::kTile; i < (tile + 1) * v2::kTile; ++i) {
      const float p = mul(e[i], factor);
      e[i] = scores[i] == negative_infinity() ? masked : p;
    }
  }
}

// Buffers of a row: `row_floats` floats each.
struct LongRow {
  float *scores, *values, *other, *whole, *terms;
  RowState* tiles;

  LongRow(const SoftmaxCall& call, float* scratch) {
    const int64_t row_floats = call.tile_limit * kTile;
    scores = scratch;
    values = scores + row_floats;
    other = values + row_floats;
    whole = other + row_floats;
    terms = whole + row_floats;
    tiles = reinterpret_cast<RowState*>(terms + v2::kTile);  // less than a tile of them for each of the row's
  }

  // Exponentials in `values`, states in `tiles`; the state of the row.
  RowState run(int64_t count) const {
    for (int64_t i = 0; i < count * v2::kTile; ++i) values[i] = scores[i];
    RowState state = empty_row();
    for (int64_t tile = 0; tile < count; ++tile) {
      tiles[tile] = long_tile_state(values + tile * v2::kTile, terms);
      state = v2::merge(state, tiles[tile]);
    }
    return state;
  }
};

inline void softmax_v2_forward(const SoftmaxCall& call, int64_t index, float* scratch) {
  const SoftmaxRow row(call, index, v2::kTile);
  const LongRow buffers(call, scratch);
  row.gather(call.problem.scores, call.problem.dtype, call.problem.keys, negative_infinity(), buffers.scores, buffers.whole);
  const RowState state = buffers.run(row.tiles);
  call.forward.row_max[index] = state.max;
  call.forward.row_sum[index] = state.sum;
  long_probabilities(buffers.values, buffers.scores, buffers.tiles, row.tiles, state);
  row.scatter(buffers.values, call.forward.probs, call.forward.probs_dtype, call.problem.keys, buffers.whole);
}

inline void softmax_v2_backward(const SoftmaxCall& call, int64_t index, float* scratch) {
  const SoftmaxRow row(call, index, v2::kTile);
  const LongRow buffers(call, scratch);
  const int64_t all = call.problem.keys;
  row.gather(call.problem.scores, call.problem.dtype, all, negative_infinity(), buffers.scores, buffers.whole);
  row.gather(call.backward.dprobs, call.backward.dprobs_dtype, all, 0.0f, buffers.other, buffers.whole);
  buffers.run(row.tiles);
  const RowState state{call.backward.row_max[index], call.backward.row_sum[index]};
  float *p = buffers.values, *dp = buffers.other;
  long_probabilities(p, buffers.scores, buffers.tiles, row.tiles, state);
  float delta = 0.0f;
  for (int64_t tile = 0; tile < row.tiles; ++tile) {
    for (int i = 0; i < v2::kTile; ++i) {
      const int64_t slot = tile * v2::kTile + i;
      const float value = mul(p[slot], dp[slot]);
      buffers.terms[i] = is_masked(p[slot]) ? 0.0f : value;
    }
    delta = add(delta, long_tile_sum(buffers.terms));
  }
  for (int64_t tile = 0; tile < row.tiles * (v2::kTile / kTile); ++tile) tile_gradients(p + tile * kTile, dp + tile * kTile, delta);
  row.scatter(dp, call.backward.dscores, call.problem.dtype, all, buffers.whole);
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
