// Barriers of a block by number: some threads wait, the others only say that they came.
#pragma once

namespace attn_cuda {

// barrier.sync and barrier.arrive ("barrier{.cta}"): named barriers 1 to 15 over `threads` threads; 0 is __syncthreads.
__device__ __forceinline__ void named_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace attn_cuda
