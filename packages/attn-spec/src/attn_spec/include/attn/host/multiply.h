// Products of FMA chains: C[m][n] = chain over k of A(m, k) and B[k][n]. Lanes hold outputs, k ascends and is never split, so neither
// blocking nor lane count shows in the bits: accumulators pass through memory as binary32 between blocks of k.
#pragma once

#include "attn/host/simd.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// P or dS of a masked pair. It has no term; against a finite operand its zero product changes nothing but the sign of a zero.
constexpr uint32_t kMaskedBits = 0x80000000u;

ATTN_HD bool is_masked(float value) { return float_to_bits(value) == kMaskedBits; }

// B in panels of kPanel columns, each [depth][width]; the last one is as wide as the rest of the columns, rounded up to lanes.
struct Panels {
  float* data;
  int64_t depth;
  int64_t columns;
  bool finite;
};

// Strided A: element (m, k) is data[m * row + k * step].
struct Left {
  const float* data;
  int64_t row, step;
};

enum class Terms { all, unmasked };

constexpr int64_t kDepthBlock = 128;  // kDepthBlock x kPanel floats of B stay in the first-level cache

template <int Rows, int Vectors>
void multiply_block(Left a, const float* b, int64_t depth, float* c, int64_t c_row, bool fresh) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sum[m][v] = fresh ? Vec{} : load(c + m * c_row + v * kLanes);
  const float* left = a.data;
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) right[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const Vec each = broadcast(left[m * a.row]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[m][v] = fma(each, right[v], sum[m][v]);
    }
    left += a.step;
    b += Vectors * kLanes;
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(c + m * c_row + v * kLanes, sum[m][v]);
}

template <int Rows, int Vectors>
void multiply_rows(int64_t rows, Left a, const float* b, int64_t depth, float* c, int64_t c_row, bool fresh) {
  for (; rows >= Rows; rows -= Rows) {
    multiply_block<Rows, Vectors>(a, b, depth, c, c_row, fresh);
    a.data += Rows * a.row;
    c += Rows * c_row;
  }
  if constexpr (Rows > 1)
    if (rows > 0) multiply_rows<Rows / 2, Vectors>(rows, a, b, depth, c, c_row, fresh);
}

template <int Vectors>
void multiply_panel(int vectors, int64_t rows, Left a, const float* b, int64_t depth, float* c, int64_t c_row, bool fresh) {
  if (vectors == Vectors) {
    multiply_rows<kRows, Vectors>(rows, a, b, depth, c, c_row, fresh);
  } else if constexpr (Vectors > 1) {
    multiply_panel<Vectors - 1>(vectors, rows, a, b, depth, c, c_row, fresh);
  }
}

// The same chains one term at a time, without the terms of masked pairs: for B that holds infinities or NaN.
inline void multiply_unmasked(int64_t rows, Left a, const float* b, int width, int64_t depth, float* c, int64_t c_row, bool fresh) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int n = 0; n < width; n += kLanes) {
      Vec sum = fresh ? Vec{} : load(c + m * c_row + n);
      for (int64_t k = 0; k < depth; ++k) {
        const float left = a.data[m * a.row + k * a.step];
        if (!is_masked(left)) sum = fma(broadcast(left), load(b + k * width + n), sum);
      }
      store(c + m * c_row + n, sum);
    }
  }
}

// C (rows x columns rounded up to lanes, row stride c_row) over k in [first, last) and columns from `from_column`, a multiple of kPanel, to
// `to_column`. `fresh` starts the chains at +0, otherwise they go on from C.
inline void multiply(int64_t rows, Left a, const Panels& b, int64_t first, int64_t last, float* c, int64_t c_row, bool fresh, Terms terms,
                     int64_t from_column, int64_t to_column) {
  int64_t begin = first;
  do {
    const int64_t depth = (last - begin < kDepthBlock) ? last - begin : kDepthBlock;
    for (int64_t column = from_column; column < to_column; column += kPanel) {
      const int64_t rest = b.columns - column;
      const int vectors = rest >= kPanel ? kVectors : static_cast<int>((rest + kLanes - 1) / kLanes);
      const float* panel = b.data + column * b.depth + begin * (vectors * kLanes);
      const Left left{a.data + begin * a.step, a.row, a.step};
      if (terms == Terms::unmasked && !b.finite)
        multiply_unmasked(rows, left, panel, vectors * kLanes, depth, c + column, c_row, fresh);
      else
        multiply_panel<kVectors>(vectors, rows, left, panel, depth, c + column, c_row, fresh);
    }
    begin += depth;
    fresh = false;
  } while (begin < last);
}

inline void multiply(int64_t rows, Left a, const Panels& b, int64_t first, int64_t last, float* c, int64_t c_row, bool fresh, Terms terms) {
  multiply(rows, a, b, first, last, c, c_row, fresh, terms, 0, b.columns);
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
