// Launches of the forward kernels of sm90-v1.
#pragma once

#include "attention_plan.cuh"
#include "hopper/row_block.cuh"

namespace attn_cuda::hopper {

struct ForwardArguments {
  CUtensorMap k, v;  // tiles of kTileKeys rows
  Attention problem;
  WorkOrder order;
  float factor;
  void* out;
  float* lse;
  int64_t blocks;
  const Hole* holes;  // of each item; null: none
  uint32_t* counter;  // of blocks taken beyond the first of each multiprocessor, zero at first; null where there are none
  bool garbage;       // a tile may hold rows of the arrays past an item's end
  // States of segments: n and l [segments, rows], O [segments, rows, D]. `segments` follow one another in the grid.
  int32_t segments;
  float* part_n;
  float* part_sum;
  float* part_o;
};

constexpr int kSegmentRows = 64;  // rows of a block of the segment kernel

// Rows of a block of the whole kernel.
constexpr int whole_rows(int64_t head_dim) { return head_dim == 64 ? 192 : 128; }

// out and LSE of all blocks of whole_rows rows, on `resident` multiprocessors.
cudaError_t launch_whole(const ForwardArguments& arguments, int64_t resident, void* stream);

// The states of all segments of `blocks` blocks of kSegmentRows rows, then their merge for all `rows` rows.
cudaError_t launch_segments(const ForwardArguments& arguments, int64_t blocks, int64_t rows, void* stream);

// Batch coordinate and row of stored key `first` in a tensor map.
struct MapPlace {
  int32_t batch, row;
};

__device__ __forceinline__ MapPlace map_place(const Attention& problem, const Item& item, int32_t first) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  return MapPlace{packed ? 0 : static_cast<int32_t>(item.batch), packed ? static_cast<int32_t>(item.first_key) + first : first};
}

__device__ __forceinline__ float sink_of(const Attention& problem, Row row) {
  return problem.sinks == nullptr || row.head < 0 ? dead() : problem.sinks[row.head];
}

}  // namespace attn_cuda::hopper
