// One tile of contract ordered-v2: 1024 slots over the 32 lanes of a warp, 32 in the registers of each; exponentials, sums and states.
#pragma once

#include "attn/ordered_v2.h"
#include "rows.cuh"

namespace attn_cuda {

constexpr int kLongTile = attn::v2::kTile;
constexpr int kLongSlots = kLongTile / kLanes;
constexpr int kPart = 8;  // elements of a lane whose exponentials are computed together

using LongSlots = float[kLongSlots];

// One tile: its keys are [base, base + here) of the row's logical keys.
struct LongTile {
  int base, here;

  __device__ __forceinline__ LongTile(const Keys& keys, int tile) : base(tile * kLongTile), here(min(keys.count - base, kLongTile)) {}
};

__device__ __forceinline__ int long_tiles(int keys) { return static_cast<int>((static_cast<uint32_t>(keys) + kLongTile - 1) / kLongTile); }

// -inf in every part of a word.
template <typename T>
constexpr uint32_t kNoKeys = 0xFF800000u;
template <>
constexpr uint32_t kNoKeys<attn::bfloat16> = 0xFF80FF80u;
template <>
constexpr uint32_t kNoKeys<attn::float16> = 0xFC00FC00u;

// Scores of a tile as they are stored: halves two to a word, so that they take half the registers and one instruction compares two.
template <typename T>
struct LongScores {
  uint32_t words[kLongSlots * sizeof(T) / 4];

  __device__ __forceinline__ float operator[](int k) const {
    if constexpr (sizeof(T) == 4) {
      return bits_to_float(words[k]);
    } else {
      return widened(T{static_cast<uint16_t>(words[k / 2] >> (16 * (k % 2)))});
    }
  }

  __device__ __forceinline__ void fill() {
#pragma unroll
    for (uint32_t& word : words) word = kNoKeys<T>;
  }

  // V neighbours from memory to elements k, k + 1, ...
  template <int V>
  __device__ __forceinline__ void load(int k, const T* from) {
    if constexpr (sizeof(T) * V >= 4) {
      constexpr int kWords = sizeof(T) * V / 4;
      const auto loaded = *reinterpret_cast<const Vector<uint32_t, kWords>*>(from);
#pragma unroll
      for (int v = 0; v < kWords; ++v) words[k * sizeof(T) / 4 + v] = loaded.lanes[v];
    } else {
      const uint32_t shift = 16 * (k % 2), bits = *reinterpret_cast<const uint16_t*>(from);
      words[k / 2] = (words[k / 2] & ~(0xFFFFu << shift)) | (bits << shift);
    }
  }

  // Maximum over the tile, NaN if any slot is NaN.
  __device__ __forceinline__ float max() const {
    uint32_t largest = words[0];
#pragma unroll
    for (int k = 1; k < static_cast<int>(sizeof words / 4); ++k) largest = larger(largest, words[k]);
    if constexpr (sizeof(T) == 4) {
      return warp_max(bits_to_float(largest));
    } else {
      return warp_max(maximum(widened(T{static_cast<uint16_t>(largest)}), widened(T{static_cast<uint16_t>(largest >> 16)})));
    }
  }

 private:
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (sizeof(T) == 4) {
      return float_to_bits(maximum(bits_to_float(a), bits_to_float(b)));
    } else {
      return maximum_of_pairs<T>(a, b);
    }
  }
};

// V neighbours are accessed as one vector (V = 1 or 4); with V = 4 a row has a multiple of four keys. Slots without a key get -inf.
template <typename T, int V, bool Masked>
__device__ __forceinline__ void load_long(const T* row, const Keys& keys, LongTile tile, int lane, LongScores<T>& scores) {
  if (!Masked && tile.here == kLongTile) {
#pragma unroll
    for (int k = 0; k < kLongSlots; k += V) scores.template load<V>(k, row + tile.base + slot<V>(k, lane));
    return;
  }
  scores.fill();
#pragma unroll
  for (int k = 0; k < kLongSlots; k += V) {
    const int at = slot<V>(k, lane);
    if (at < tile.here) scores.template load<V>(k, row + position<Masked>(keys, tile.base + at));
  }
}

template <typename T, int V, bool Masked>
__device__ __forceinline__ void store_long(T* row, const Keys& keys, LongTile tile, int lane, const LongSlots& values) {
  const bool whole = !Masked && tile.here == kLongTile;
#pragma unroll
  for (int k = 0; k < kLongSlots; k += V) {
    const int at = slot<V>(k, lane);
    Vector<T, V> stored;
#pragma unroll
    for (int v = 0; v < V; ++v) stored.lanes[v] = rounded<T>(values[k + v]);
    if (whole || at < tile.here) *reinterpret_cast<Vector<T, V>*>(row + position<Masked>(keys, tile.base + at)) = stored;
  }
}

