// One tile of 256 slots over the 32 lanes of a warp, and the state of a row over its tiles.
#pragma once

#include "arithmetic.cuh"

namespace attn_cuda {

constexpr int kLanes = 32;
constexpr int kSlots = attn::kTile / kLanes;  // slots of one lane
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

using Slots = float[kSlots];

// Slot of element k of a lane; V neighbours are accessed as one vector (V = 1 or 2).
template <int V>
__device__ __forceinline__ int slot(int k, int lane) {
  return (k / V) * (kLanes * V) + lane * V + k % V;
}

// tree(+) of the contract, for the layout `slot<V>`; every lane gets the result. RN(a + b) is commutative, so both lanes of a pair may
// compute it. V = 1: halves 128, 64, 32 pair elements of a lane, 16 .. 1 pair lanes. V = 2: halves 128, 64 pair elements, 32 .. 2 pair
// lanes (lanes below 16 carry the even slots, the others the odd ones), and half 1 pairs the two carriers.
template <int V>
__device__ __forceinline__ float tree_sum(const Slots& values, int lane) {
  float quarter[kSlots / 4];
#pragma unroll
  for (int k = 0; k < kSlots / 4; ++k) {
    quarter[k] = add(add(values[k], values[k + 4]), add(values[k + 2], values[k + 6]));
  }
  float sum;
  if constexpr (V == 1) {
    sum = add(quarter[0], quarter[1]);
    sum = add(sum, __shfl_xor_sync(kAllLanes, sum, 16));
  } else {
    const bool odd = lane >= 16;
    const float received = __shfl_xor_sync(kAllLanes, odd ? quarter[0] : quarter[1], 16);
    sum = add(odd ? quarter[1] : quarter[0], received);
  }
#pragma unroll
  for (int distance = 8; distance >= 1; distance /= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  if constexpr (V == 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, 16));
  return sum;
}

// Maximum over the tile, NaN if any slot is NaN. The order is free: a maximum does not round. Integers ordered as floats let one
// instruction reduce the warp; `maximum` has made every NaN the positive canonical one, which orders above infinity.
__device__ __forceinline__ float tile_max(const Slots& values) {
  float largest = maximum(values[0], values[1]);
#pragma unroll
  for (int k = 2; k < kSlots; ++k) largest = maximum(largest, values[k]);
  const int bits = static_cast<int>(float_to_bits(largest));
  const int ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  const int reduced = __reduce_max_sync(kAllLanes, ordered);
  return bits_to_float(static_cast<uint32_t>(reduced ^ ((reduced >> 31) & 0x7FFFFFFF)));
}

// State of one tile: the contract's step 2.
template <int V>
__device__ __forceinline__ attn::RowState tile_state(const Slots& scores, int lane) {
  const float max = tile_max(scores);
  if (max == attn::negative_infinity()) return attn::empty_row();
  Slots terms;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) terms[k] = exp_nonpositive(sub(scores[k], max));
  return attn::RowState{max, tree_sum<V>(terms, lane)};
}

// attn::merge of `count` tiles into `row`, left to right, by one warp; every lane gets the result.
// The running maxima are a prefix maximum, so all exponentials are computed at once and only RN(RN(s * a) + c) is a chain. A dead tile has
// a = 1 and c = +0, which keep s; the first live one has a = exp(-inf) = +0 and exp(0) = 1, which copy its sum.
__device__ __forceinline__ attn::RowState merge_tiles(const attn::RowState* tiles, int count, attn::RowState row, int lane) {
  for (int base = 0; base < count; base += kLanes) {
    const attn::RowState tile = base + lane < count ? tiles[base + lane] : attn::empty_row();
    float max = maximum(row.max, tile.max);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const float earlier = __shfl_up_sync(kAllLanes, max, distance);
      if (lane >= distance) max = maximum(max, earlier);
    }
    float before = __shfl_up_sync(kAllLanes, max, 1);
    if (lane == 0) before = row.max;
    const bool live = attn::is_live(tile);
    const float keep = live ? exp_nonpositive(sub(before, max)) : 1.0f;
    const float added = live ? mul(tile.sum, exp_nonpositive(sub(tile.max, max))) : 0.0f;
    const int last = min(count - base, kLanes);
    for (int i = 0; i < last; ++i) {
      row.sum = add(mul(row.sum, __shfl_sync(kAllLanes, keep, i)), __shfl_sync(kAllLanes, added, i));
    }
    row.max = __shfl_sync(kAllLanes, max, kLanes - 1);
  }
  return row;
}

}  // namespace attn_cuda
