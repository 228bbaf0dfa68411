// Backward pass of sm90-v1: what each row needs, dq by blocks of rows, dk and dv by tiles of keys.
#pragma once

#include "attn/host/sm90_kernel.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// Origin of P, delta and the gradient of the sink for each row.
void sm90_row_sums(const Sm90Call& call, const RowBlock& block, float* base) {
  const Sm90Item item(call, block.batch, block.kv_head);
  const Geometry& geometry = item.geometry;
  const Sm90Backward& backward = call.backward;
  float *dout = base, *out = base + item.columns;
  for (int64_t row = block.begin; row < block.end; ++row) {
    const int64_t index = geometry.row_index(row);
    const DType dtype = geometry.problem.dtype;
    read(backward.dout.data, dtype, geometry.row_offset(backward.dout.strides, row), backward.dout.strides.column, item.columns, dout);
    read(backward.out.data, dtype, geometry.row_offset(backward.out.strides, row), backward.out.strides.column, item.columns, out);
    for (int i = 0; i < item.columns; ++i) out[i] = mul(dout[i], out[i]);
    float delta = sm90::halves(out, item.columns);
    if (backward.dlse != nullptr) delta = sub(delta, backward.dlse[index]);
    call.delta[index] = delta;
    call.origin[index] = sm90::weight_origin(backward.lse[index]);
    call.dsink[index] = sm90::sink_gradient(item.sink(row), call.origin[index], delta, item.table);
  }
}

// P and dS of one row and tile, before their rounding to half; both are +0 where masked.
inline void row_gradients(const Sm90Item& item, int64_t row, int64_t index, Operands q, Operands dout, const Sm90Scratch& scratch, float* p,
                          float* ds) {
  const Slots visible = item.geometry.visible(row);
  const int64_t at = item.geometry.row_index(row);
  item.products(q, scratch.keys, p);
  item.products(dout, scratch.values, ds);
  const float origin = item.call.origin[at], delta = item.call.delta[at];
  for (int i = 0; i < item.tile; ++i) {
    const bool masked = !item.sees_slot(visible, index * item.tile + i);
    p[i] = masked ? 0.0f : sm90::weight(p[i], item.factor, origin, item.table);
    ds[i] = masked ? 0.0f : mul(p[i], sub(ds[i], delta));
  }
}

inline void write_halves(const float* from, float scale, int64_t count, DType dtype, void* to, int64_t offset) {
  uint16_t* halves = static_cast<uint16_t*>(to) + offset;
  for (int64_t i = 0; i < count; ++i) {
    const float value = mul(from[i], scale);
    halves[i] = dtype == DType::bfloat16 ? from_float<bfloat16>(value).bits : from_float<float16>(value).bits;
  }
}

void sm90_query_gradient(const Sm90Call& call, const RowBlock& block, float* base) {
  const Sm90Item item(call, block.batch, block.kv_head);
  const AttentionProblem& problem = item.geometry.problem;
  Arena arena{base};
  const Sm90Scratch scratch(arena, call.call.row_limit, item.tile, item.columns);
  const int columns = item.columns;
  const int64_t rows = block.end - block.begin;
  item.read_rows(problem.q, block.begin, block.end, scratch.q);
  item.read_rows(call.backward.dout, block.begin, block.end, scratch.dout);
  fill(scratch.run, rows * columns, 0.0f);
  const Slots all = union_of(item.geometry, block.begin, block.end);
  const int64_t last = all.empty() ? 0 : (all.end + item.tile - 1) / item.tile;
  for (int64_t index = all.begin / item.tile; index < last; ++index) {
    item.read_keys(problem.v, index, scratch.rows_of_keys);
    item.transpose(scratch.rows_of_keys, scratch.values);
    item.read_keys(problem.k, index, scratch.rows_of_keys);
    item.transpose(scratch.rows_of_keys, scratch.keys);
    for (int64_t row = 0; row < rows; ++row) {
      if (!item.sees(item.geometry.visible(block.begin + row), index)) continue;
      float *p = scratch.scores, *ds = scratch.products;
      row_gradients(item, block.begin + row, index, row_of(scratch.q, row, columns), row_of(scratch.dout, row, columns), scratch, p, ds);
      for (int i = 0; i < item.tile; ++i) scratch.weights.values[i] = item.half(ds[i]);
      item.set_exponents(scratch.weights.values, item.tile, scratch.weights.exponents);
      fill(scratch.state, columns, 0.0f);
      chain_lanes(Operands{scratch.weights.values, scratch.weights.exponents}, item.tile,
                  Operands{scratch.rows_of_keys.values, scratch.rows_of_keys.exponents}, columns, columns, item.least, scratch.state);
      float* sum = scratch.run + row * columns;
      for (int i = 0; i < columns; ++i) sum[i] = add(sum[i], scratch.state[i]);
    }
  }
  const Geometry& geometry = item.geometry;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = geometry.head(block.begin + row), query = geometry.query(block.begin + row);
    const int64_t index = problem.cu_seqlens_q ? (geometry.first_query + query) * problem.heads + head
                                               : (geometry.batch * problem.heads + head) * problem.queries + query;
    write_halves(scratch.run + row * columns, problem.scale, columns, problem.dtype, call.backward.dq, index * columns);
  }
}

