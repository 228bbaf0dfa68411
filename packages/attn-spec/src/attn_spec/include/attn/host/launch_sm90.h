// attention of sm90-v1: cut into blocks of rows and tiles of keys, and run on threads.
#pragma once

#include "attn/host/launch_attention.h"
#include "attn/sm90.h"

namespace attn::host {

constexpr int64_t kSm90Rows = 64;  // rows of a block: they share the packed keys of a tile

inline Sm90Call sm90_call(const AttentionProblem& problem, const Sm90Options& options, const KeptKeyLists& kept, const RowBlocks& blocks) {
  Sm90Call call{};
  call.call = call_of(problem, kept, blocks, kSm90Rows);
  call.options = options;
  return call;
}

inline int64_t sm90_scratch(const AttentionProblem& problem) {
  Arena arena{nullptr};
  Sm90Scratch(arena, kSm90Rows, sm90::key_tile(problem.head_dim), problem.head_dim);
  return arena.used;
}

void sm90_chain(const Sm90Chain& chain, int threads, Variant variant) {
  Arena arena{nullptr};
  Sm90ChainScratch(arena, chain);
  const Kernels& kernels = kernels_of(variant);
  parallel_for(chain.rows, threads, arena.used, [&](int64_t row, float* scratch) { kernels.sm90_chain(chain, row, scratch); });
}

void sm90_forward(const AttentionProblem& problem, const Sm90Options& options, const Sm90Forward& results, int threads, Variant variant) {
  const KeptKeyLists kept(nullptr, problem.batch, problem.keys);
  const RowBlocks blocks(problem, kSm90Rows);
  Sm90Call call = sm90_call(problem, options, kept, blocks);
  call.forward = results;
  const Kernels& kernels = kernels_of(variant);
  parallel_for(static_cast<int64_t>(blocks.blocks.size()), threads_for(blocks.work, threads), sm90_scratch(problem),
               [&](int64_t item, float* scratch) { kernels.sm90_forward(call, blocks.blocks[static_cast<size_t>(item)], scratch); });
}

// Over each batch item's queries in tiles by halves, then over the batch.
inline void sum_sm90_sinks(const AttentionProblem& problem, const float* dsink, float* dsinks) {
  const DefaultFloatEnvironment environment;
  for (int64_t head = 0; head < problem.heads; ++head) {
    float total = 0.0f;
    for (int64_t b = 0; b < problem.batch; ++b) {
      const int64_t first = first_row_value(problem, b, head);
      const int64_t queries = item_queries(problem, b);
      float sum = 0.0f;
      for (int64_t begin = 0; begin < queries; begin += sm90::kSinkTile) {
        float slots[sm90::kSinkTile] = {};
        std::copy_n(dsink + first + begin, std::min<int64_t>(sm90::kSinkTile, queries - begin), slots);
        sum = add(sum, sm90::halves(slots, sm90::kSinkTile));
      }
      total = add(total, sum);
    }
    dsinks[head] = total;
  }
}

inline std::vector<Sm90KeyTile> sm90_key_tiles(const AttentionProblem& problem) {
  std::vector<Sm90KeyTile> parts;
  const int64_t tile = sm90::key_tile(problem.head_dim);
  for (int64_t b = 0; b < problem.batch; ++b) {
    int64_t keys = problem.kv_lengths ? problem.kv_lengths[b] : problem.keys;
    if (problem.cu_seqlens_k != nullptr)
      keys = problem.seqlens_k ? problem.seqlens_k[b] : problem.cu_seqlens_k[b + 1] - problem.cu_seqlens_k[b];
    const int64_t shift = problem.k_start ? problem.k_start[b] % sm90::kSegment : 0;
    for (int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head)
      for (int64_t index = shift / tile; index * tile < shift + keys; ++index) parts.push_back(Sm90KeyTile{b, kv_head, index});
  }
  return parts;
}

void sm90_backward(const AttentionProblem& problem, const Sm90Options& options, const Sm90Backward& gradients, int threads,
                   Variant variant) {
  const KeptKeyLists kept(nullptr, problem.batch, problem.keys);
  const RowBlocks blocks(problem, kSm90Rows);
  const int64_t row_results = (problem.cu_seqlens_q ? 1 : problem.batch) * problem.heads * problem.queries;
  const Scratch origin(row_results), delta(row_results), dsink(row_results);
  Sm90Call call = sm90_call(problem, options, kept, blocks);
  call.backward = gradients;
  call.origin = origin.data();
  call.delta = delta.data();
  call.dsink = dsink.data();
  const Kernels& kernels = kernels_of(variant);
  const int workers = threads_for(2.5 * blocks.work, threads);
  const int64_t count = static_cast<int64_t>(blocks.blocks.size());
  const auto over_rows = [&](void (*kernel)(const Sm90Call&, const RowBlock&, float*)) {
    parallel_for(count, workers, sm90_scratch(problem),
                 [&](int64_t item, float* scratch) { kernel(call, blocks.blocks[static_cast<size_t>(item)], scratch); });
  };
  over_rows(kernels.sm90_row_sums);
  if (gradients.dq != nullptr) over_rows(kernels.sm90_query_gradient);
  if (gradients.dk != nullptr || gradients.dv != nullptr) {
    const std::vector<Sm90KeyTile> parts = sm90_key_tiles(problem);
    parallel_for(static_cast<int64_t>(parts.size()), workers, sm90_scratch(problem),
                 [&](int64_t item, float* scratch) { kernels.sm90_key_gradients(call, parts[static_cast<size_t>(item)], scratch); });
  }
  if (gradients.dsinks != nullptr) sum_sm90_sinks(problem, dsink.data(), gradients.dsinks);
}

}  // namespace attn::host
