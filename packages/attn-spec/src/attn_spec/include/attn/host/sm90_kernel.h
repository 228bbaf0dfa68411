// Forward pass of sm90-v1 for a block of rows: a key tile at a time, each row with its segment state.
#pragma once

#include "attn/host/sm90_step.h"
#include "attn/host/visibility.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

ATTN_HD int least_exponent(DType dtype) {
  return dtype == DType::bfloat16 ? sm90::HalfTraits<bfloat16>::kLeastExponent : sm90::HalfTraits<float16>::kLeastExponent;
}

void sm90_chain(const Sm90Chain& chain, int64_t row, float* base) {
  Arena arena{base};
  const Sm90ChainScratch scratch(arena, chain);
  const int least = least_exponent(chain.dtype);
  fill(scratch.a.values, scratch.terms, 0.0f);
  fill(scratch.b.values, scratch.terms * scratch.columns, 0.0f);
  fill(scratch.c, scratch.columns, 0.0f);
  read(chain.a, chain.dtype, row * chain.terms, 1, chain.terms, scratch.a.values);
  for (int64_t k = 0; k < chain.terms; ++k)
    read(chain.b, chain.dtype, k * chain.columns, 1, chain.columns, scratch.b.values + k * scratch.columns);
  for (int64_t k = 0; k < scratch.terms; ++k) scratch.a.exponents[k] = sm90::operand_exponent(scratch.a.values[k], least);
  for (int64_t i = 0; i < scratch.terms * scratch.columns; ++i) scratch.b.exponents[i] = sm90::operand_exponent(scratch.b.values[i], least);
  float* c = chain.c + row * chain.columns;
  memcpy(scratch.c, c, static_cast<size_t>(chain.columns) * sizeof(float));
  for (int64_t k = 0; k < scratch.terms; k += sm90::kStep)
    for (int64_t i = 0; i < scratch.columns; i += kStepLanes)
      step_lanes(Operands{scratch.a.values + k, scratch.a.exponents + k},
                 Operands{scratch.b.values + k * scratch.columns + i, scratch.b.exponents + k * scratch.columns + i}, scratch.columns,
                 least, scratch.c + i);
  memcpy(c, scratch.c, static_cast<size_t>(chain.columns) * sizeof(float));
}

// One batch item and kv head with its keys on the grid of segments and tiles: a cell is a position counted from the start of a segment.
struct Sm90Item {
  const Sm90Call& call;
  Geometry geometry;
  int tile, columns, least;
  float factor;
  const float* table;

  Sm90Item(const Sm90Call& whole, int64_t batch, int64_t kv_head) : call(whole), geometry(whole.call, batch, kv_head) {
    const AttentionProblem& problem = geometry.problem;
    geometry.shift = geometry.k_start % sm90::kSegment;
    columns = static_cast<int>(problem.head_dim);
    tile = sm90::key_tile(columns);
    least = least_exponent(problem.dtype);
    factor = whole.options.factor;
    table = whole.options.table;
  }

  float half(float value) const {
    return geometry.problem.dtype == DType::bfloat16 ? to_float(from_float<bfloat16>(value)) : to_float(from_float<float16>(value));
  }

  void set_exponents(const float* values, int64_t count, int32_t* exponents) const {
    for (int64_t i = 0; i < count; ++i) exponents[i] = sm90::operand_exponent(values[i], least);
  }

  // Rows [begin, end) of an array laid out as q, [row][D].
  void read_rows(const Input& input, int64_t begin, int64_t end, Sm90Operands to) const {
    for (int64_t row = begin; row < end; ++row)
      read(input.data, geometry.problem.dtype, geometry.row_offset(input.strides, row), input.strides.column, columns,
           to.values + (row - begin) * columns);
    set_exponents(to.values, (end - begin) * columns, to.exponents);
  }

  // The keys of one tile of an array laid out as k, [tile][D]; cells without a key in use are zero.
  void read_keys(const Input& input, int64_t index, Sm90Operands to) const {
    for (int64_t cell = 0; cell < tile; ++cell) {
      const int64_t key = index * tile + cell - geometry.shift;
      float* values = to.values + cell * columns;
      if (key < 0 || key >= geometry.keys)
        fill(values, columns, 0.0f);
      else
        read(input.data, geometry.problem.dtype, geometry.key_offset(input.strides, key), input.strides.column, columns, values);
    }
    set_exponents(to.values, static_cast<int64_t>(tile) * columns, to.exponents);
  }

