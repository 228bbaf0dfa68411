// P and dS of a square of pairs, for the backward sums: Edge rows or keys that the block owns against Edge keys or rows that stream by.
// Nothing here needs tiles, so squares may start anywhere.
#pragma once

#include "attention_backward.cuh"
#include "attention_rows.cuh"

namespace attn_cuda {

constexpr int kPairThreads = 256;

// What the square needs of a query row.
struct PairRow {
  Row row;
  Range range;
  Divisor sum;
  float max;
  float delta;
};

__device__ __forceinline__ PairRow pair_row(const BackwardInputs& inputs, const float* delta, const Item& item, Row row, Range range) {
  PairRow pair{row, range, Divisor{1.0f, 1.0f, 0.0f}, 0.0f, 0.0f};
  if (row.head < 0 || range.begin >= range.end) return pair;
  const int64_t index = row_index(inputs.problem, item, row);
  pair.sum = divisor(inputs.row_sum[index]);
  pair.max = inputs.row_max[index];
  if (delta != nullptr) pair.delta = delta[index];
  return pair;
}

// Place of a thread in the square: stream indices stream + 8 i, owner indices owner + 4 i, of which a warp reads few at a time.
template <int Edge>
struct SquarePlace {
  static constexpr int kPer = Edge / 16;
  int stream, owner;

  __device__ __forceinline__ SquarePlace() {
    stream = warp_id() % 2 * (Edge / 2) + lane_id() % 8;
    owner = warp_id() / 2 * (Edge / 4) + lane_id() / 8;
  }
};

template <int Edge>
using Square = float[Edge / 16][Edge / 16];  // [stream][owner]

// Chains over `columns` of the stream's and the owner's rows.
template <int Edge>
__device__ __forceinline__ void multiply_square(const float* stream, const float* owner, int pitch, int columns, Square<Edge>& acc) {
  constexpr int kPer = Edge / 16;
  const SquarePlace<Edge> place;
  const float* left = stream + place.stream * pitch;
  const float* right = owner + place.owner * pitch;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) acc[i][j] = 0.0f;
#pragma unroll 4
  for (int column = 0; column < columns; column += 4) {
    float4 a[kPer], b[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) a[i] = *reinterpret_cast<const float4*>(left + 8 * i * pitch + column);
#pragma unroll
    for (int j = 0; j < kPer; ++j) b[j] = *reinterpret_cast<const float4*>(right + 4 * j * pitch + column);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        acc[i][j] = exact_fma(a[i].x, b[j].x, acc[i][j]);
        acc[i][j] = exact_fma(a[i].y, b[j].y, acc[i][j]);
        acc[i][j] = exact_fma(a[i].z, b[j].z, acc[i][j]);
        acc[i][j] = exact_fma(a[i].w, b[j].w, acc[i][j]);
      }
  }
}

// Chains of q and k to P, kMaskedBits where masked. `key_slot` is the slot of the first key of the square; `visible(row, slot)` leaves out
// what the ranges do not.
template <int Edge, bool OwnsKeys, typename Visible>
__device__ __forceinline__ void square_probabilities(const Attention& problem, const Item& item, const PairRow* rows, int32_t key_slot,
                                                     Visible visible, Square<Edge>& x) {
  constexpr int kPer = Edge / 16;
  const SquarePlace<Edge> place;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const PairRow& row = rows[OwnsKeys ? place.stream + 8 * r : place.owner + 4 * r];
    float scores[kPer];
#pragma unroll
    for (int c = 0; c < kPer; ++c) {
      const int32_t slot = key_slot + (OwnsKeys ? place.owner + 4 * c : place.stream + 8 * c);
      float score = mul(OwnsKeys ? x[r][c] : x[c][r], problem.scale);
      const bool sees = row.range.has(slot) && visible(row, slot);
      if (sees && problem.bias != nullptr)
        score = add(score, bias_of_row(problem, item, row.row)[stored_key(item, slot) * problem.bias_key]);
      scores[c] = sees ? score : attn::negative_infinity();
    }
    row_probabilities(scores, row.max, row.sum);
#pragma unroll
    for (int c = 0; c < kPer; ++c) (OwnsKeys ? x[r][c] : x[c][r]) = scores[c];
  }
}

