// Strided arrays of any dtype as the kernels read them: pieces of a row, widened to binary32, and tiles of rows in shared memory.
#pragma once

#include "attention.h"
#include "tile.cuh"

namespace attn_cuda {

// Rows of elements. `vectors`: columns are contiguous, every row starts on 16 bytes and `columns` is a multiple of 8.
struct Array {
  const void* data;
  int64_t batch, head, row, column;  // strides in elements
  int32_t dtype;
  int32_t columns;
  bool vectors;
};

inline bool is_dtype(int32_t dtype) { return dtype >= ATTN_CUDA_FLOAT32 && dtype <= ATTN_CUDA_FLOAT16; }

inline Array array_of(const attn_cuda_array& array, int64_t columns) {
  const int64_t size = array.dtype == ATTN_CUDA_FLOAT32 ? 4 : 2;
  bool aligned = reinterpret_cast<uintptr_t>(array.data) % 16 == 0 && columns % 8 == 0 && array.strides[3] == 1;
  for (int axis = 0; axis < 3; ++axis) aligned = aligned && array.strides[axis] * size % 16 == 0;
  return Array{
      array.data, array.strides[0], array.strides[1], array.strides[2], array.strides[3], array.dtype, static_cast<int32_t>(columns),
      aligned};
}

// Eight neighbouring elements as they are stored: 32 bytes of binary32 or 16 bytes of a half type.
struct Eight {
  uint4 low, high;
};

constexpr int64_t kNoRow = INT64_MIN;  // in place of an offset: a row of zeros

template <typename T>
__device__ __forceinline__ Eight load_eight_as(const Array& array, int64_t row, int column) {
  Eight eight{};
  if (row == kNoRow || column >= array.columns) return eight;
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(array.data) + row + column);
  eight.low = from[0];
  if constexpr (sizeof(T) == 4) eight.high = from[1];
  return eight;
}

// Elements [column, column + 8) of the row at element offset `row`, zero beyond the last column; for arrays with `vectors`.
__device__ __forceinline__ Eight load_eight(const Array& array, int64_t row, int column) {
  return array.dtype == ATTN_CUDA_FLOAT32 ? load_eight_as<float>(array, row, column) : load_eight_as<attn::bfloat16>(array, row, column);
}

// The same for any strides and alignment.
__device__ __forceinline__ Eight gather_eight(const Array& array, int64_t row, int column) {
  Eight eight{};
  if (row == kNoRow) return eight;
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t offset = row + (column + i) * array.column;
    bits[i] = 0;
    if (column + i >= array.columns) continue;
    bits[i] = array.dtype == ATTN_CUDA_FLOAT32 ? static_cast<const uint32_t*>(array.data)[offset]
                                               : static_cast<const uint16_t*>(array.data)[offset];
  }
  if (array.dtype == ATTN_CUDA_FLOAT32) {
    eight.low = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    eight.high = make_uint4(bits[4], bits[5], bits[6], bits[7]);
  } else {
    eight.low = make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
  }
  return eight;
}

// One element.
__device__ __forceinline__ float element(const Array& array, int64_t offset) {
  if (array.dtype == ATTN_CUDA_FLOAT32) return static_cast<const float*>(array.data)[offset];
  if (array.dtype == ATTN_CUDA_BFLOAT16) return widened(static_cast<const attn::bfloat16*>(array.data)[offset]);
  return widened(static_cast<const attn::float16*>(array.data)[offset]);
}

struct Widened {
  float4 low, high;
};

template <typename T>
__device__ __forceinline__ float2 widened_pair(uint32_t pair) {
  return make_float2(widened(T{static_cast<uint16_t>(pair)}), widened(T{static_cast<uint16_t>(pair >> 16)}));
}

template <>
__device__ __forceinline__ float2 widened_pair<attn::bfloat16>(uint32_t pair) {
  return make_float2(bits_to_float(pair << 16), bits_to_float(pair & 0xFFFF0000u));
}

template <typename T>
__device__ __forceinline__ Widened widened_as(const Eight& eight) {
  const float2 a = widened_pair<T>(eight.low.x), b = widened_pair<T>(eight.low.y), c = widened_pair<T>(eight.low.z),
               d = widened_pair<T>(eight.low.w);
  return Widened{make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y)};
}