  // [tile][D] to [D][tile].
  void transpose(Sm90Operands from, Sm90Operands to) const {
    for (int64_t d = 0; d < columns; d += 4)
      for (int64_t cell = 0; cell < tile; cell += 4)
        transpose_4x4(from.values + cell * columns + d, columns, to.values + d * tile + cell, tile);
    set_exponents(to.values, static_cast<int64_t>(tile) * columns, to.exponents);
  }

  // x[tile] = the chain over D of one row and the columns of a tile. Every step runs, so that an infinite operand shows.
  void products(Operands row, Sm90Operands keys, float* x) const {
    fill(x, tile, 0.0f);
    for (int d = 0; d < columns; d += sm90::kStep)
      for (int i = 0; i < tile; i += kStepLanes)
        step_lanes(Operands{row.values + d, row.exponents + d}, Operands{keys.values + d * tile + i, keys.exponents + d * tile + i}, tile,
                   least, x + i);
  }

  // Whether the key of a slot is one of those that a row sees.
  bool sees_slot(Slots visible, int64_t slot) const {
    if (slot < visible.begin || slot >= visible.end) return false;
    const AttentionProblem& problem = geometry.problem;
    return problem.key_mask == nullptr || problem.key_mask[geometry.batch * problem.keys + slot - geometry.shift] != 0;
  }

  // x[tile] to -inf outside the cells that a row sees.
  void mask(Slots visible, int64_t index, float* x) const {
    for (int64_t cell = 0; cell < tile; ++cell)
      if (!sees_slot(visible, index * tile + cell)) x[cell] = negative_infinity();
  }

  bool sees(Slots visible, int64_t index) const {
    return !visible.empty() && visible.begin < (index + 1) * tile && visible.end > index * tile;
  }

  float sink(int64_t row) const { return geometry.problem.sinks ? geometry.problem.sinks[geometry.head(row)] : negative_infinity(); }
};

ATTN_HD Operands row_of(Sm90Operands operands, int64_t row, int64_t columns) {
  return Operands{operands.values + row * columns, operands.exponents + row * columns};
}

// State of a row, in a segment or merged. O is [D]; a merged state has its sum in classes[0].
struct Sm90State {
  float* o;
  float* classes;
  float* n;

  Sm90State(float* base, int64_t row, int64_t columns) : o(base + row * (columns + 16)), classes(o + columns), n(o + columns + 8) {}

  void clear(int64_t columns) const {
    fill(o, columns + 8, 0.0f);
    *n = negative_infinity();
  }
};

// One tile of one row: scores in `s` become p.
inline void append_tile(const Sm90Item& item, Sm90State state, float* s, Sm90Operands weights, Sm90Operands v) {
  const int tile = item.tile, columns = item.columns;
  float top = negative_infinity();
  for (int i = 0; i < tile; ++i) top = max_nan(top, s[i]);
  const sm90::Rescale scaled = sm90::rescale(*state.n, top, item.factor, item.table);
  for (int i = 0; i < tile; ++i) s[i] = sm90::weight(s[i], item.factor, scaled.origin, item.table);
  for (int i = 0; i < tile; ++i) weights.values[i] = item.half(s[i]);
  item.set_exponents(weights.values, tile, weights.exponents);
  for (int half = tile / 2; half >= sm90::kClasses; half /= 2)
    for (int i = 0; i < half; ++i) s[i] = add(s[i], s[i + half]);
  for (int i = 0; i < sm90::kClasses; ++i) state.classes[i] = attn::fma(state.classes[i], scaled.alpha, s[i]);
  // The first step turns -0 into +0, so that a step without weights may be skipped.
  for (int i = 0; i < columns; ++i) state.o[i] = positive_zero(mul(state.o[i], scaled.alpha));
  chain_lanes(Operands{weights.values, weights.exponents}, tile, Operands{v.values, v.exponents}, columns, columns, item.least, state.o);
  *state.n = scaled.n;
}