// dP to dS, kMaskedBits where P says so.
template <int Edge, bool OwnsKeys>
__device__ __forceinline__ void square_gradients(const PairRow* rows, const Square<Edge>& probs, Square<Edge>& dp) {
  constexpr int kPer = Edge / 16;
  const SquarePlace<Edge> place;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const float delta = rows[OwnsKeys ? place.stream + 8 * i : place.owner + 4 * j].delta;
      dp[i][j] = is_masked(probs[i][j]) ? masked_value() : attn::score_gradient(probs[i][j], dp[i][j], delta);
    }
}

// Squares in shared memory have the stream index as row.
template <int Edge>
__device__ __forceinline__ void store_square(const Square<Edge>& values, float* to) {
  constexpr int kPer = Edge / 16, kPitch = Edge + 4;
  const SquarePlace<Edge> place;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) to[(place.stream + 8 * i) * kPitch + place.owner + 4 * j] = values[i][j];
}

// Sums of a thread: four owners and four columns of each vector.
template <int Width, int Edge>
struct OwnerSums {
  static constexpr int kColumnGroups = kPairThreads / (Edge / 4);
  static constexpr int kVectors = Width / 4 / kColumnGroups;
  static_assert(kVectors >= 1, "a thread owns four columns at least");
  float sum[kVectors][4][4];  // [vector][owner][column]

  __device__ static __forceinline__ int owner() { return (warp_id() / (kColumnGroups / 8) * 4 + lane_id() / 8) * 4; }
  __device__ static __forceinline__ int column(int vector) {
    return (vector * kColumnGroups + warp_id() % (kColumnGroups / 8) * 8 + lane_id() % 8) * 4;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int o = 0; o < 4; ++o)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[v][o][c] = 0.0f;
  }

  // Goes on over the square, stream index ascending. With Select a masked pair has no term even against infinities and NaN.
  template <bool Select>
  __device__ __forceinline__ void add(const float* square, const float* stream, int pitch) {
#pragma unroll 4
    for (int s = 0; s < Edge; ++s) {
      const float4 weights = *reinterpret_cast<const float4*>(square + s * (Edge + 4) + owner());
      const float weight[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 values = *reinterpret_cast<const float4*>(stream + s * pitch + column(v));
#pragma unroll
        for (int o = 0; o < 4; ++o) {
          if (Select && is_masked(weight[o])) continue;
          sum[v][o][0] = exact_fma(weight[o], values.x, sum[v][o][0]);
          sum[v][o][1] = exact_fma(weight[o], values.y, sum[v][o][1]);
          sum[v][o][2] = exact_fma(weight[o], values.z, sum[v][o][2]);
          sum[v][o][3] = exact_fma(weight[o], values.w, sum[v][o][3]);
        }
      }
    }
  }

  __device__ __forceinline__ bool has_nan() const {
    bool nan = false;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int o = 0; o < 4; ++o)
#pragma unroll
        for (int c = 0; c < 4; ++c) nan = nan || attn::is_nan(sum[v][o][c]);
    return nan;
  }

  // `offset_of(owner)` is the element offset of an owner's result or kNoRow.
  template <typename OffsetOf>
  __device__ __forceinline__ void store(void* data, int32_t dtype, float scale, int32_t width, bool vectors, OffsetOf offset_of) const {
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const int64_t offset = offset_of(owner() + o);
      if (offset == kNoRow) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float four[4] = {mul(sum[v][o][0], scale), mul(sum[v][o][1], scale), mul(sum[v][o][2], scale), mul(sum[v][o][3], scale)};
        store_four(data, dtype, offset + column(v), four, width - column(v), vectors);
      }
    }
  }
};

}  // namespace attn_cuda
