// Rows of scores in registers: a warp owns eight rows, and lane c holds slots c + 32 j of each. Two halves of the tile tree are then within
// a lane down to 32 slots, and the rest are shuffles. Chains run over a whole row of q in shared memory and keys staged 32 columns at a
// time.
#pragma once

#include <type_traits>

#include "attention_copy.cuh"
#include "attention_problem.cuh"

namespace attn_cuda {

constexpr int kChunkColumns = 32;
constexpr int kChunkPitch = 36;  // lanes read 16 bytes of consecutive rows without a bank conflict

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kLanes; }

__host__ __device__ __forceinline__ int padded_columns(int columns) {
  return (columns + kChunkColumns - 1) / kChunkColumns * kChunkColumns;
}

// Groups of 32 slots that a warp computes, of the Slots groups that lie `distance` slots apart.
struct Groups {
  int begin, end;
  bool all;

  __device__ __forceinline__ bool has(int j) const { return all || (j >= begin && j < end); }
};

// acc[r][j] goes on over the 32 columns of one chunk. `rows` are the warp's rows of that chunk, `stage` the keys.
template <bool All, int Slots>
__device__ __forceinline__ void multiply_chunk(const float* rows, const float* stage, const Groups& groups,
                                               float (&acc)[kWarpRows][Slots]) {
  const float* own = stage + lane_id() * kChunkPitch;
#pragma unroll 2
  for (int column = 0; column < kChunkColumns; column += 4) {
    float4 left[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) left[r] = *reinterpret_cast<const float4*>(rows + r * kChunkColumns + column);
#pragma unroll
    for (int j = 0; j < Slots; ++j) {
      if (!All && !groups.has(j)) continue;
      const float4 right = *reinterpret_cast<const float4*>(own + j * kLanes * kChunkPitch + column);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) acc[r][j] = exact_fma(left[r].x, right.x, acc[r][j]);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) acc[r][j] = exact_fma(left[r].y, right.y, acc[r][j]);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) acc[r][j] = exact_fma(left[r].z, right.z, acc[r][j]);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) acc[r][j] = exact_fma(left[r].w, right.w, acc[r][j]);
    }
  }
}

// The block's rows in shared memory, 32 columns at a time: [chunk][row][32]. `offset_of(i)` is the element offset of row i or kNoRow.
template <int Warps, typename OffsetOf>
__device__ __forceinline__ void load_own_rows(const Array& array, float* tile, OffsetOf offset_of) {
#pragma unroll 1
  for (int column = 0; column < array.columns; column += kChunkColumns)
    load_rows<Warps * kLanes, Warps * kWarpRows, kChunkColumns>(array, column, kChunkColumns, tile + column * (Warps * kWarpRows),
                                                                offset_of);
}

template <int Warps>
__device__ __forceinline__ void load_query_rows(const Array& array, const Item& item, const Row* rows, float* tile) {
  load_own_rows<Warps>(array, tile, [&](int i) { return rows[i].head < 0 ? kNoRow : query_offset(array, item, rows[i]); });
}

// Keys in shared memory, 32 columns of 32 * Slots keys at a time, and the next 32 on their way.
template <int Warps, int Slots>
struct KeyStage {
  using Copy = RowCopy<Warps * kLanes, Slots * kLanes, kChunkColumns>;
  static constexpr int kFloats = Slots * kLanes * kChunkPitch;
  float* stage;
  char* raw;

  __host__ __device__ static __forceinline__ size_t raw_bytes(int32_t dtype) {
    return static_cast<size_t>(Slots * kLanes * kChunkColumns) * (dtype == ATTN_CUDA_FLOAT32 ? 4 : 2);
  }

