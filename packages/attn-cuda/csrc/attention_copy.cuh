// Rows on their way to shared memory behind a computation: copied as they are stored, then widened by the thread that copied them, which
// therefore needs no barrier in between.
#pragma once

#include "attention_array.cuh"

namespace attn_cuda {

// 16 bytes to shared memory, zeros unless `present`, asynchronously.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool present) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(present ? 16 : 0) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Copies may also wait in groups, the oldest first: all but the last `Later` groups have arrived.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Later>
__device__ __forceinline__ void wait_for_copy_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Later) : "memory");
}

// Pieces of Rows rows and Columns columns of an array with `vectors`. `raw` has room for them in the array's dtype. Addresses cost
// registers: Unroll of them are found at a time.
template <int Threads, int Rows, int Columns, int Unroll = 1>
struct RowCopy {
  static constexpr int kPieces = Columns / 8;
  static constexpr int kEach = Rows * kPieces / Threads;
  static_assert(Rows * kPieces % Threads == 0, "every thread copies the same number of pieces");

  template <typename T, typename OffsetOf>
  static __device__ __forceinline__ void start_as(int thread, const Array& array, int first, char* raw, OffsetOf offset_of) {
#pragma unroll Unroll
    for (int i = 0; i < kEach; ++i) {
      const int piece = i * Threads + thread, column = first + piece % kPieces * 8;
      const int64_t row = offset_of(piece / kPieces);
      const bool present = row != kNoRow && column < array.columns;
      const auto* from = static_cast<const T*>(array.data) + (present ? row + column : 0);
      char* to = raw + static_cast<size_t>(piece) * (8 * sizeof(T));
      copy_async(to, from, present);
      if constexpr (sizeof(T) == 4) copy_async(to + 16, from + 4, present);
    }
  }

  // Starts the copy of columns [first, first + Columns) by `thread` of Threads; `offset_of(row)` is the element offset of a row or kNoRow.
  template <typename OffsetOf>
  static __device__ __forceinline__ void start(int thread, const Array& array, int first, char* raw, OffsetOf offset_of) {
    if (array.dtype == ATTN_CUDA_FLOAT32) {
      start_as<float>(thread, array, first, raw, offset_of);
    } else {
      start_as<attn::bfloat16>(thread, array, first, raw, offset_of);
    }
  }

  template <typename T>
  static __device__ __forceinline__ void finish_as(int thread, const char* raw, float* to, int pitch) {
#pragma unroll(Unroll < 2 ? 2 : Unroll)
    for (int i = 0; i < kEach; ++i) {
      const int piece = i * Threads + thread;
      const auto* from = reinterpret_cast<const uint4*>(raw + static_cast<size_t>(piece) * (8 * sizeof(T)));
      Eight eight{};
      eight.low = from[0];
      if constexpr (sizeof(T) == 4) eight.high = from[1];
      const Widened values = widened_as<T>(eight);
      auto* at = reinterpret_cast<float4*>(to + piece / kPieces * pitch + piece % kPieces * 8);
      // Of eight neighbouring threads, which store together, four begin with the high half: else they meet in the banks of a long row.
      const bool turned = kPieces >= 8 && (piece & 4) != 0;
      at[turned] = turned ? values.high : values.low;
      at[!turned] = turned ? values.low : values.high;
    }
  }

  // Widens what `start` copied, once it has arrived; `pitch` floats from row to row.
  static __device__ __forceinline__ void finish(int thread, int32_t dtype, const char* raw, float* to, int pitch) {
    if (dtype == ATTN_CUDA_FLOAT32) {
      finish_as<float>(thread, raw, to, pitch);
    } else if (dtype == ATTN_CUDA_BFLOAT16) {
      finish_as<attn::bfloat16>(thread, raw, to, pitch);
    } else {
      finish_as<attn::float16>(thread, raw, to, pitch);
    }
  }

  // The same for a block of Threads threads.
  template <typename OffsetOf>
  static __device__ __forceinline__ void start(const Array& array, int first, char* raw, OffsetOf offset_of) {
    start(thread_anew(), array, first, raw, offset_of);
  }

  static __device__ __forceinline__ void finish(int32_t dtype, const char* raw, float* to, int pitch) {
    finish(thread_anew(), dtype, raw, to, pitch);
  }
};

}  // namespace attn_cuda
