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

// Kept keys of the batch item of one row; without a mask all keys.
struct Keys {
  const uint8_t* kept;
  const int32_t* positions;
  int64_t count;
};

template <bool Masked>
__device__ __forceinline__ Keys keys_of_row(const Axes& axes, const attn_cuda_mask& mask, int64_t keys, int64_t row) {
  if constexpr (!Masked) return Keys{nullptr, nullptr, keys};
  const int64_t batch = divide(axes, row, mask.rows_per_batch);
  return Keys{mask.kept + batch * keys, mask.positions + batch * keys, mask.counts[batch]};
}

template <bool Masked>
__device__ __forceinline__ int64_t position(const Keys& keys, int64_t logical) {
  return Masked ? keys.positions[logical] : logical;
}

template <typename T, int V>
struct alignas(sizeof(T) * V) Vector {
  T lanes[V];
};

// Slots [base, base + 256) of a row; slots without a key get `fill`.
template <typename T, int V, bool Masked>
__device__ __forceinline__ void load_tile(const T* row, const Keys& keys, int64_t base, int lane, float fill, Slots& values) {
  if (!Masked && base + attn::kTile <= keys.count) {
#pragma unroll
    for (int k = 0; k < kSlots; k += V) {
      const auto loaded = *reinterpret_cast<const Vector<T, V>*>(row + base + slot<V>(k, lane));
#pragma unroll
      for (int v = 0; v < V; ++v) values[k + v] = widened(loaded.lanes[v]);
    }
    return;
  }
  const int here = static_cast<int>(min(keys.count - base, static_cast<int64_t>(attn::kTile)));
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int at = slot<V>(k, lane);
    values[k] = at < here ? widened(row[position<Masked>(keys, base + at)]) : fill;
  }
}

template <typename T, int V, bool Masked>
__device__ __forceinline__ void store_tile(T* row, const Keys& keys, int64_t base, int lane, const Slots& values) {
  if (!Masked && base + attn::kTile <= keys.count) {
#pragma unroll
    for (int k = 0; k < kSlots; k += V) {
      Vector<T, V> stored;
#pragma unroll
      for (int v = 0; v < V; ++v) stored.lanes[v] = rounded<T>(values[k + v]);
      *reinterpret_cast<Vector<T, V>*>(row + base + slot<V>(k, lane)) = stored;
    }
    return;
  }
  const int here = static_cast<int>(min(keys.count - base, static_cast<int64_t>(attn::kTile)));
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int at = slot<V>(k, lane);
    if (at < here) row[position<Masked>(keys, base + at)] = rounded<T>(values[k]);
  }
}

// A tile in shared memory as binary32; each lane reads back what it wrote itself, so this needs no barrier.
template <int V>
__device__ __forceinline__ void stage_tile(float* tile, int lane, const Slots& values) {
#pragma unroll
  for (int k = 0; k < kSlots; k += V) {
    Vector<float, V> stored;
#pragma unroll
    for (int v = 0; v < V; ++v) stored.lanes[v] = values[k + v];
    *reinterpret_cast<Vector<float, V>*>(tile + slot<V>(k, lane)) = stored;
  }
}

template <int V>
__device__ __forceinline__ void staged_tile(const float* tile, int lane, Slots& values) {
#pragma unroll
  for (int k = 0; k < kSlots; k += V) {
    const auto loaded = *reinterpret_cast<const Vector<float, V>*>(tile + slot<V>(k, lane));
#pragma unroll
    for (int v = 0; v < V; ++v) values[k + v] = loaded.lanes[v];
  }
}

// +0 at every key, or at the keys that the padding mask removed.
template <typename T>
__device__ __forceinline__ void store_zeros(T* row, const uint8_t* kept, int64_t keys, int first, int step) {
  for (int64_t key = first; key < keys; key += step) {
    if (kept == nullptr || kept[key] == 0) row[key] = rounded<T>(0.0f);
  }
}

template <bool Wide>
constexpr int kMaxThreads = Wide ? 512 : 128;

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
