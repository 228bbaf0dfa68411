// dbias: sums of dS over (batch, head, query, key) ascending on the axes that the bias broadcasts.
#pragma once

#include "attn/host/attention_backward_kernel.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// dS of rows [begin, end) of one head over stored keys [first_key, last_key) onto dbias.
inline void add_rows(const AttentionCall& call, const Geometry& geometry, int64_t begin, int64_t end, int64_t first_key, int64_t last_key,
                     const BlockScratch& scratch) {
  const int64_t* shape = call.backward.dbias_shape;
  const Slots limit{geometry.logical_at(first_key) + geometry.shift, geometry.logical_at(last_key) + geometry.shift};
  const Slots seen = backward_block(call, geometry, begin, end, limit, false, scratch).seen;
  const int64_t base = seen.first_tile() * kTile, width = score_row(seen.last_tile() - seen.first_tile());
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = shape[0] == 1 ? 0 : geometry.batch, h = shape[1] == 1 ? 0 : geometry.head(row),
                  i = shape[2] == 1 ? 0 : geometry.query(row);
    float* to = call.backward.dbias + ((b * shape[1] + h) * shape[2] + i) * shape[3];
    const float* ds = scratch.products + (row - begin) * width - base;
    const Slots visible = overlap(geometry.visible(row), seen);
    for (int64_t slot = visible.begin; slot < visible.end; ++slot) {
      const int64_t j = shape[3] == 1 ? 0 : geometry.stored_key(slot - geometry.shift);
      if (!is_masked(ds[slot])) to[j] = add(to[j], ds[slot]);
    }
  }
}

// One item owns part of dbias: a batch item, head, block of rows and block of keys, or all of them where the bias broadcasts.
inline void bias_gradient(const AttentionCall& call, int64_t item, float* base) {
  const AttentionProblem& problem = call.problem;
  Arena arena{base};
  const BlockScratch scratch(arena, call.row_limit, call.tile_limit, problem.head_dim, problem.value_dim, true, false);
  const BiasBlocks blocks(call);
  const int64_t* shape = call.backward.dbias_shape;
  const int64_t key_block = item % blocks.keys, query_block = item / blocks.keys % blocks.queries;
  const int64_t own_head = item / (blocks.keys * blocks.queries) % shape[1], own_batch = item / (blocks.keys * blocks.queries * shape[1]);
  const int64_t first_key = key_block * BiasBlocks::kKeys;
  const int64_t last_key = shape[3] == 1 ? problem.keys : smaller(first_key + BiasBlocks::kKeys, problem.keys);
  const int64_t first_query = query_block * call.row_limit;
  const int64_t last_query = shape[2] == 1 ? problem.queries : smaller(first_query + call.row_limit, problem.queries);
  for (int64_t b = own_batch; b < (shape[0] == 1 ? problem.batch : own_batch + 1); ++b)
    for (int64_t h = own_head; h < (shape[1] == 1 ? problem.heads : own_head + 1); ++h) {
      const int64_t group = problem.heads / problem.kv_heads;
      const Geometry geometry(call, b, h / group);
      const int64_t row = h % group * problem.queries;
      for (int64_t i = first_query; i < last_query; i += call.row_limit)
        add_rows(call, geometry, row + i, row + smaller(i + call.row_limit, last_query), first_key, last_key, scratch);
    }
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
