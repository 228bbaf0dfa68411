// The two products of a block. It owns eight rows in shared memory and streams 256 others past them: first a thread has one streamed row
// and all columns (chains of pairs), then one column and all streamed rows (sums over pairs). A row's tile of 256 pairs lies in 32 lanes,
// so that three halves of the tile tree are within a lane and five are shuffles, for wavefronts of 64 and of 32 lanes alike.
#pragma once

#include "attention.h"
#include "pair.h"

namespace attn::hip {

constexpr int kThreads = kTile;
constexpr int kOwned = 8;
constexpr int kLanes = 32;
constexpr int kPerLane = kTile / kLanes;
constexpr int kStep = 8;
static_assert(kOwned * kLanes == kThreads, "32 lanes for each owned row");
static_assert(kMostColumns <= kThreads, "a thread for each column");

using OwnedRows = float[kOwned][kMostColumns];
using Pairs = float[kOwned][kTile];

// Calls function(T()) with the storage type of an array.
template <typename Function>
__device__ inline void with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::bfloat16:
      return function(bfloat16{});
    case DType::float16:
      return function(float16{});
    default:
      return function(0.0f);
  }
}

// One owned row as binary32, from its element offset; kNoRow gives zeros.
__device__ inline void load_owned(const Array& array, int64_t offset, float (&to)[kMostColumns]) {
  const int column = static_cast<int>(threadIdx.x);
  if (column < array.columns) to[column] = offset == kNoRow ? 0.0f : array.load(offset + column);
}

template <int Count, typename T>
__device__ inline void chain_step(const T* row, const OwnedRows& owned, int column, float (&sums)[kOwned]) {
  float values[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) values[i] = to_float(row[column + i]);
#pragma unroll
  for (int r = 0; r < kOwned; ++r)
#pragma unroll
    for (int i = 0; i < Count; ++i) sums[r] = fma(owned[r][column + i], values[i], sums[r]);
}

// Chains of the eight owned rows with the thread's streamed row, which is at `offset` or absent. Written to the thread's column of `pairs`.
__device__ inline void chain_pairs(const Array& array, int64_t offset, const OwnedRows& owned, Pairs& pairs) {
  float sums[kOwned] = {};
  if (offset != kNoRow)
    with_type(array.dtype, [&](auto type) {
      const auto* row = static_cast<const decltype(type)*>(array.data) + offset;
      int column = 0;
#pragma unroll 1
      for (; column + kStep <= array.columns; column += kStep) chain_step<kStep>(row, owned, column, sums);
#pragma unroll 1
      for (; column < array.columns; ++column) chain_step<1>(row, owned, column, sums);
    });
#pragma unroll
  for (int r = 0; r < kOwned; ++r) pairs[r][threadIdx.x] = sums[r];
}

// Chains go on: sums[r] over the streamed rows [begin, end), in order, of pairs[r] and the thread's column. `begin` is rounded down and
// `end` up to the step; a masked pair has no term, and a streamed row that is absent has masked pairs only.
__device__ inline void append_terms(const Array& array, const int64_t* offsets, const Pairs& pairs, int begin, int end,
                                    float (&sums)[kOwned]) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= array.columns) return;
  with_type(array.dtype, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(array.data) + column;
#pragma unroll 1
    for (int first = begin / kStep * kStep; first < end; first += kStep) {
      float values[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) values[i] = offsets[first + i] == kNoRow ? 0.0f : to_float(data[offsets[first + i]]);
#pragma unroll
      for (int r = 0; r < kOwned; ++r)
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          const float factor = pairs[r][first + i];
          const float sum = fma(factor, values[i], sums[r]);
          sums[r] = is_masked(factor) ? sums[r] : sum;
        }
    }
  });
}

// The owned row whose tile lies in the thread's lanes.
__device__ inline int row_of_lane() { return static_cast<int>(threadIdx.x) / kLanes; }
__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

// tree(op) over one row: slots lane, lane + 32, ... in `slots`. Every lane of the row gets the result.
template <typename Operation>
__device__ inline float tree(float (&slots)[kPerLane], Operation operation) {
#pragma unroll
  for (int half = kPerLane / 2; half >= 1; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) slots[i] = operation(slots[i], slots[i + half]);
  float value = slots[0];
#pragma unroll
  for (int half = kLanes / 2; half >= 1; half /= 2) value = operation(value, __shfl_down(value, half, kLanes));
  return __shfl(value, 0, kLanes);
}

__device__ inline float tree_sum_of(float (&slots)[kPerLane]) {
  return tree(slots, [](float a, float b) { return add(a, b); });
}

// State of the row's tile of final scores, -inf where masked.
__device__ inline RowState tile_state(const float* scores) {
  float x[kPerLane], slots[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) slots[i] = x[i] = scores[lane() + i * kLanes];
  const float max = tree(slots, [](float a, float b) { return max_nan(a, b); });
  if (max == negative_infinity()) return empty_row();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) slots[i] = x[i] == negative_infinity() ? 0.0f : exp_nonpositive(sub(x[i], max));
  return RowState{max, tree_sum_of(slots)};
}

// Tree sum of a row of products.
__device__ inline float tile_sum(const float* products) {
  float slots[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) slots[i] = products[lane() + i * kLanes];
  return tree_sum_of(slots);
}

}  // namespace attn::hip
