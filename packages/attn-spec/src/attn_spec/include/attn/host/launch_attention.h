// attention forward and backward: cut into blocks of rows, sized so that scratch stays near the second-level cache, and run on threads.
#pragma once

#include <cstring>

#include "attn/host/dispatch.h"

namespace attn::host {

constexpr int64_t kMostRows = 96;          // rows of a block; a multiple of every variant's register block
constexpr int64_t kScoreFloats = 1 << 20;  // floats of scores a thread, before rows become too few

inline int64_t item_queries(const AttentionProblem& problem, int64_t b) {
  if (problem.cu_seqlens_q == nullptr) return problem.queries;
  return problem.seqlens_q ? problem.seqlens_q[b] : problem.cu_seqlens_q[b + 1] - problem.cu_seqlens_q[b];
}

inline int64_t item_tiles(const AttentionProblem& problem, int64_t b) {
  int64_t keys = problem.keys, shift = 0;
  if (problem.cu_seqlens_k != nullptr)
    keys = problem.seqlens_k ? problem.seqlens_k[b] : problem.cu_seqlens_k[b + 1] - problem.cu_seqlens_k[b];
  if (problem.k_start != nullptr) shift = problem.k_start[b] % kTile;
  return (shift + keys + kTile - 1) / kTile;
}

// Blocks of rows in the order of the chains, and where the blocks of each (batch item, kv head) begin.
struct RowBlocks {
  std::vector<RowBlock> blocks;
  std::vector<int64_t> units;  // first block of each unit, and the end
  int64_t tiles = 1;
  double work = 0.0;

  RowBlocks(const AttentionProblem& problem, int64_t most_rows) {
    const int64_t group = problem.heads / problem.kv_heads;
    for (int64_t b = 0; b < problem.batch; ++b) {
      const int64_t queries = item_queries(problem, b);
      if (queries == 0) continue;
      const int64_t heads_at_once = std::max<int64_t>(1, most_rows / queries);
      tiles = std::max(tiles, item_tiles(problem, b));
      work += static_cast<double>(problem.heads * queries * item_tiles(problem, b) * kTile) *
              static_cast<double>(problem.head_dim + problem.value_dim);
      for (int64_t kv = 0; kv < problem.kv_heads; ++kv) {
        units.push_back(static_cast<int64_t>(blocks.size()));
        for (int64_t head = 0; head < group; head += heads_at_once) {
          const int64_t first = head * queries, last = std::min(head + heads_at_once, group) * queries;
          for (int64_t row = first; row < last; row += most_rows) blocks.push_back(RowBlock{b, kv, row, std::min(row + most_rows, last)});
        }
      }
    }
    units.push_back(static_cast<int64_t>(blocks.size()));
  }

  int64_t unit_count() const { return static_cast<int64_t>(units.size()) - 1; }
};

// Rows of a block: few enough for the scratch budget and for every thread to get work.
inline int64_t rows_of_block(const AttentionProblem& problem, int64_t buffers, int threads) {
  int64_t tiles = 1, rows = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    tiles = std::max(tiles, item_tiles(problem, b));
    rows += problem.heads * item_queries(problem, b);
  }
  const int64_t by_memory = kScoreFloats / (buffers * score_row(tiles));
  const int64_t by_threads = (rows + 2 * threads - 1) / (2 * threads);
  return std::clamp<int64_t>(std::min(by_memory, by_threads) / 12 * 12, 12, kMostRows);
}

inline AttentionCall call_of(const AttentionProblem& problem, const KeptKeyLists& kept, const RowBlocks& blocks, int64_t rows) {
  AttentionCall call{};
  call.problem = problem;
  call.kept = kept.view();
  call.dropout = make_dropout(problem.dropout_p, problem.dropout_seed);
  call.blocks = blocks.blocks.data();
  call.row_limit = rows;
  call.tile_limit = blocks.tiles;
  return call;
}

inline int64_t block_scratch(const AttentionCall& call, bool backward, bool keys) {
  Arena arena{nullptr};
  BlockScratch(arena, call.row_limit, call.tile_limit, call.problem.head_dim, call.problem.value_dim, backward, keys);
  return arena.used;
}

inline int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// Rows of packed output outside every used range: +0, LSE and row max -inf, row sum 0.
inline void clear_gap(const AttentionProblem& problem, const AttentionForward& results, int64_t begin, int64_t end) {
  const int64_t size = size_of(results.out_dtype);
  const Strides& strides = results.out.strides;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t head = 0; head < problem.heads; ++head) {
      const int64_t index = head * problem.queries + row;
      results.lse[index] = results.row_max[index] = negative_infinity();
      results.row_sum[index] = 0.0f;
      for (int64_t column = 0; column < problem.value_dim; ++column)
        memset(static_cast<char*>(results.out.data) + (row * strides.row + head * strides.head + column * strides.column) * size, 0,
               static_cast<size_t>(size));
    }
}

inline void clear_gaps(const AttentionProblem& problem, const AttentionForward& results) {
  if (problem.cu_seqlens_q == nullptr) return;
  int64_t begin = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    clear_gap(problem, results, begin, problem.cu_seqlens_q[b]);
    begin = problem.cu_seqlens_q[b] + item_queries(problem, b);
  }
  clear_gap(problem, results, begin, problem.queries);
}