// tree(+) of the contract for the layout `slot<V>`; every lane gets the result. Halves 512, 256 and 128 pair elements of a lane (with V = 1
// 64 and 32 too), then lanes. With V = 4 a lane pair shares its four remaining residues at halves 64 and 32, so that lane bits 16 and 8
// tell the residue, and halves 2 and 1 pair lanes again.
template <int V>
__device__ __forceinline__ float long_tree_sum(const LongSlots& values, int lane) {
  float pair[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float even = add(add(values[k], values[k + 16]), add(values[k + 8], values[k + 24]));
    const float odd = add(add(values[k + 4], values[k + 20]), add(values[k + 12], values[k + 28]));
    pair[k] = add(even, odd);
  }
  float sum;
  if constexpr (V == 1) {
    sum = add(add(pair[0], pair[2]), add(pair[1], pair[3]));
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  } else {
    const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
    const float even_part = add(upper ? pair[2] : pair[0], __shfl_xor_sync(kAllLanes, upper ? pair[0] : pair[2], 16));
    const float odd_part = add(upper ? pair[3] : pair[1], __shfl_xor_sync(kAllLanes, upper ? pair[1] : pair[3], 16));
    sum = add(odd ? odd_part : even_part, __shfl_xor_sync(kAllLanes, odd ? even_part : odd_part, 8));
#pragma unroll
    for (int distance = 4; distance >= 1; distance /= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
    sum = add(sum, __shfl_xor_sync(kAllLanes, sum, 16));
    sum = add(sum, __shfl_xor_sync(kAllLanes, sum, 8));
  }
  return sum;
}

// Exponentials of kPart slots: attn::v2::exp_nonpositive of x - m_t. One integer minimum over the rounded exponents finds whether any lies
// below the least one, where +0 is selected; `uncertain` forces those selects, and then a bit of `masked` is set where x = -inf. Where m_t
// is NaN or +inf the exponentials are of no use, and the tile's sum is NaN.
template <typename T>
__device__ __forceinline__ void exponentials(const LongScores<T>& x, int first, float tile_max, bool uncertain, LongSlots& e,
                                             uint32_t& masked) {
  constexpr int kLeast = static_cast<int>(attn::v2::kRoundBits) - 125;
  float d[kPart], shifted[kPart];
  int least = static_cast<int>(attn::v2::kRoundBits);
#pragma unroll
  for (int k = 0; k < kPart; ++k) {
    d[k] = sub(x[first + k], tile_max);
    shifted[k] = attn::fma(d[k], bits_to_float(attn::v2::kLog2EBits), bits_to_float(attn::v2::kRoundBits));
  }
#pragma unroll
  for (int k = 0; k < kPart; k += 2)
    least = __vimin3_s32(least, static_cast<int>(float_to_bits(shifted[k])), static_cast<int>(float_to_bits(shifted[k + 1])));
#pragma unroll
  for (int k = 0; k < kPart; ++k) {
    const float n = sub(shifted[k], bits_to_float(attn::v2::kRoundBits));
    const float r = attn::fma(n, bits_to_float(attn::v2::kLn2LowBits), attn::fma(n, bits_to_float(attn::v2::kLn2HighBits), d[k]));
    float p = bits_to_float(attn::v2::kExp6Bits);
    p = attn::fma(p, r, bits_to_float(attn::v2::kExp5Bits));
    p = attn::fma(p, r, bits_to_float(attn::v2::kExp4Bits));
    p = attn::fma(p, r, bits_to_float(attn::v2::kExp3Bits));
    p = attn::fma(p, r, bits_to_float(attn::v2::kExp2Bits));
    p = attn::fma(p, r, 1.0f);
    p = attn::fma(p, r, 1.0f);
    e[first + k] = bits_to_float(float_to_bits(p) + (float_to_bits(shifted[k]) << 23));
  }
  if (uncertain || __any_sync(kAllLanes, least < kLeast)) {
#pragma unroll
    for (int k = 0; k < kPart; ++k) {
      const float score = x[first + k];
      if (!(sub(score, tile_max) >= bits_to_float(attn::v2::kLeastBits))) e[first + k] = 0.0f;
      if (score == attn::negative_infinity()) masked |= 1u << (first + k);
    }
  }
}

// Exponentials of a tile, +0 where masked, and the tile's maximum. Bits of `masked` may miss slots only where all is finite and no
// exponential is +0; a slot past the tile's keys counts as masked.
template <typename T>
__device__ __forceinline__ float long_exponentials(const LongScores<T>& x, LongTile tile, LongSlots& e, uint32_t& masked) {
  const float max = x.max();
  masked = 0;
  if (max == attn::negative_infinity()) {
    masked = 0xFFFFFFFFu;
#pragma unroll
    for (int k = 0; k < kLongSlots; ++k) e[k] = 0.0f;
    return max;
  }
  const bool uncertain = !(max < bits_to_float(0x7F800000u));
#pragma unroll
  for (int first = 0; first < kLongSlots; first += kPart) {
    if (first * kLanes < tile.here) {
      exponentials(x, first, max, uncertain, e, masked);
    } else {
      masked |= ((1u << kPart) - 1) << first;
#pragma unroll
      for (int k = 0; k < kPart; ++k) e[first + k] = 0.0f;
    }
  }
  return max;
}

// State of a tile from its exponentials.
template <int V>
__device__ __forceinline__ attn::RowState long_state(const LongSlots& e, float max, int lane) {
  if (max == attn::negative_infinity()) return attn::empty_row();
  const float sum = long_tree_sum<V>(e, lane);
  return attn::RowState{max, max < bits_to_float(0x7F800000u) ? sum : bits_to_float(attn::kQuietNaNBits)};
}

// The factor of a tile, +0 for a dead one.
__device__ __forceinline__ float long_factor(float tile_max, attn::RowState row) {
  return tile_max == attn::negative_infinity() ? 0.0f : attn::v2::tile_factor(tile_max, row);
}

// Exponentials of a tile to P. A factor of NaN spoils every slot but the masked ones.
__device__ __forceinline__ void long_probabilities(LongSlots& e, float factor, uint32_t masked) {
#pragma unroll
  for (int k = 0; k < kLongSlots; ++k) e[k] = mul(e[k], factor);
  if (attn::is_nan(factor)) {
#pragma unroll
    for (int k = 0; k < kLongSlots; ++k) e[k] = (masked >> k) & 1 ? 0.0f : e[k];
  }
}

}  // namespace attn_cuda
