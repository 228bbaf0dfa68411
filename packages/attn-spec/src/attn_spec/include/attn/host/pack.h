// Strided arrays of any dtype to binary32 tiles and panels, and back.
#pragma once

#include "attn/host/arrays.h"
#include "attn/host/multiply.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

template <typename T>
bool read_row(const T* from, int64_t step, int64_t count, float* to) {
  uint32_t largest = 0;
  if (step == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i * step]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = float_to_bits(to[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7F800000u;
}

// Reads `count` elements from element offset `offset`; true when all are finite.
inline bool read(const void* data, DType dtype, int64_t offset, int64_t step, int64_t count, float* to) {
  switch (dtype) {
    case DType::bfloat16:
      return read_row(static_cast<const bfloat16*>(data) + offset, step, count, to);
    case DType::float16:
      return read_row(static_cast<const float16*>(data) + offset, step, count, to);
    default:
      return read_row(static_cast<const float*>(data) + offset, step, count, to);
  }
}

template <typename T>
void write_row(const float* from, float scale, int64_t count, T* to, int64_t step) {
  if (step == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<T>(positive_zero(mul(from[i], scale)));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * step] = from_float<T>(positive_zero(mul(from[i], scale)));
  }
}

// Stores RN(from * scale) by the zero rule in one conversion.
inline void write(const float* from, float scale, int64_t count, void* data, DType dtype, int64_t offset, int64_t step) {
  switch (dtype) {
    case DType::bfloat16:
      return write_row(from, scale, count, static_cast<bfloat16*>(data) + offset, step);
    case DType::float16:
      return write_row(from, scale, count, static_cast<float16*>(data) + offset, step);
    default:
      return write_row(from, scale, count, static_cast<float*>(data) + offset, step);
  }
}

ATTN_HD int64_t to_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

inline void fill(float* to, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

ATTN_HD void transpose_4x4(const float* from, int64_t from_row, float* to, int64_t to_row) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad row[4];
  for (int i = 0; i < 4; ++i) memcpy(&row[i], from + i * from_row, sizeof(Quad));
#if defined(__clang__)
#define ATTN_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
  typedef int32_t Index __attribute__((vector_size(16)));
#define ATTN_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Index{i, j, k, l})
#endif
  const Quad low01 = ATTN_SHUFFLE(row[0], row[1], 0, 4, 1, 5);
  const Quad high01 = ATTN_SHUFFLE(row[0], row[1], 2, 6, 3, 7);
  const Quad low23 = ATTN_SHUFFLE(row[2], row[3], 0, 4, 1, 5);
  const Quad high23 = ATTN_SHUFFLE(row[2], row[3], 2, 6, 3, 7);
  const Quad column[4] = {ATTN_SHUFFLE(low01, low23, 0, 1, 4, 5), ATTN_SHUFFLE(low01, low23, 2, 3, 6, 7),
                          ATTN_SHUFFLE(high01, high23, 0, 1, 4, 5), ATTN_SHUFFLE(high01, high23, 2, 3, 6, 7)};
#undef ATTN_SHUFFLE
  for (int i = 0; i < 4; ++i) memcpy(to + i * to_row, &column[i], sizeof(Quad));
}

// Rows [depth][row stride] to panels with k = row and n = column. Rows must be zero from `columns` up to the next multiple of lanes.
inline void pack_rows(const float* from, int64_t row, int64_t depth, int64_t columns, bool finite, float* to, Panels& panels) {
  panels = Panels{to, depth, columns, finite};
  for (int64_t column = 0; column < columns; column += kPanel) {
    const int64_t rest = to_lanes(columns - column);
    const int64_t width = rest < kPanel ? rest : kPanel;
    float* panel = to + column * depth;
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = 0; n < width; n += kLanes) store(panel + k * width + n, load(from + k * row + column + n));
  }
}

// One tile of rows [kTile][row stride] to panels with k = column and n = row. The row stride is a multiple of 4 and rows are zero up to it.
inline void pack_transposed(const float* from, int64_t row, int64_t depth, bool finite, float* to, Panels& panels) {
  static_assert(kTile % kPanel == 0 && kPanel % 4 == 0, "a tile holds whole panels");
  panels = Panels{to, depth, kTile, finite};
  for (int64_t column = 0; column < kTile; column += kPanel) {
    float* panel = to + column * depth;
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4)
      for (int64_t n = 0; n < kPanel; n += 4) transpose_4x4(from + (column + n) * row + k, row, panel + k * kPanel + n, kPanel);
    for (; k < depth; ++k)
      for (int64_t n = 0; n < kPanel; ++n) panel[k * kPanel + n] = from[(column + n) * row + k];
  }
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