  // use(column) for each chunk in turn, staged. The first has been started by `start(0)`; `start(column)` starts another and `after()` what
  // comes next. Called by all threads.
  template <typename Start, typename After, typename Use>
  __device__ __forceinline__ void each_chunk(const Array& array, Start start, After after, Use use) const {
#pragma unroll 1
    for (int column = 0; column < array.columns; column += kChunkColumns) {
      wait_for_copies();
      __syncthreads();
      Copy::finish(array.dtype, raw, stage, kChunkPitch);
      if (column + kChunkColumns < array.columns) {
        start(column + kChunkColumns);
      } else {
        after();
      }
      __syncthreads();
      use(column);
    }
  }

  // Chains of the block's rows in `tile` with the keys; warps that are not `active` only help to load.
  template <typename Start, typename After>
  __device__ __forceinline__ void multiply(const float* tile, const Array& array, bool active, const Groups& groups,
                                           float (&acc)[kWarpRows][Slots], Start start, After after) const {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int j = 0; j < Slots; ++j) acc[r][j] = 0.0f;
    each_chunk(array, start, after, [&](int column) {
      if (!active) return;
      const float* rows = tile + (column * Warps + warp_id() * kChunkColumns) * kWarpRows;
      if (groups.all) {
        multiply_chunk<true>(rows, stage, groups, acc);
      } else {
        multiply_chunk<false>(rows, stage, groups, acc);
      }
    });
  }
};

// Combines lanes by a halves tree for each of eight rows; lane 4 r gets row r, as do the three lanes after it.
template <typename Combine>
__device__ __forceinline__ float reduce_lanes(float (&values)[kWarpRows], Combine combine) {
  const int lane = lane_id();
#pragma unroll
  for (int distance = 16; distance >= 4; distance /= 2) {
    const bool high = (lane & distance) != 0;
    const int rows = distance / 4;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float kept = high ? values[r + rows] : values[r];
      const float sent = high ? values[r] : values[r + rows];
      values[r] = combine(kept, __shfl_xor_sync(kAllLanes, sent, distance));
    }
  }
  float result = combine(values[0], __shfl_xor_sync(kAllLanes, values[0], 2));
  return combine(result, __shfl_xor_sync(kAllLanes, result, 1));
}

__device__ __forceinline__ int lane_of_row(int row) { return row * 4; }
__device__ __forceinline__ int row_of_lane() { return lane_id() / 4; }

// What a warp knows of the visible slots of its rows.
struct WarpRange {
  Range any;  // outside it no row sees a slot
  Range all;  // inside it every row sees every slot

  __device__ __forceinline__ bool meets(int32_t begin, int32_t count) const { return any.begin < begin + count && any.end > begin; }
  __device__ __forceinline__ bool covers(int32_t begin, int32_t count) const { return all.begin <= begin && all.end >= begin + count; }

  // Groups that any row sees of those that begin at begin + j * distance.
  __device__ __forceinline__ Groups groups(int32_t begin, int count, int32_t distance) const {
    const int32_t first = any.begin - kLanes + 1 - begin, last = any.end - 1 - begin;
    Groups found{first <= 0 ? 0 : (first + distance - 1) / distance, last < 0 ? 0 : min(count, last / distance + 1), false};
    found.all = found.begin == 0 && found.end == count;
    return found;
  }
};

// Ranges of the rows of one warp; `own` is the range of the lane's row.
__device__ __forceinline__ WarpRange warp_range(Range own) {
  WarpRange range{own, own};
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) {
    range.any.begin = min(range.any.begin, __shfl_xor_sync(kAllLanes, range.any.begin, distance));
    range.any.end = max(range.any.end, __shfl_xor_sync(kAllLanes, range.any.end, distance));
    range.all.begin = max(range.all.begin, __shfl_xor_sync(kAllLanes, range.all.begin, distance));
    range.all.end = min(range.all.end, __shfl_xor_sync(kAllLanes, range.all.end, distance));
  }
  return range;
}

// Rows of a block, in shared memory to leave the registers to sums.
template <int Warps>
struct BlockRows {
  Row rows[Warps * kWarpRows];
  Range ranges[Warps * kWarpRows];
  WarpRange warps[Warps];
  Range any;  // slots that any row sees

