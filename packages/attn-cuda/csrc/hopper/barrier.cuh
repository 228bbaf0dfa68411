// Barriers of a block: mbarriers, on which copies and warps are awaited, named barriers, and the order between ordinary stores and the
// asynchronous units that read shared memory. Source: PTX ISA, the section named at each function.
#pragma once

#include <cstdint>

#include "../named_barrier.cuh"

namespace attn_cuda::hopper {

// Address in the shared state space ("State Spaces", cvta).
__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// mbarrier.init: a phase ends when `count` threads have arrived and the bytes expected have come.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// fence.mbarrier_init ("membar / fence"): the initialisations become visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and the phase waits for `bytes` more of copies.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity, until the phase of that parity is over. The phase before the first one has parity 1.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// fence.proxy.async ("membar / fence"): this thread's stores to shared memory, before what wgmma and the copy engine read after a barrier.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// setmaxnreg: every warp of the warpgroup gives registers back, or waits for more.
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace attn_cuda::hopper
