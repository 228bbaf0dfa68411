// The three products behind joint_attn_qk_gemm and joint_attn_av_gemm, forward and backward. Every index has a term.
#pragma once

#include "attn/host/visibility.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// Element offset of row r (head in its group, query) of kv head `kv` in an array [B, H, S, *].
inline int64_t row_offset(const Product& product, const Strides& strides, int64_t batch, int64_t kv, int64_t row) {
  const int64_t head = kv * (product.heads / product.kv_heads) + row / product.queries;
  return batch * strides.batch + head * strides.head + row % product.queries * strides.row;
}

// `count` columns from `column` of rows [begin, end) of the left operand, zero up to `width`.
inline void read_left(const Product& product, const RowBlock& block, int64_t column, int64_t count, float* to, int64_t width) {
  for (int64_t row = block.begin; row < block.end; ++row, to += width) {
    const int64_t offset =
        row_offset(product, product.left.strides, block.batch, block.kv_head, row) + column * product.left.strides.column;
    read(product.left.data, product.left_dtype, offset, product.left.strides.column, count, to);
    fill(to + count, width - count, 0.0f);
  }
}

// Keys [first, first + count) of the right operand [B, K, T, W], and zero rows up to a whole tile.
inline void read_right_keys(const Product& product, const RowBlock& block, int64_t first, int64_t count, float* to) {
  const Strides& strides = product.right.strides;
  const int64_t width = padded(product.width);
  fill(to + count * width, (kTile - count) * width, 0.0f);
  for (int64_t j = 0; j < count; ++j, to += width) {
    const int64_t offset = block.batch * strides.batch + block.kv_head * strides.head + (first + j) * strides.row;
    read(product.right.data, product.right_dtype, offset, strides.column, product.width, to);
    fill(to + product.width, width - product.width, 0.0f);
  }
}

inline void store_rows(const Product& product, const RowBlock& block, int64_t column, int64_t count, const float* from, int64_t from_row) {
  const Strides& strides = product.out.strides;
  for (int64_t row = block.begin; row < block.end; ++row, from += from_row) {
    const int64_t offset = row_offset(product, strides, block.batch, block.kv_head, row) + column * strides.column;
    write(from, product.scale, count, product.out.data, product.out_dtype, offset, strides.column);
  }
}

inline void product_over_width(const ProductCall& call, const RowBlock& block, float* base) {
  const Product& product = call.product;
  Arena arena{base};
  const ProductScratch scratch(arena, call.row_limit, product.width);
  const int64_t rows = block.end - block.begin, width = padded(product.width);
  read_left(product, block, 0, product.width, scratch.wide, width);
  for (int64_t first = 0; first < product.keys; first += kTile) {
    const int64_t count = smaller(product.keys - first, kTile);
    read_right_keys(product, block, first, count, scratch.right);
    Panels panels;
    pack_transposed(scratch.right, width, product.width, true, scratch.panels, panels);
    multiply(rows, Left{scratch.wide, width, 1}, panels, 0, product.width, scratch.tile, score_row(1), true, Terms::all, 0, count);
    store_rows(product, block, first, count, scratch.tile, score_row(1));
  }
}

inline void product_over_keys(const ProductCall& call, const RowBlock& block, float* base) {
  const Product& product = call.product;
  Arena arena{base};
  const ProductScratch scratch(arena, call.row_limit, product.width);
  const int64_t rows = block.end - block.begin, width = padded(product.width);
  fill(scratch.wide, rows * width, 0.0f);
  for (int64_t first = 0; first < product.keys; first += kTile) {
    const int64_t count = smaller(product.keys - first, kTile);
    read_left(product, block, first, count, scratch.tile, score_row(1));
    read_right_keys(product, block, first, count, scratch.right);
    Panels panels;
    pack_rows(scratch.right, width, count, product.width, true, scratch.panels, panels);
    multiply(rows, Left{scratch.tile, score_row(1), 1}, panels, 0, count, scratch.wide, width, false, Terms::all);
  }
  store_rows(product, block, 0, product.width, scratch.wide, width);
}

// Item: one tile of keys of one kv head; its rows in order.
inline void product_over_queries(const ProductCall& call, int64_t item, float* base) {
  const Product& product = call.product;
  Arena arena{base};
  const ProductScratch scratch(arena, call.row_limit, product.width);
  const int64_t tiles = (product.keys + kTile - 1) / kTile, width = padded(product.width);
  const int64_t kv_head = item / tiles % product.kv_heads, batch = item / tiles / product.kv_heads;
  const int64_t first = item % tiles * kTile, count = smaller(product.keys - first, kTile);
  const int64_t all_rows = product.heads / product.kv_heads * product.queries;
  fill(scratch.sums, count * width, 0.0f);
  for (int64_t begin = 0; begin < all_rows; begin += call.row_limit) {
    const RowBlock block{batch, kv_head, begin, smaller(begin + call.row_limit, all_rows)};
    read_left(product, block, first, count, scratch.tile, score_row(1));
    float* right = scratch.wide;
    for (int64_t row = block.begin; row < block.end; ++row, right += width) {
      const int64_t offset = row_offset(product, product.right.strides, batch, kv_head, row);
      read(product.right.data, product.right_dtype, offset, product.right.strides.column, product.width, right);
      fill(right + product.width, width - product.width, 0.0f);
    }
    Panels panels;
    pack_rows(scratch.wide, width, block.end - block.begin, product.width, true, scratch.panels, panels);
    multiply(count, Left{scratch.tile, 1, score_row(1)}, panels, 0, block.end - block.begin, scratch.sums, width, false, Terms::all);
  }
  const Strides& strides = product.out.strides;
  for (int64_t j = 0; j < count; ++j)
    write(scratch.sums + j * width, product.scale, product.width, product.out.data, product.out_dtype,
          batch * strides.batch + kv_head * strides.head + (first + j) * strides.row, strides.column);
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
