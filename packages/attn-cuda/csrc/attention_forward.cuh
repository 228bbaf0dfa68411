// What the two ways through the forward share: one block for a row block and all its keys, or, for few rows and many keys, tiles spread
// over the device.
#pragma once

#include "attention_plan.cuh"
#include "attention_rows.cuh"

namespace attn_cuda {

constexpr int kMostWarps = 8;  // of a block; each owns kWarpRows rows

struct ForwardArguments {
  Attention problem;
  int64_t per_item, blocks;
  const int64_t* plan;
  float* held;  // scores of held_tiles tiles for each block in work, and one more tile to park sums
  int32_t held_tiles;
  void* out;
  int32_t out_dtype;
  bool vectors;
  float* lse;
  float* row_max;
  float* row_sum;
};

__device__ __forceinline__ void store_state(const ForwardArguments& arguments, const Item& item, Row row, attn::RowState state) {
  const int64_t index = row_index(arguments.problem, item, row);
  arguments.lse[index] = attn::positive_zero(attn::log_sum_exp(state));
  arguments.row_max[index] = attn::positive_zero(state.max);
  arguments.row_sum[index] = state.sum;
}

// How the tiles are spread: `tiles` of a row (0: not at all), of which the workspace holds `wave` at a time, and rows of a block, for the
// scores and for P times the values.
struct Split {
  int64_t tiles, wave, block_rows, value_rows;
};

Split choose_split(const Limits& limits, const attn_cuda_attention& problem);
int64_t split_bytes(const attn_cuda_attention& problem, const Split& split);
int launch_split(const attn_cuda_attention& problem, const ForwardArguments& arguments, const Split& split, Workspace& space, void* stream);

}  // namespace attn_cuda
