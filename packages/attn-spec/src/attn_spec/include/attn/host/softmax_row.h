// One softmax row in slots: whole tiles of binary32 scores, -inf where a slot has no visible key.
#pragma once

#include "attn/host/multiply.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// Slots [begin, end) of a row; empty when begin == end.
struct Slots {
  int64_t begin, end;

  ATTN_HD int64_t first_tile() const { return begin / kTile; }
  ATTN_HD int64_t last_tile() const { return (end + kTile - 1) / kTile; }
  ATTN_HD bool empty() const { return begin >= end; }
};

// Final scores of one tile from chains: scaled, and -inf outside `visible` (slots of the row; `tile_begin` is the slot of x[0]).
inline void finish_scores(float* x, float scale, int64_t tile_begin, Slots visible) {
  for (int i = 0; i < kTile; ++i) x[i] = mul(x[i], scale);
  for (int64_t i = tile_begin; i < visible.begin && i < tile_begin + kTile; ++i) x[i - tile_begin] = negative_infinity();
  for (int64_t i = visible.end > tile_begin ? visible.end : tile_begin; i < tile_begin + kTile; ++i)
    x[i - tile_begin] = negative_infinity();
}

// State of one tile of final scores. A NaN shows in the sum, or in a tile without any number above -inf.
inline RowState tile_state(const float* x) {
  const RowState not_a_number{bits_to_float(kQuietNaNBits), bits_to_float(kQuietNaNBits)};
  const float max = tile_max_of_numbers(x);
  if (max == negative_infinity()) return tile_has_nan(x) ? not_a_number : empty_row();
  alignas(64) float e[kTile];
  for (int begin = 0; begin < kTile; begin += kLockstep * kLanes) {
    Vec value[kLockstep];
    lockstep([&](int i) { value[i] = load(x + begin + i * kLanes) - max; });
    exp_nonpositive(value);
    lockstep([&](int i) { store(e + begin + i * kLanes, value[i]); });
  }
  const float sum = tile_sum(e);
  return is_nan(sum) && tile_has_nan(x) ? not_a_number : RowState{max, sum};
}

// The sink is one more state, merged last.
ATTN_HD RowState merge_sink(RowState row, float sink) { return sink == negative_infinity() ? row : merge(row, RowState{sink, 1.0f}); }

// Scores of one tile to P, kMaskedBits where masked.
inline void tile_probabilities(float* x, RowState row) {
  const float masked = bits_to_float(kMaskedBits);
  if (!is_live(row)) {
    for (int i = 0; i < kTile; ++i) x[i] = masked;
    return;
  }
  for (int begin = 0; begin < kTile; begin += kLockstep * kLanes) {
    Vec score[kLockstep], value[kLockstep];
    lockstep([&](int i) { score[i] = load(x + begin + i * kLanes); });
    lockstep([&](int i) { value[i] = score[i] - row.max; });
    exp_nonpositive(value);
    lockstep([&](int i) {
      const Vec p = value[i] / row.sum;
      store(x + begin + i * kLanes, score[i] == negative_infinity() ? broadcast(masked) : p);
    });
  }
}

// Tree sum of RN(P * dP) over the unmasked slots of one tile.
inline float tile_products(const float* p, const float* dp) {
  alignas(64) float product[kTile];
  for (int i = 0; i < kTile; ++i) {
    const float value = mul(p[i], dp[i]);
    product[i] = is_masked(p[i]) ? 0.0f : value;
  }
  return tile_sum(product);
}

// dP of one tile to dS, kMaskedBits where masked.
inline void tile_gradients(const float* p, float* dp, float delta) {
  for (int i = 0; i < kTile; ++i) {
    const float value = score_gradient(p[i], dp[i], delta);
    dp[i] = is_masked(p[i]) ? bits_to_float(kMaskedBits) : value;
  }
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