void attention_forward(const AttentionProblem& problem, const AttentionForward& results, int threads, Variant variant) {
  const KeptKeyLists kept(problem.key_mask, problem.batch, problem.keys);
  const int64_t rows = rows_of_block(problem, 1, std::max(threads, 1));
  const RowBlocks blocks(problem, rows);
  AttentionCall call = call_of(problem, kept, blocks, rows);
  call.forward = results;
  clear_gaps(problem, results);
  const Kernels& kernels = kernels_of(variant);
  parallel_for(static_cast<int64_t>(blocks.blocks.size()), threads_for(blocks.work, threads), block_scratch(call, false, false),
               [&](int64_t item, float* scratch) { kernels.attention_forward(call, blocks.blocks[static_cast<size_t>(item)], scratch); });
}

// Where the row values of a batch item's queries of one head begin: [B, H, S], packed [H, total].
inline int64_t first_row_value(const AttentionProblem& problem, int64_t b, int64_t head) {
  return problem.cu_seqlens_q ? head * problem.queries + problem.cu_seqlens_q[b] : (b * problem.heads + head) * problem.queries;
}

// dsinks[h]: over each batch item's queries, then over the batch.
inline void sum_sinks(const AttentionProblem& problem, const float* dsink, float* dsinks) {
  const DefaultFloatEnvironment environment;
  for (int64_t head = 0; head < problem.heads; ++head) {
    float total = 0.0f;
    for (int64_t b = 0; b < problem.batch; ++b) {
      const int64_t first = first_row_value(problem, b, head);
      float sum = 0.0f;
      for (int64_t i = 0; i < item_queries(problem, b); ++i) sum = add(sum, dsink[first + i]);
      total = add(total, sum);
    }
    dsinks[head] = total;
  }
}

inline void clear_gradients(const AttentionProblem& problem, const AttentionBackward& gradients) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int64_t size = size_of(problem.dtype), items = packed ? 1 : problem.batch;
  const auto clear = [](void* data, int64_t bytes) {
    if (data != nullptr) memset(data, 0, static_cast<size_t>(bytes));
  };
  clear(gradients.dq, items * problem.heads * problem.queries * problem.head_dim * size);
  clear(gradients.dk, items * problem.kv_heads * problem.keys * problem.head_dim * size);
  clear(gradients.dv, items * problem.kv_heads * problem.keys * problem.value_dim * size);
  const int64_t* shape = gradients.dbias_shape;
  if (gradients.dbias != nullptr) clear(gradients.dbias, shape[0] * shape[1] * shape[2] * shape[3] * 4);
}

// Parts of one phase of the backward. Fused: one part a unit. Split: first the rows, block by block, then the keys, tile by tile.
inline std::vector<BackwardPart> row_parts(const RowBlocks& blocks, bool fused, bool keys) {
  std::vector<BackwardPart> parts;
  for (int64_t unit = 0; unit < blocks.unit_count(); ++unit) {
    const int64_t begin = blocks.units[static_cast<size_t>(unit)], end = blocks.units[static_cast<size_t>(unit) + 1];
    for (int64_t block = begin; block < end; block = fused ? end : block + 1)
      parts.push_back(BackwardPart{block, fused ? end : block + 1, 0, blocks.tiles, true, fused && keys});
  }
  return parts;
}

inline std::vector<BackwardPart> key_parts(const RowBlocks& blocks, int64_t tiles_at_once) {
  std::vector<BackwardPart> parts;
  for (int64_t unit = 0; unit < blocks.unit_count(); ++unit)
    for (int64_t tile = 0; tile < blocks.tiles; tile += tiles_at_once)
      parts.push_back(BackwardPart{blocks.units[static_cast<size_t>(unit)], blocks.units[static_cast<size_t>(unit) + 1], tile,
                                   std::min(tile + tiles_at_once, blocks.tiles), false, true});
  return parts;
}

void attention_backward(const AttentionProblem& problem, const AttentionBackward& gradients, int threads, Variant variant) {
  const KeptKeyLists kept(problem.key_mask, problem.batch, problem.keys);
  const int64_t rows = rows_of_block(problem, 2, std::max(threads, 1));
  const RowBlocks blocks(problem, rows);
  const int64_t row_results = (problem.cu_seqlens_q ? 1 : problem.batch) * problem.heads * problem.queries;
  const Scratch delta(row_results), dsink(row_results);
  AttentionCall call = call_of(problem, kept, blocks, rows);
  call.backward = gradients;
  call.delta = delta.data();
  call.dsink = dsink.data();
  const Kernels& kernels = kernels_of(variant);
  const int workers = threads_for(2.5 * blocks.work, threads);
  const bool keys = gradients.dk != nullptr || gradients.dv != nullptr;
  const bool fused = keys && (blocks.unit_count() % workers == 0 || blocks.unit_count() >= 4 * workers);
  clear_gradients(problem, gradients);

  const std::vector<BackwardPart> first = row_parts(blocks, fused, keys);
  parallel_for(static_cast<int64_t>(first.size()), workers, block_scratch(call, true, fused),
               [&](int64_t item, float* scratch) { kernels.attention_backward(call, first[static_cast<size_t>(item)], scratch); });
  if (keys && !fused) {
    AttentionCall by_keys = call;
    by_keys.tile_limit = std::min<int64_t>(2, blocks.tiles);
    const std::vector<BackwardPart> second = key_parts(blocks, by_keys.tile_limit);
    parallel_for(static_cast<int64_t>(second.size()), workers, block_scratch(by_keys, true, true),
                 [&](int64_t item, float* scratch) { kernels.attention_backward(by_keys, second[static_cast<size_t>(item)], scratch); });
  }
  if (gradients.dsinks != nullptr) sum_sinks(problem, dsink.data(), gradients.dsinks);
  if (gradients.dbias != nullptr && problem.queries > 0)
    parallel_for(BiasBlocks(call).items, workers, block_scratch(call, true, false),
                 [&](int64_t item, float* scratch) { kernels.bias_gradient(call, item, scratch); });
}

}  // namespace attn::host