template <>
__device__ __forceinline__ Widened widened_as<float>(const Eight& eight) {
  return Widened{
      make_float4(bits_to_float(eight.low.x), bits_to_float(eight.low.y), bits_to_float(eight.low.z), bits_to_float(eight.low.w)),
      make_float4(bits_to_float(eight.high.x), bits_to_float(eight.high.y), bits_to_float(eight.high.z), bits_to_float(eight.high.w))};
}

__device__ __forceinline__ Widened widened(const Eight& eight, int32_t dtype) {
  if (dtype == ATTN_CUDA_FLOAT32) return widened_as<float>(eight);
  return dtype == ATTN_CUDA_BFLOAT16 ? widened_as<attn::bfloat16>(eight) : widened_as<attn::float16>(eight);
}

// The thread's number, read anew: what a loader derives from it would otherwise be kept in registers that the sums between two loads need.
__device__ __forceinline__ int thread_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

template <typename T, int Threads, int Rows, int Columns, typename OffsetOf>
__device__ __forceinline__ void load_rows_as(const Array& array, int first, int pitch, float* to, OffsetOf offset_of) {
  constexpr int kPieces = Columns / 8;
  constexpr int kCount = Rows * kPieces;
  constexpr int kEach = (kCount + Threads - 1) / Threads;
  // Loads in flight: few, since sums hold most registers, but more for few threads, where they do not.
  constexpr int kMost = (Threads < 256 ? 32 : 8) / static_cast<int>(sizeof(T));
  constexpr int kBatch = kEach < kMost ? kEach : kMost;
#pragma unroll 1
  for (int base = thread_anew(); base < kCount; base += kBatch * Threads) {
    Eight eight[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int piece = base + i * Threads;
      eight[i] = load_eight_as<T>(array, kCount % Threads == 0 || piece < kCount ? offset_of(piece / kPieces) : kNoRow,
                                  first + piece % kPieces * 8);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int piece = base + i * Threads;
      if (kCount % (kBatch * Threads) != 0 && piece >= kCount) continue;
      const Widened values = widened_as<T>(eight[i]);
      auto* at = reinterpret_cast<float4*>(to + piece / kPieces * pitch + piece % kPieces * 8);
      at[0] = values.low;
      at[1] = values.high;
    }
  }
}

// Columns [first, first + Columns) of Rows rows of an array with `vectors`, as binary32 in shared memory, `pitch` floats from row to row.
// `offset_of(row)` is the element offset of a row or kNoRow.
template <int Threads, int Rows, int Columns, typename OffsetOf>
__device__ __forceinline__ void load_rows(const Array& array, int first, int pitch, float* to, OffsetOf offset_of) {
  if (array.dtype == ATTN_CUDA_FLOAT32) {
    load_rows_as<float, Threads, Rows, Columns>(array, first, pitch, to, offset_of);
  } else if (array.dtype == ATTN_CUDA_BFLOAT16) {
    load_rows_as<attn::bfloat16, Threads, Rows, Columns>(array, first, pitch, to, offset_of);
  } else {
    load_rows_as<attn::float16, Threads, Rows, Columns>(array, first, pitch, to, offset_of);
  }
}

// Stores up to four neighbours by the zero rule and one conversion; `vectors`: four may be stored at once.
template <typename T>
__device__ __forceinline__ void store_as(T* to, const float (&values)[4], int count, bool vectors) {
  struct alignas(sizeof(T) * 4) Four {
    T lanes[4];
  };
  Four four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.lanes[i] = rounded<T>(attn::positive_zero(values[i]));
  if (vectors && count >= 4) {
    *reinterpret_cast<Four*>(to) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < count) to[i] = four.lanes[i];
}

__device__ __forceinline__ void store_four(void* data, int32_t dtype, int64_t offset, const float (&values)[4], int count, bool vectors) {
  if (dtype == ATTN_CUDA_FLOAT32) {
    store_as(static_cast<float*>(data) + offset, values, count, vectors);
  } else if (dtype == ATTN_CUDA_BFLOAT16) {
    store_as(static_cast<attn::bfloat16*>(data) + offset, values, count, vectors);
  } else {
    store_as(static_cast<attn::float16*>(data) + offset, values, count, vectors);
  }
}

}  // namespace attn_cuda
