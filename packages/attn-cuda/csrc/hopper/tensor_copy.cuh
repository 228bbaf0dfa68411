// Copies of tiles between global and shared memory by the tensor memory accelerator, described by a CUtensorMap.
// Source: PTX ISA, "cp.async.bulk.tensor", "cp.async.bulk.commit_group", "prefetch"; CUDA driver API, cuTensorMapEncodeTiled.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "attn/cuda/interface.h"
#include "hopper/barrier.cuh"

namespace attn_cuda::hopper {

constexpr int kPanel = 64;           // columns of a panel: 128 bytes of halves, one swizzled row
constexpr int kPanelRowBytes = 128;  // panels begin at multiples of 1024 bytes in shared memory
constexpr int kMapAlignment = 16;    // bytes, of an array's address and strides

// Describes halves [batch, heads, rows, columns] with unit column stride and `strides` of batch, head and row in elements, in panels of
// `box_rows` rows and 64 columns, swizzled by 128 bytes. Elements outside are +0. The array must pass can_map. An empty array has no map.
cudaError_t encode_map(CUtensorMap* map, const void* data, int32_t dtype, const int64_t (&sizes)[4], const int64_t (&strides)[3],
                       int box_rows);

// Whether the accelerator takes that address and those strides; a stride of an axis of length 1 does not matter.
bool can_map(const void* data, const int64_t (&sizes)[4], const int64_t (&strides)[3], int64_t column_stride);

// One panel at (column, row, head, batch), awaited on `barrier`, which must expect box_rows * 128 bytes.
__device__ __forceinline__ void load_panel(void* shared, const CUtensorMap& map, uint64_t* barrier, int column, int row, int head,
                                           int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                   shared_address(shared)),
               "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// The panels of a tile of kColumns columns, `panel_bytes` apart.
template <int kColumns>
__device__ __forceinline__ void load_tile(uint8_t* shared, int panel_bytes, const CUtensorMap& map, uint64_t* barrier, int row, int head,
                                          int batch) {
#pragma unroll
  for (int panel = 0; panel < kColumns / kPanel; ++panel)
    load_panel(shared + panel * panel_bytes, map, barrier, panel * kPanel, row, head, batch);
}

// One panel from shared memory; rows and columns outside are not written. async_fence and a barrier come before.
__device__ __forceinline__ void store_panel(const void* shared, const CUtensorMap& map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kGroups of this thread's groups of stores still read shared memory.
template <int kGroups>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Byte of element (row, column) of a panel in its 128-byte swizzle: 16-byte piece i of row r lies at piece i ^ (r mod 8).
__device__ __forceinline__ int swizzled(int row, int column) {
  return row * kPanelRowBytes + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2;
}

}  // namespace attn_cuda::hopper
