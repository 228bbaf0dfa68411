// Rows on their way through shared memory as they are stored: a row may begin anywhere in 16 bytes, and keeps its place in them.
#pragma once

#include "hopper/barrier.cuh"
#include "rows.cuh"

namespace attn_cuda {

constexpr int kPiece = 16;

// Room for `slots` elements of `size` bytes.
__host__ __device__ constexpr int64_t staged_bytes(int64_t slots, int size) { return slots * size + kPiece; }

// Copies of rows that a team of threads awaits together, `Rows` at a time. Where the copy engine takes rows of any length (sm_90 and later)
// one thread starts them; else all threads copy, and start() returns when they are done.
template <int Rows, bool Wide>
class RowCopies {
 public:
  // `barriers`: one for each team of the block, in shared memory. Every thread of the block comes here, of which one initialises all, since
  // synccheck of compute-sanitizer is misled by initialisations at addresses that differ between threads.
  template <int Teams>
  __device__ __forceinline__ RowCopies(uint64_t (&barriers)[Teams], const Team<Wide>& team)
      : barrier_(barriers + team.place()), team_(team) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
#pragma unroll
      for (uint64_t& barrier : barriers) hopper::barrier_init(&barrier, Rows);
      hopper::barrier_init_fence();
    }
    __syncthreads();
#endif
  }

  // Where the first element of a row lies in what start() fills.
  template <bool Masked, typename T>
  static __device__ __forceinline__ T* first(char* staged, const T* row) {
    return reinterpret_cast<T*>(staged + (Masked ? 0 : skew(row)));
  }

  // Starts the copy of a row's logical keys.
  template <bool Masked, typename T>
  __device__ __forceinline__ void start(char* staged, const T* row, const Keys& keys) {
    T* to = first<Masked>(staged, row);
    if constexpr (Masked) {
      for (int at = team_.member; at < keys.count; at += team_.size) to[at] = row[keys.positions[at]];
#if __CUDA_ARCH__ >= 900
      if (team_.member == 0) hopper::barrier_arrive(barrier_);
#endif
    } else {
      constexpr int kElements = kPiece / sizeof(T);
      const int before = skew(row) / static_cast<int>(sizeof(T));
      const int head = min((kElements - before) % kElements, keys.count), whole = (keys.count - head) / kElements * kElements;
#if __CUDA_ARCH__ >= 900
      if (team_.warp != 0) return;
      if (team_.lane == 0) {
        const auto bytes = static_cast<uint32_t>(whole * sizeof(T));
        hopper::barrier_expect(barrier_, bytes);
        if (bytes != 0) copy_bytes(to + head, row + head, bytes, barrier_);
      }
#else
      using Piece = Vector<T, kElements>;
      for (int at = head + team_.member * kElements; at < head + whole; at += team_.size * kElements)
        *reinterpret_cast<Piece*>(to + at) = *reinterpret_cast<const Piece*>(row + at);
#endif
      // What lies before and after whole pieces is less than one each.
      const int end = team_.member < head ? team_.member : team_.member + whole;
      if (team_.member < 2 * kElements && end < keys.count) to[end] = row[end];
    }
  }

  // Waits for the rows of turn 0, 1, ...
  __device__ __forceinline__ void wait(int turn) {
#if __CUDA_ARCH__ >= 900
    hopper::barrier_wait(barrier_, turn % 2);
#endif
    team_.sync();
  }

  // Comes before the next start().
  __device__ __forceinline__ void end() {
#if __CUDA_ARCH__ >= 900
    hopper::async_fence();
#endif
    team_.sync();
  }

 private:
  // cp.async.bulk: addresses and `bytes` are multiples of 16.
  static __device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(hopper::shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(hopper::shared_address(barrier))
        : "memory");
  }

  uint64_t* barrier_;
  const Team<Wide>& team_;

  template <typename T>
  static __device__ __forceinline__ int skew(const T* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % kPiece);
  }
};

// The slots of a tile; `fill` past the first `here`.
template <int V, typename T, int N>
__device__ __forceinline__ void read_tile(const T* tile, int here, int lane, float fill, float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < N; k += V) {
    const auto loaded = *reinterpret_cast<const Vector<T, V>*>(tile + slot<V>(k, lane));
#pragma unroll
    for (int v = 0; v < V; ++v) values[k + v] = widened(loaded.lanes[v]);
  }
  if (here < N * kLanes) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = slot<V>(k, lane) < here ? values[k] : fill;
  }
}

}  // namespace attn_cuda
