// One tile of a product: 128 x 128 outputs of a block, 8 x 8 of a thread, each one FMA chain over k ascending. Shared memory holds both
// operands with k as the row, and the next 16 k wait in registers as they are stored.
#pragma once

#include "attention_array.cuh"

namespace attn_cuda {

constexpr int kGemmThreads = 256;
constexpr int kGemmTile = 128;
constexpr int kGemmDepth = 16;
constexpr int kGemmPitch = kGemmTile + 4;

// Rows of one kv head: row r is row r mod `rows` of head r div `rows` of its group.
struct GroupedRows {
  Array array;
  int32_t group;  // heads
  int32_t rows;   // of each head
};

// Position of a row, advanced without divisions.
struct GroupedRow {
  int32_t head, row;

  __device__ __forceinline__ GroupedRow(const GroupedRows& operand, int64_t index) {
    head = index < operand.rows ? 0 : static_cast<int32_t>(index / operand.rows);
    row = static_cast<int32_t>(index - static_cast<int64_t>(head) * operand.rows);
  }

  __device__ __forceinline__ void advance(const GroupedRows& operand, int32_t steps) {
    row += steps;
    while (row >= operand.rows && head < operand.group) {
      row -= operand.rows;
      ++head;
    }
  }

  __device__ __forceinline__ int64_t offset(const GroupedRows& operand, int64_t base) const {
    return head < operand.group ? base + head * operand.array.head + row * operand.array.row : kNoRow;
  }
};

// How an operand is read: 16 bytes at a time, or element by element for any strides and dtype.
enum class Access { floats, halves, any };

inline Access access_of(const Array& array) {
  if (!array.vectors) return Access::any;
  return array.dtype == ATTN_CUDA_FLOAT32 ? Access::floats : Access::halves;
}

template <Access Kind>
__device__ __forceinline__ Eight load_piece(const Array& array, int64_t row, int32_t column) {
  if constexpr (Kind == Access::floats) return load_eight_as<float>(array, row, column);
  if constexpr (Kind == Access::halves) return load_eight_as<attn::bfloat16>(array, row, column);
  return gather_eight(array, row, column);
}

template <Access Kind>
__device__ __forceinline__ Widened widened_piece(const Eight& eight, int32_t dtype) {
  if constexpr (Kind == Access::floats) return widened_as<float>(eight);
  if constexpr (Kind == Access::halves)
    return dtype == ATTN_CUDA_BFLOAT16 ? widened_as<attn::bfloat16>(eight) : widened_as<attn::float16>(eight);
  return widened(eight, dtype);
}

// An operand whose rows are outputs and whose columns are k: a thread loads eight k of one row and stores them down a column of shared
// memory.
template <Access Kind>
struct ColumnsAreDepth {
  GroupedRow place;
  int64_t row;
  int32_t column;

  __device__ __forceinline__ ColumnsAreDepth(const GroupedRows& operand, int64_t base, int64_t first, int32_t)
      : place(operand, first + threadIdx.x % kGemmTile), column(static_cast<int32_t>(threadIdx.x) / kGemmTile * 8) {
    row = place.offset(operand, base);
  }

  __device__ __forceinline__ Eight load(const GroupedRows& operand) const { return load_piece<Kind>(operand.array, row, column); }

  __device__ __forceinline__ void advance(const GroupedRows&) { column += kGemmDepth; }

  __device__ __forceinline__ void store(const Eight& eight, int32_t dtype, float* shared) const {
    const Widened values = widened_piece<Kind>(eight, dtype);
    float* to = shared + threadIdx.x / kGemmTile * 8 * kGemmPitch + threadIdx.x % kGemmTile;
    to[0 * kGemmPitch] = values.low.x;
    to[1 * kGemmPitch] = values.low.y;
    to[2 * kGemmPitch] = values.low.z;
    to[3 * kGemmPitch] = values.low.w;
    to[4 * kGemmPitch] = values.high.x;
    to[5 * kGemmPitch] = values.high.y;
    to[6 * kGemmPitch] = values.high.z;
    to[7 * kGemmPitch] = values.high.w;
  }
};

// An operand whose rows are k and whose columns are outputs.
template <Access Kind>
struct RowsAreDepth {
  GroupedRow place;
  int64_t base;
  int32_t column;

  __device__ __forceinline__ RowsAreDepth(const GroupedRows& operand, int64_t base, int64_t, int32_t first)
      : place(operand, threadIdx.x / (kGemmTile / 8)),
        base(base),
        column(first + static_cast<int32_t>(threadIdx.x) % (kGemmTile / 8) * 8) {}

  __device__ __forceinline__ Eight load(const GroupedRows& operand) const {
    return load_piece<Kind>(operand.array, place.offset(operand, base), column);
  }

  __device__ __forceinline__ void advance(const GroupedRows& operand) { place.advance(operand, kGemmDepth); }

  __device__ __forceinline__ void store(const Eight& eight, int32_t dtype, float* shared) const {
    const Widened values = widened_piece<Kind>(eight, dtype);
    auto* to = reinterpret_cast<float4*>(shared + threadIdx.x / (kGemmTile / 8) * kGemmPitch + threadIdx.x % (kGemmTile / 8) * 8);
    to[0] = values.low;
    to[1] = values.high;
  }
};

// Outputs of a thread: rows 4 m + {0..3} and 64 + 4 m + {0..3}, columns likewise; a warp covers 4 x 8 threads, so its reads are broadcasts.
struct GemmPlace {
  int row, column;

  __device__ __forceinline__ GemmPlace() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    row = (warp / 2 * 4 + lane / 8) * 4;
    column = (warp % 2 * 8 + lane % 8) * 4;
  }
};

__device__ __forceinline__ void load_operand(const float* from, float (&values)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + kGemmTile / 2);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = low.z;
  values[3] = low.w;
  values[4] = high.x;
  values[5] = high.y;
  values[6] = high.z;
  values[7] = high.w;
}

__device__ __forceinline__ void multiply_depth(const float* left, const float* right, const GemmPlace& place, float (&acc)[8][8]) {
  const float* rows = left + place.row;
  const float* columns = right + place.column;
#pragma unroll 2
  for (int k = 0; k < kGemmDepth; ++k) {
    float a[8], b[8];
    load_operand(rows + k * kGemmPitch, a);
    load_operand(columns + k * kGemmPitch, b);
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n) acc[m][n] = exact_fma(a[m], b[n], acc[m][n]);
  }
}

}  // namespace attn_cuda
