// Where rows lie in memory, and loads and stores of one tile of a row.
#pragma once

#include "attn_cuda.h"
#include "tile.cuh"

namespace attn_cuda {

// Rows over up to three outer axes; `flat`: the first two have size 1; `narrow`: row numbers fit 32 bits, where a division is several times
// cheaper.
struct Axes {
  int64_t rows;
  int64_t size1;
  int64_t size2;
  bool flat;
  bool narrow;
};

struct Source {
  const void* data;
  int64_t strides[3];
  bool is_float;  // binary32 although the kernel's dtype is another one
};

__device__ __forceinline__ int64_t divide(const Axes& axes, int64_t a, int64_t b) {
  return axes.narrow ? static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)) : a / b;
}

__device__ __forceinline__ int64_t row_offset(const Axes& axes, const int64_t (&strides)[3], int64_t row) {
  if (axes.flat) return row * strides[2];
  const int64_t outer = divide(axes, row, axes.size2);
  const int64_t first = divide(axes, outer, axes.size1);
  return first * strides[0] + (outer - first * axes.size1) * strides[1] + (row - outer * axes.size2) * strides[2];
}

// Kept keys of the batch item of one row; without a mask all keys. Indices within a row fit 32 bits, as T < 2^31.
struct Keys {
  const uint8_t* kept;
  const int32_t* positions;
  int count;

  __device__ __forceinline__ int tiles() const { return static_cast<int>((static_cast<uint32_t>(count) + kRowTile - 1) / kRowTile); }
};

template <bool Masked>
__device__ __forceinline__ Keys keys_of_row(const Axes& axes, const attn_cuda_mask& mask, int64_t keys, int64_t row) {
  if constexpr (!Masked) return Keys{nullptr, nullptr, static_cast<int>(keys)};
  const int64_t batch = divide(axes, row, mask.rows_per_batch);
  return Keys{mask.kept + batch * keys, mask.positions + batch * keys, mask.counts[batch]};
}

template <bool Masked>
__device__ __forceinline__ int position(const Keys& keys, int logical) {
  return Masked ? keys.positions[logical] : logical;
}

template <typename T, int V>
struct alignas(sizeof(T) * V) Vector {
  T lanes[V];
};

// Slots [base, base + kRowTile) of a row; slots without a key get `fill`.
template <typename T, int V, bool Masked>
__device__ __forceinline__ void load_tile(const T* row, const Keys& keys, int base, int lane, float fill, RowSlots& values) {
  if (!Masked && keys.count - base >= kRowTile) {
#pragma unroll
    for (int k = 0; k < kRowSlots; k += V) {
      const auto loaded = *reinterpret_cast<const Vector<T, V>*>(row + base + slot<V>(k, lane));
#pragma unroll
      for (int v = 0; v < V; ++v) values[k + v] = widened(loaded.lanes[v]);
    }
    return;
  }
  const int here = min(keys.count - base, kRowTile);
#pragma unroll
  for (int k = 0; k < kRowSlots; ++k) {
    const int at = slot<V>(k, lane);
    values[k] = at < here ? widened(row[position<Masked>(keys, base + at)]) : fill;
  }
}

template <typename T, int V, bool Masked>
__device__ __forceinline__ void store_tile(T* row, const Keys& keys, int base, int lane, const RowSlots& values) {
  if (!Masked && keys.count - base >= kRowTile) {
#pragma unroll
    for (int k = 0; k < kRowSlots; k += V) {
      Vector<T, V> stored;
#pragma unroll
      for (int v = 0; v < V; ++v) stored.lanes[v] = rounded<T>(values[k + v]);
      *reinterpret_cast<Vector<T, V>*>(row + base + slot<V>(k, lane)) = stored;
    }
    return;
  }
  const int here = min(keys.count - base, kRowTile);
#pragma unroll
  for (int k = 0; k < kRowSlots; ++k) {
    const int at = slot<V>(k, lane);
    if (at < here) row[position<Masked>(keys, base + at)] = rounded<T>(values[k]);
  }
}

// A tile in shared memory as binary32; each lane reads back what it wrote itself, so this needs no barrier.
template <int V>
__device__ __forceinline__ void stage_tile(float* tile, int lane, const RowSlots& values) {
#pragma unroll
  for (int k = 0; k < kRowSlots; k += V) {
    Vector<float, V> stored;
#pragma unroll
    for (int v = 0; v < V; ++v) stored.lanes[v] = values[k + v];
    *reinterpret_cast<Vector<float, V>*>(tile + slot<V>(k, lane)) = stored;
  }
}

template <int V>
__device__ __forceinline__ void staged_tile(const float* tile, int lane, RowSlots& values) {
#pragma unroll
  for (int k = 0; k < kRowSlots; k += V) {
    const auto loaded = *reinterpret_cast<const Vector<float, V>*>(tile + slot<V>(k, lane));
#pragma unroll
    for (int v = 0; v < V; ++v) values[k + v] = loaded.lanes[v];
  }
}

// +0 at every key, or at the keys that the padding mask removed.
template <typename T>
__device__ __forceinline__ void store_zeros(T* row, const uint8_t* kept, int keys, int first, int step) {
#pragma unroll 1
  for (int key = first; key < keys; key += step) {
    if (kept == nullptr || kept[key] == 0) row[key] = rounded<T>(0.0f);
  }
}

// Most threads of a block of teams that are warps, and of a block that is a team; two of the latter on an SM leave 40 registers a thread
// forward and 56 backward.
constexpr int kNarrowThreads = 128;
constexpr int kForwardThreads = 768;
constexpr int kBackwardThreads = 576;
constexpr int kWideBlocks = 2;

// The threads of one row: a whole block (`Wide`) or one warp.
template <bool Wide>
struct Team {
  int lane, warp, warps, member, size;

  __device__ __forceinline__ Team() {
    lane = threadIdx.x % kLanes;
    warp = Wide ? threadIdx.x / kLanes : 0;
    warps = Wide ? blockDim.x / kLanes : 1;
    member = Wide ? threadIdx.x : lane;
    size = Wide ? blockDim.x : kLanes;
  }

  __device__ __forceinline__ void sync() const {
    if constexpr (Wide) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // Place of this team within its block, and teams a block holds.
  __device__ __forceinline__ int place() const { return Wide ? 0 : threadIdx.x / kLanes; }
  __device__ __forceinline__ int teams() const { return Wide ? 1 : blockDim.x / kLanes; }
};

}  // namespace attn_cuda
