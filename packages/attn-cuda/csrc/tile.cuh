// One tile of slots over the 32 lanes of a warp, and the state of a row over its tiles.
#pragma once

#include "arithmetic.cuh"

// The build option of the tile sweep. Contract ordered-v1 has 256; a build with another tile is refused at load.
#if !defined(ATTN_CUDA_SOFTMAX_TILE)
#define ATTN_CUDA_SOFTMAX_TILE 256
#endif

namespace attn_cuda {

constexpr int kLanes = 32;
constexpr int kSlots = attn::kTile / kLanes;  // slots of one lane
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kRowTile = ATTN_CUDA_SOFTMAX_TILE;  // of the joint softmax
constexpr int kRowSlots = kRowTile / kLanes;
static_assert(kRowTile == 64 || kRowTile == 128 || kRowTile == 256 || kRowTile == 512);

using RowSlots = float[kRowSlots];

// Slot of element k of a lane; V neighbours are accessed as one vector (V = 1 or 2).
template <int V>
__device__ __forceinline__ int slot(int k, int lane) {
  return (k / V) * (kLanes * V) + lane * V + k % V;
}

// tree(+) of the contract, for the layout `slot<V>`; every lane gets the result. RN(a + b) is commutative, so both lanes of a pair may
// compute it. V = 1: halves down to 32 pair elements of a lane, 16 .. 1 pair lanes. V = 2: halves down to 64 pair elements, 32 .. 2 pair
// lanes (lanes below 16 carry the even slots, the others the odd ones), and half 1 pairs the two carriers.
template <int V, int N>
__device__ __forceinline__ float tree_sum(const float (&values)[N], int lane) {
  float pair[N];
#pragma unroll
  for (int k = 0; k < N; ++k) pair[k] = values[k];
#pragma unroll
  for (int half = N / 2; half >= 2; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) pair[k] = add(pair[k], pair[k + half]);
  }
  float sum;
  if constexpr (V == 1) {
    sum = add(pair[0], pair[1]);
    sum = add(sum, __shfl_xor_sync(kAllLanes, sum, 16));
  } else {
    const bool odd = lane >= 16;
    const float received = __shfl_xor_sync(kAllLanes, odd ? pair[0] : pair[1], 16);
    sum = add(odd ? pair[1] : pair[0], received);
  }
#pragma unroll
  for (int distance = 8; distance >= 1; distance /= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  if constexpr (V == 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, 16));
  return sum;
}

// Maximum over the warp, NaN if any lane has one. The order is free: a maximum does not round. Integers ordered as floats let one
// instruction reduce the warp; `maximum` has made every NaN the positive canonical one, which orders above infinity.
__device__ __forceinline__ float warp_max(float largest) {
  const int bits = static_cast<int>(float_to_bits(largest));
  const int ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  const int reduced = __reduce_max_sync(kAllLanes, ordered);
  return bits_to_float(static_cast<uint32_t>(reduced ^ ((reduced >> 31) & 0x7FFFFFFF)));
}

// Maximum over the tile, NaN if any slot is NaN.
template <int N>
__device__ __forceinline__ float tile_max(const float (&values)[N]) {
  float largest = maximum(values[0], values[1]);
#pragma unroll
  for (int k = 2; k < N; ++k) largest = maximum(largest, values[k]);
  return warp_max(largest);
}

// A tile is narrow when no score lies further below its maximum, and near when its maximum lies no further below the row's. Then
// exp(x - m_t) is normal, and exp(x - m) is normal and a numerator of `quotient` (exp(-55) = 2^-79.3).
constexpr float kNarrow = -44.0f;
constexpr float kNear = -11.0f;

// Whether no slot lies further than kNarrow below the maximum, which is finite; the same for all lanes. Differences from a maximum are not
// above +0, so that their bits grow with their size.
template <int N>
__device__ __forceinline__ bool is_narrow(const float (&scores)[N], float max) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < N; k += 2)
    largest = __vimax3_u32(largest, float_to_bits(sub(scores[k], max)), float_to_bits(sub(scores[k + 1], max)));
  return __all_sync(kAllLanes, largest <= float_to_bits(kNarrow) && fabsf(max) < bits_to_float(0x7F800000u));
}

// What pass two needs of a tile: its state, and its maximum where it is narrow, else -inf.
struct TileState {
  attn::RowState state;
  float narrow_max;
};

// State of one tile: the contract's step 2.
template <int V, int N>
__device__ __forceinline__ TileState tile_state(const float (&scores)[N], int lane) {
  const float max = tile_max(scores);
  if (max == attn::negative_infinity()) return TileState{attn::empty_row(), max};
  float terms[N], narrow_max;
  if (is_narrow(scores, max)) {
    narrow_max = max;
#pragma unroll
    for (int k = 0; k < N; ++k) terms[k] = exp_normal(sub(scores[k], max));
  } else {
    narrow_max = attn::negative_infinity();
#pragma unroll
    for (int k = 0; k < N; ++k) terms[k] = exp_nonpositive(sub(scores[k], max));
  }
  return TileState{{max, tree_sum<V>(terms, lane)}, narrow_max};
}

// attn::merge, or that of the contract of Exp, of `count` tiles into `row`, left to right, by one warp; every lane gets the result.
// The running maxima are a prefix maximum, so all exponentials are computed at once and only RN(RN(s * a) + c) is a chain. A dead tile has
// a = 1 and c = +0, which keep s; the first live one has a = exp(-inf) = +0 and exp(0) = 1, which copy its sum.
template <float (*Exp)(float) = exp_nonpositive>
__device__ __forceinline__ attn::RowState merge_tiles(const attn::RowState* tiles, int count, attn::RowState row, int lane) {
  constexpr int kAtOnce = 8;  // so that the broadcasts do not wait for the chain
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
    const float keep = live ? Exp(sub(before, max)) : 1.0f;
    const float added = live ? mul(tile.sum, Exp(sub(tile.max, max))) : 0.0f;
    const int last = min(count - base, kLanes);
    for (int first = 0; first < last; first += kAtOnce) {  // tiles past the last one keep the sum too
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i)
        row.sum = add(mul(row.sum, __shfl_sync(kAllLanes, keep, i)), __shfl_sync(kAllLanes, added, i));
    }
    row.max = __shfl_sync(kAllLanes, max, kLanes - 1);
  }
  return row;
}

}  // namespace attn_cuda