  // Called by all threads.
  __device__ __forceinline__ void find(const Attention& problem, const Work& work) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < Warps * kWarpRows) {
      rows[i] = row_of(problem, work.item, work.kv_head, work.block * (Warps * kWarpRows) + i);
      ranges[i] = rows[i].head < 0 ? no_range() : range_of(problem, work.item, rows[i].query);
    }
    __syncthreads();
    if (warp_id() < Warps) {
      const WarpRange found = warp_range(range(row_of_lane()));
      if (lane_id() == 0) warps[warp_id()] = found;
    }
    __syncthreads();
    if (i == 0) {
      any = no_range();
      for (const WarpRange& warp : warps) {
        any.begin = min(any.begin, warp.any.begin);
        any.end = max(any.end, warp.any.end);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ const Row& row(int r) const { return rows[warp_id() * kWarpRows + r]; }
  __device__ __forceinline__ const Range& range(int r) const { return ranges[warp_id() * kWarpRows + r]; }
  __device__ __forceinline__ const WarpRange& warp() const { return warps[warp_id()]; }
  __device__ __forceinline__ int32_t first_tile() const { return any.begin < any.end ? any.begin / attn::kTile * attn::kTile : 0; }
};

// use(work, rows) for every block of rows that falls to this block of threads.
template <int Warps, typename Use>
__device__ __forceinline__ void each_row_block(const Attention& problem, int64_t blocks, int64_t per_item, const int64_t* plan, Use use) {
  __shared__ Work work;
  __shared__ BlockRows<Warps> block;
  each_turn(blocks, [&](int64_t id) {
    if (!share_work(problem, id, per_item, plan, &work)) return;
    block.find(problem, work);
    use(work, block);
  });
}

// Chains to final scores, -inf where masked. `slot_of(j)` is the slot of element j of this lane.
template <int Warps, int Slots, typename SlotOf>
__device__ __forceinline__ void finish_scores(const Attention& problem, const Item& item, const BlockRows<Warps>& block, bool all_visible,
                                              float (&x)[kWarpRows][Slots], SlotOf slot_of) {
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
    for (int j = 0; j < Slots; ++j) x[r][j] = attn::mul(x[r][j], problem.scale);
  if (problem.bias != nullptr) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const Range range = block.range(r);
      const float* bias = bias_of_row(problem, item, block.row(r));
#pragma unroll
      for (int j = 0; j < Slots; ++j)
        if (range.has(slot_of(j))) x[r][j] = attn::add(x[r][j], bias[stored_key(item, slot_of(j)) * problem.bias_key]);
    }
  }
  if (all_visible) return;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const Range range = block.range(r);
#pragma unroll
    for (int j = 0; j < Slots; ++j) x[r][j] = range.has(slot_of(j)) ? x[r][j] : attn::negative_infinity();
  }
}

// What P of a query row needs, kept in shared memory.
struct alignas(16) RowConstants {
  float max;
  Divisor sum;
};

// Whether every difference x - m is in [kLowestNormal, 0]: its exp is then a normal number and a numerator of the short division.
constexpr float kLowestNormal = -55.0f;

