// The arithmetic headers as AMD device code: one kernel a routine, so that its instructions can be read apart.
#include <hip/hip_runtime.h>

#include "attn/ordered.h"
#include "attn/philox.h"
#include "attn/tile_tree.h"

extern "C" __global__ void exponential(float* x) { x[threadIdx.x] = attn::exp_nonpositive(x[threadIdx.x]); }

extern "C" __global__ void logarithm(float* x) { x[threadIdx.x] = attn::ln(x[threadIdx.x]); }

extern "C" __global__ void score_gradient(float* x, const float* dp, const float* delta) {
  const int i = threadIdx.x;
  x[i] = attn::score_gradient(x[i], dp[i], delta[i]);
}

extern "C" __global__ void merge(attn::RowState* rows, const attn::RowState* tiles) {
  rows[threadIdx.x] = attn::merge(rows[threadIdx.x], tiles[threadIdx.x]);
}

extern "C" __global__ void conversion(const float* x, attn::bfloat16* b, attn::float16* h) {
  b[threadIdx.x] = attn::from_float<attn::bfloat16>(x[threadIdx.x]);
  h[threadIdx.x] = attn::from_float<attn::float16>(x[threadIdx.x]);
}

extern "C" __global__ void tree(float* slots) {
  slots[0] = attn::tree_sum(slots);
  slots[attn::kTile] = attn::tree_max(slots + attn::kTile);
}

extern "C" __global__ void dropout(unsigned char* kept, attn::Dropout decision) {
  kept[threadIdx.x] = attn::keeps(decision, 0, 1, 2, threadIdx.x);
}

extern "C" __global__ void chain(float* x, const float* a, const float* b) {
  x[threadIdx.x] = attn::fma(a[threadIdx.x], b[threadIdx.x], x[threadIdx.x]);
}

extern "C" __global__ void probability(float* x, attn::RowState row) { x[threadIdx.x] = attn::probability(x[threadIdx.x], row); }
