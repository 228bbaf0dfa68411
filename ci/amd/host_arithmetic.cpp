// The kernels of ci/arithmetic/device.hip as loops of the host compiler.
#include <cstdint>

#include "attn/ordered.h"
#include "attn/philox.h"
#include "attn/tile_tree.h"

extern "C" {

void exponential(int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = attn::exp_nonpositive(x[i]);
}

void logarithm(int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = attn::ln(x[i]);
}

void score_gradient(int n, float* x, const float* dp, const float* delta) {
  for (int i = 0; i < n; ++i) x[i] = attn::score_gradient(x[i], dp[i], delta[i]);
}

void merge(int n, attn::RowState* rows, const attn::RowState* tiles) {
  for (int i = 0; i < n; ++i) rows[i] = attn::merge(rows[i], tiles[i]);
}

void conversion(int n, const float* x, attn::bfloat16* b, attn::float16* h) {
  for (int i = 0; i < n; ++i) {
    b[i] = attn::from_float<attn::bfloat16>(x[i]);
    h[i] = attn::from_float<attn::float16>(x[i]);
  }
}

void tree(int, float* slots) {
  slots[0] = attn::tree_sum(slots);
  slots[attn::kTile] = attn::tree_max(slots + attn::kTile);
}

void dropout(int n, unsigned char* kept, const attn::Dropout* decision) {
  for (int i = 0; i < n; ++i) kept[i] = attn::keeps(*decision, 0, 1, 2, i);
}

void chain(int n, float* x, const float* a, const float* b) {
  for (int i = 0; i < n; ++i) x[i] = attn::fma(a[i], b[i], x[i]);
}

void probability(int n, float* x, const attn::RowState* row) {
  for (int i = 0; i < n; ++i) x[i] = attn::probability(x[i], *row);
}
}