// Ends a segment of a row: merges it into the row, or stores it.
inline void end_segment(const Sm90Item& item, int64_t row, int64_t segment, Sm90State state, Sm90State run) {
  const int columns = item.columns;
  if (*state.n == negative_infinity()) return;
  state.classes[0] = sm90::class_sum(state.classes);
  const Sm90Forward& forward = item.call.forward;
  if (forward.n != nullptr) {
    const AttentionProblem& problem = item.geometry.problem;
    const int64_t rows = (problem.cu_seqlens_q ? 1 : problem.batch) * problem.heads * problem.queries;
    const int64_t index = segment * rows + item.geometry.row_index(row);
    forward.n[index] = *state.n;
    forward.l[index] = state.classes[0];
    memcpy(forward.o + index * columns, state.o, static_cast<size_t>(columns) * sizeof(float));
  } else if (*run.n == negative_infinity()) {
    memcpy(run.o, state.o, static_cast<size_t>(columns) * sizeof(float));
    run.classes[0] = state.classes[0];
    *run.n = *state.n;
  } else {
    const sm90::Merge merge = sm90::merge_of(*run.n, *state.n, item.table);
    for (int i = 0; i < columns; ++i) run.o[i] = sm90::merged(run.o[i], state.o[i], merge);
    run.classes[0] = sm90::merged(run.classes[0], state.classes[0], merge);
    *run.n = merge.n;
  }
  state.clear(columns);
}

inline void finish_row(const Sm90Item& item, int64_t row, Sm90State run) {
  const Geometry& geometry = item.geometry;
  const Sm90Forward& forward = item.call.forward;
  const sm90::RowResult found = sm90::row_result(*run.n, run.classes[0], item.sink(row), item.table);
  forward.lse[geometry.row_index(row)] = found.lse;
  const Strides& strides = forward.out.strides;
  const int64_t offset = geometry.row_offset(strides, row);
  uint16_t* out = static_cast<uint16_t*>(forward.out.data);
  const bool bf16 = geometry.problem.dtype == DType::bfloat16;
  for (int i = 0; i < item.columns; ++i) {
    const float value = mul(run.o[i], found.factor);
    out[offset + i * strides.column] = bf16 ? from_float<bfloat16>(value).bits : from_float<float16>(value).bits;
  }
}

void sm90_forward(const Sm90Call& call, const RowBlock& block, float* base) {
  const Sm90Item item(call, block.batch, block.kv_head);
  const AttentionProblem& problem = item.geometry.problem;
  Arena arena{base};
  const Sm90Scratch scratch(arena, call.call.row_limit, item.tile, item.columns);
  const int64_t rows = block.end - block.begin;
  item.read_rows(problem.q, block.begin, block.end, scratch.q);
  for (int64_t row = 0; row < rows; ++row) {
    Sm90State(scratch.state, row, item.columns).clear(item.columns);
    Sm90State(scratch.run, row, item.columns).clear(item.columns);
  }
  const Slots all = union_of(item.geometry, block.begin, block.end);
  const int64_t last = all.empty() ? 0 : (all.end + item.tile - 1) / item.tile;
  for (int64_t index = all.begin / item.tile; index < last; ++index) {
    item.read_keys(problem.k, index, scratch.rows_of_keys);
    item.transpose(scratch.rows_of_keys, scratch.keys);
    item.read_keys(problem.v, index, scratch.rows_of_keys);
    const bool ends = index + 1 == last || (index + 1) * item.tile % sm90::kSegment == 0;
    for (int64_t row = 0; row < rows; ++row) {
      const Sm90State state(scratch.state, row, item.columns);
      const Slots visible = item.geometry.visible(block.begin + row);
      if (item.sees(visible, index)) {
        item.products(row_of(scratch.q, row, item.columns), scratch.keys, scratch.scores);
        item.mask(visible, index, scratch.scores);
        append_tile(item, state, scratch.scores, scratch.weights, scratch.rows_of_keys);
      }
      if (ends) end_segment(item, block.begin + row, index * item.tile / sm90::kSegment, state, Sm90State(scratch.run, row, item.columns));
    }
  }
  if (call.forward.n != nullptr) return;
  for (int64_t row = 0; row < rows; ++row) finish_row(item, block.begin + row, Sm90State(scratch.run, row, item.columns));
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