// Sixteen rows [begin, begin + count) of one head, with P and dS by column: weights[key][16].
inline void sixteen_rows(const Sm90Item& item, int64_t begin, int64_t count, int64_t index, const Sm90Scratch& scratch) {
  const int columns = item.columns, tile = item.tile;
  const AttentionProblem& problem = item.geometry.problem;
  fill(scratch.q.values, sm90::kStep * columns, 0.0f);
  fill(scratch.dout.values, sm90::kStep * columns, 0.0f);
  item.set_exponents(scratch.q.values, sm90::kStep * columns, scratch.q.exponents);
  item.set_exponents(scratch.dout.values, sm90::kStep * columns, scratch.dout.exponents);
  item.read_rows(problem.q, begin, begin + count, scratch.q);
  item.read_rows(item.call.backward.dout, begin, begin + count, scratch.dout);
  fill(scratch.weights.values, sm90::kStep * tile, 0.0f);
  fill(scratch.columns.values, sm90::kStep * tile, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    if (!item.sees(item.geometry.visible(begin + i), index)) continue;
    float *p = scratch.scores, *ds = scratch.products;
    row_gradients(item, begin + i, index, row_of(scratch.q, i, columns), row_of(scratch.dout, i, columns), scratch, p, ds);
    for (int key = 0; key < tile; ++key) scratch.weights.values[key * sm90::kStep + i] = item.half(p[key]);
    for (int key = 0; key < tile; ++key) scratch.columns.values[key * sm90::kStep + i] = item.half(ds[key]);
  }
  item.set_exponents(scratch.weights.values, sm90::kStep * tile, scratch.weights.exponents);
  item.set_exponents(scratch.columns.values, sm90::kStep * tile, scratch.columns.exponents);
}

void sm90_key_gradients(const Sm90Call& call, const Sm90KeyTile& part, float* base) {
  const Sm90Item item(call, part.batch, part.kv_head);
  const Geometry& geometry = item.geometry;
  const AttentionProblem& problem = geometry.problem;
  Arena arena{base};
  const Sm90Scratch scratch(arena, call.call.row_limit, item.tile, item.columns);
  const int columns = item.columns, tile = item.tile;
  item.read_keys(problem.v, part.tile, scratch.rows_of_keys);
  item.transpose(scratch.rows_of_keys, scratch.values);
  item.read_keys(problem.k, part.tile, scratch.rows_of_keys);
  item.transpose(scratch.rows_of_keys, scratch.keys);
  fill(scratch.dk, static_cast<int64_t>(tile) * columns, 0.0f);
  fill(scratch.dv, static_cast<int64_t>(tile) * columns, 0.0f);
  for (int64_t head = 0; head < geometry.group; ++head)
    for (int64_t query = 0; query < geometry.queries; query += sm90::kStep) {
      const int64_t begin = head * geometry.queries + query, count = smaller(sm90::kStep, geometry.queries - query);
      if (!item.sees(union_of(geometry, begin, begin + count), part.tile)) continue;
      sixteen_rows(item, begin, count, part.tile, scratch);
      for (int key = 0; key < tile; ++key) {
        chain_lanes(row_of(scratch.weights, key, sm90::kStep), sm90::kStep, Operands{scratch.dout.values, scratch.dout.exponents}, columns,
                    columns, item.least, scratch.dv + key * columns);
        chain_lanes(row_of(scratch.columns, key, sm90::kStep), sm90::kStep, Operands{scratch.q.values, scratch.q.exponents}, columns,
                    columns, item.least, scratch.dk + key * columns);
      }
    }
  for (int64_t cell = 0; cell < tile; ++cell) {
    const int64_t key = part.tile * tile + cell - geometry.shift;
    if (key < 0 || key >= geometry.keys) continue;
    const int64_t index = problem.cu_seqlens_k ? (geometry.first_key + key) * problem.kv_heads + geometry.kv_head
                                               : (geometry.batch * problem.kv_heads + geometry.kv_head) * problem.keys + key;
    if (call.backward.dk != nullptr)
      write_halves(scratch.dk + cell * columns, problem.scale, columns, problem.dtype, call.backward.dk, index * columns);
    if (call.backward.dv != nullptr)
      write_halves(scratch.dv + cell * columns, 1.0f, columns, problem.dtype, call.backward.dv, index * columns);
  }
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
