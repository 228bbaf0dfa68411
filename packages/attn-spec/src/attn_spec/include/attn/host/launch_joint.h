// The joint operators: cut into items, run on threads.
#pragma once

#include "attn/host/dispatch.h"

namespace attn::host {

// `buffers` counts the rows of scratch that a thread needs, each in whole tiles of `tile` slots.
inline void run_softmax(const SoftmaxProblem& problem, SoftmaxCall call, int64_t buffers, int64_t tile,
                        void (*kernel)(const SoftmaxCall&, int64_t, float*), int threads) {
  const KeptKeyLists kept(problem.key_mask, problem.batch, problem.keys);
  call.problem = problem;
  call.kept = kept.view();
  call.tile_limit = (problem.keys + tile - 1) / tile * (tile / kTile);
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  const int64_t rows_at_once = std::max<int64_t>(1, 16384 / std::max<int64_t>(problem.keys, 1));
  const int workers = threads_for(8.0 * static_cast<double>(rows) * static_cast<double>(problem.keys), threads);
  parallel_for((rows + rows_at_once - 1) / rows_at_once, workers, buffers * call.tile_limit * kTile, [&](int64_t item, float* scratch) {
    const int64_t end = std::min(rows, (item + 1) * rows_at_once);
    for (int64_t row = item * rows_at_once; row < end; ++row) kernel(call, row, scratch);
  });
}

inline void run_softmax_forward(const SoftmaxProblem& problem, const SoftmaxForward& results, int64_t buffers, int64_t tile,
                                void (*kernel)(const SoftmaxCall&, int64_t, float*), int threads) {
  SoftmaxCall call{};
  call.forward = results;
  run_softmax(problem, call, buffers, tile, kernel, threads);
}

inline void run_softmax_backward(const SoftmaxProblem& problem, const SoftmaxBackward& gradients, int64_t buffers, int64_t tile,
                                 void (*kernel)(const SoftmaxCall&, int64_t, float*), int threads) {
  SoftmaxCall call{};
  call.backward = gradients;
  run_softmax(problem, call, buffers, tile, kernel, threads);
}

void softmax_forward(const SoftmaxProblem& problem, const SoftmaxForward& results, int threads, Variant variant) {
  run_softmax_forward(problem, results, 2, kTile, kernels_of(variant).softmax_forward, threads);
}

void softmax_backward(const SoftmaxProblem& problem, const SoftmaxBackward& gradients, int threads, Variant variant) {
  run_softmax_backward(problem, gradients, 3, kTile, kernels_of(variant).softmax_backward, threads);
}

constexpr int64_t kLongRowBuffers = 6;  // rows, and the terms and states of tiles in the last one's place

void softmax_v2_forward(const SoftmaxProblem& problem, const SoftmaxForward& results, int threads, Variant variant) {
  run_softmax_forward(problem, results, kLongRowBuffers, v2::kTile, kernels_of(variant).softmax_v2_forward, threads);
}

void softmax_v2_backward(const SoftmaxProblem& problem, const SoftmaxBackward& gradients, int threads, Variant variant) {
  run_softmax_backward(problem, gradients, kLongRowBuffers, v2::kTile, kernels_of(variant).softmax_v2_backward, threads);
}

// Rows that a product reads at once; its outputs are cut there, never its chains.
constexpr int64_t kProductRows = 96;

inline double product_work(const Product& product) {
  return static_cast<double>(product.batch * product.heads * product.queries) * static_cast<double>(product.keys * product.width);
}

inline int64_t product_scratch(const ProductCall& call) {
  Arena arena{nullptr};
  ProductScratch(arena, call.row_limit, call.product.width);
  return arena.used;
}

inline void run_product_rows(const Product& product, void (*kernel)(const ProductCall&, const RowBlock&, float*), int threads) {
  const ProductCall call{product, kProductRows};
  const int64_t rows = product.heads / product.kv_heads * product.queries;
  const int64_t blocks = (rows + kProductRows - 1) / kProductRows;
  parallel_for(product.batch * product.kv_heads * blocks, threads_for(product_work(product), threads), product_scratch(call),
               [&](int64_t item, float* scratch) {
                 const int64_t begin = item % blocks * kProductRows, unit = item / blocks;
                 kernel(call, RowBlock{unit / product.kv_heads, unit % product.kv_heads, begin, std::min(begin + kProductRows, rows)},
                        scratch);
               });
}

void product_over_width(const Product& product, int threads, Variant variant) {
  run_product_rows(product, kernels_of(variant).product_over_width, threads);
}

void product_over_keys(const Product& product, int threads, Variant variant) {
  run_product_rows(product, kernels_of(variant).product_over_keys, threads);
}

void product_over_queries(const Product& product, int threads, Variant variant) {
  const ProductCall call{product, kProductRows};
  const int64_t tiles = (product.keys + kTile - 1) / kTile;
  const Kernels& kernels = kernels_of(variant);
  parallel_for(product.batch * product.kv_heads * tiles, threads_for(product_work(product), threads), product_scratch(call),
               [&](int64_t item, float* scratch) { kernels.product_over_queries(call, item, scratch); });
}

}  // namespace attn::host