// Final scores to P, kMaskedBits where masked; `constants_of(r, j)` belongs to the pair's query row. The short division needs numerators in
// [2^-80, 1] or +0, for which it is exact too.
template <int Rows, int Slots, typename ConstantsOf>
__device__ __forceinline__ void probabilities_of(float (&x)[Rows][Slots], ConstantsOf constants_of) {
  float lowest = 0.0f;
#pragma unroll
  for (int r = 0; r < Rows; ++r)
#pragma unroll
    for (int j = 0; j < Slots; ++j) lowest = minimum(lowest, sub(x[r][j], constants_of(r, j).max));
  if (lowest >= kLowestNormal) {
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
      for (int j = 0; j < Slots; ++j) x[r][j] = quotient(exp_normal(sub(x[r][j], constants_of(r, j).max)), constants_of(r, j).sum);
    return;
  }
  using Bits = std::conditional_t<Rows * Slots <= 32, uint32_t, uint64_t>;
  uint32_t smallest = UINT32_MAX;
  Bits masked = 0;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int j = 0; j < Slots; ++j) {
      masked |= static_cast<Bits>(x[r][j] == attn::negative_infinity() ? 1 : 0) << (r * Slots + j);
      x[r][j] = exp_nonpositive(sub(x[r][j], constants_of(r, j).max));
      smallest = min(smallest, float_to_bits(x[r][j]) - 1u);
    }
  }
  if (smallest >= kSmallestNumerator - 1u) {
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
      for (int j = 0; j < Slots; ++j) x[r][j] = quotient(x[r][j], constants_of(r, j).sum);
  } else {
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
      for (int j = 0; j < Slots; ++j) x[r][j] = attn::div(x[r][j], constants_of(r, j).sum.value);
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r)
#pragma unroll
    for (int j = 0; j < Slots; ++j)
      if (masked >> (r * Slots + j) & 1u) x[r][j] = masked_value();
}

// State of a row after a later state: attn::merge in the device's arithmetic.
__device__ __forceinline__ attn::RowState merged(attn::RowState row, attn::RowState later) {
  const float max = maximum(row.max, later.max);
  const float sum = add(mul(row.sum, exp_nonpositive(sub(row.max, max))), mul(later.sum, exp_nonpositive(sub(later.max, max))));
  if (!attn::is_live(later)) return row;
  return attn::is_live(row) ? attn::RowState{max, sum} : later;
}

// The part of a tile's tree that is within a lane, down to 32 slots.
__device__ __forceinline__ float tile_tree(const float (&e)[kSlots]) {
  return add(add(add(e[0], e[4]), add(e[2], e[6])), add(add(e[1], e[5]), add(e[3], e[7])));
}

// State of one row's tile of final scores.
__device__ __forceinline__ attn::RowState tile_state(float (&x)[kSlots]) {
  float max = maximum(x[0], x[1]);
#pragma unroll
  for (int j = 2; j < kSlots; ++j) max = maximum(max, x[j]);
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) max = maximum(max, __shfl_xor_sync(kAllLanes, max, distance));
#pragma unroll
  for (int j = 0; j < kSlots; ++j) x[j] = exp_nonpositive(sub(x[j], max));
  float sum = tile_tree(x);
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  return attn::RowState{max, sum};
}

// States of one tile of final scores, the state of row r in the lanes of row r. Scores turn into the terms of the sums.
__device__ __forceinline__ attn::RowState tile_states(float (&x)[kWarpRows][kSlots], const Groups& groups) {
  float values[kWarpRows];
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    values[r] = maximum(x[r][0], x[r][1]);
#pragma unroll
    for (int j = 2; j < kSlots; ++j) values[r] = maximum(values[r], x[r][j]);
  }
  const float max = reduce_lanes(values, [](float a, float b) { return maximum(a, b); });
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) values[r] = __shfl_sync(kAllLanes, max, lane_of_row(r));
  float lowest = 0.0f;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      x[r][j] = sub(x[r][j], values[r]);
      lowest = minimum(lowest, x[r][j]);
    }
  if (__all_sync(kAllLanes, lowest >= kLowestNormal)) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int j = 0; j < kSlots; ++j) x[r][j] = exp_normal(x[r][j]);
  } else {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (groups.has(j)) {
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) x[r][j] = exp_nonpositive(x[r][j]);
      } else {
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) x[r][j] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) values[r] = tile_tree(x[r]);
  return attn::RowState{max, reduce_lanes(values, [](float a, float b) { return add(a, b); })};
}

}  // namespace attn_cuda
