// Scalar arithmetic of contract sm90-v1 (docs/contracts/sm90-v1.md): the tensor-core step, ex2, and what a row does with its tiles,
// segments and sink. Compile without contraction, as ordered.h says.
#pragma once

#include "attn/ordered.h"

namespace attn::sm90 {

constexpr int kSegment = 1024;    // keys
constexpr int kStep = 16;         // terms of a tensor-core step
constexpr int kClasses = 8;       // partial sums of a row, by column modulo 8
constexpr int kSinkTile = 128;    // queries
constexpr int kPoints = 1 << 23;  // of the table of ex2

constexpr uint32_t kLog2EBits = 0x3FB8AA3Bu;
constexpr uint32_t kLn2Bits = 0x3F317218u;

// Keys of a tile.
ATTN_HD int key_tile(int64_t head_dim) { return head_dim <= 128 ? 128 : 64; }

// --- the tensor-core step ---------------------------------------------------------------------------------------------------------------

template <typename T>
struct HalfTraits;
template <>
struct HalfTraits<bfloat16> {
  static constexpr int kLeastExponent = -126;
};
template <>
struct HalfTraits<float16> {
  static constexpr int kLeastExponent = -14;
};

constexpr int kAbsent = -1000;  // exponent of a zero
constexpr int kSpecial = 3000;  // exponent of an infinity or NaN

// Exponent of a half operand held in binary32.
ATTN_HD int operand_exponent(float value, int least) {
  const uint32_t magnitude = float_to_bits(value) & 0x7FFFFFFFu;
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const int finite = exponent < least ? least : exponent;
  return magnitude == 0 ? kAbsent : (exponent == 128 ? kSpecial : finite);
}

// 2^n for n in [-1022, 1023].
ATTN_HD double power_of_two(int n) {
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds toward zero; 2^128 and above give infinity.
ATTN_HD float toward_zero(double value) {
  const float nearest = static_cast<float>(value);
  const double magnitude = value < 0.0 ? -value : value;
  const double found = nearest < 0.0f ? -static_cast<double>(nearest) : static_cast<double>(nearest);
  if (magnitude >= power_of_two(128) || !(found > magnitude)) return nearest;
  return bits_to_float(float_to_bits(nearest) - 1);
}

// One step for one output: c plus sixteen products of half operands held in binary32, `a_stride` and `b_stride` elements apart.
ATTN_HD float tensor_step(float c, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int least) {
  int e = c == 0.0f ? kAbsent : operand_exponent(c, -126);
  double plain = static_cast<double>(c);
  for (int k = 0; k < kStep; ++k) {
    const int exponent = operand_exponent(a[k * a_stride], least) + operand_exponent(b[k * b_stride], least);
    e = exponent > e ? exponent : e;
    plain += static_cast<double>(a[k * a_stride]) * static_cast<double>(b[k * b_stride]);
  }
  if (e > 1000) return static_cast<float>(plain);  // an infinity or NaN takes part
  e = e < -133 ? -133 : e;
  const double unit = power_of_two(25 - e);
  int64_t sum = static_cast<int64_t>(static_cast<double>(c) * unit);
  for (int k = 0; k < kStep; ++k)
    sum += static_cast<int64_t>(static_cast<double>(a[k * a_stride]) * static_cast<double>(b[k * b_stride]) * unit);
  return toward_zero(static_cast<double>(sum) * power_of_two(e - 25));
}

// --- ex2 ---------------------------------------------------------------------------------------------------------------------------------

// ex2.approx.ftz.f32; table[i] is its value at (i - 2^23) / 2^23.
ATTN_HD float ex2(float x, const float* table) {
  if (is_nan(x)) return x;
  if (x >= 128.0f) return bits_to_float(0x7F800000u);
  if (x < -126.0f) return 0.0f;
  const bool positive = x > 0.0f;
  const float magnitude = positive ? x : -x;
  const int whole = static_cast<int>(magnitude);
  const int part = static_cast<int>((magnitude - static_cast<float>(whole)) * static_cast<float>(kPoints));
  const int index = positive ? part + 1 : kPoints - part;
  const int shift = positive ? whole + 1 : -whole;
  // At the end of the table: 1 below zero, the number before it above.
  const uint32_t mantissa = index < kPoints ? float_to_bits(table[index]) : (positive ? 0x3F7FFFFFu : 0x3F800000u);
  return bits_to_float(mantissa + (static_cast<uint32_t>(shift) << 23));
}

// --- a row -------------------------------------------------------------------------------------------------------------------------------

// What a new maximum does: origin of the exponents and factor of what was summed before.
struct Rescale {
  float n, origin, alpha;
};

ATTN_HD Rescale rescale(float n, float tile_max, float factor, const float* table) {
  const float following = max_nan(n, mul(tile_max, factor));
  const float origin = following == negative_infinity() ? 0.0f : following;
  return Rescale{following, origin, ex2(sub(n, origin), table)};
}

// p before normalisation, and P of the backward pass: a score of -inf gives +0.
ATTN_HD float weight(float score, float factor, float origin, const float* table) { return ex2(fma(score, factor, -origin), table); }

// Sum of the classes by halves.
ATTN_HD float class_sum(const float* l) {
  const float a = add(l[0], l[4]), b = add(l[1], l[5]), c = add(l[2], l[6]), d = add(l[3], l[7]);
  return add(add(a, c), add(b, d));
}

// Factors of the merge of two live segments.
struct Merge {
  float n, left, right;
};

ATTN_HD Merge merge_of(float left, float right, const float* table) {
  const float n = max_nan(left, right);
  return Merge{n, ex2(sub(left, n), table), ex2(sub(right, n), table)};
}

ATTN_HD float merged(float left, float right, Merge merge) { return fma(right, merge.right, mul(left, merge.left)); }

// Factor of O, and LSE, of a row with a merged state. `sink` is -inf without one.
struct RowResult {
  float factor, lse;
};

ATTN_HD RowResult row_result(float n, float l, float sink, const float* table) {
  if (n == negative_infinity()) return RowResult{0.0f, sink};
  float a = 1.0f;
  if (sink != negative_infinity()) {
    const float logit = mul(sink, bits_to_float(kLog2EBits));
    const Merge merge = merge_of(n, logit, table);
    a = merge.left;
    l = fma(l, a, merge.right);
    n = merge.n;
  }
  return RowResult{div(a, l), fma(n, bits_to_float(kLn2Bits), ln(l))};
}

// --- backward ----------------------------------------------------------------------------------------------------------------------------

// Base-two LSE of the backward pass; a dead row weighs nothing.
ATTN_HD float weight_origin(float lse) {
  return lse == negative_infinity() ? bits_to_float(0x7F800000u) : mul(lse, bits_to_float(kLog2EBits));
}

ATTN_HD float sink_gradient(float sink, float origin, float delta, const float* table) {
  if (sink == negative_infinity()) return 0.0f;
  return -mul(ex2(sub(mul(sink, bits_to_float(kLog2EBits)), origin), table), delta);
}

// Sum by halves over `count` slots, a power of two; destroys them.
ATTN_HD float halves(float* slots, int count) {
  for (int half = count / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) slots[i] = add(slots[i], slots[i + half]);
  return slots[0];
}

}  // namespace attn::sm90
