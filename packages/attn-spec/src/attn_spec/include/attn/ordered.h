// Scalar arithmetic of contract ordered-v1 (docs/contracts/ordered-v1.md): exp, ln, the row state and its merge, the backward element.
// Every multiplication and addition is rounded separately; compile without contraction (-ffp-contract=off, --fmad=false).
#pragma once

#include "attn/float_bits.h"

namespace attn {

constexpr int kTile = 256;

// One rounded operation each. On CUDA the _rn intrinsics cannot be contracted, whatever the flags.
ATTN_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ATTN_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

ATTN_HD float sub(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

ATTN_HD float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

ATTN_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Exact. Outside CUDA the builtin: floorf is a host function to HIP.
ATTN_HD float floor(float value) {
#if defined(__CUDA_ARCH__)
  return floorf(value);
#else
  return __builtin_floorf(value);
#endif
}

// The zero rule: a stored zero is +0.
ATTN_HD float positive_zero(float value) { return add(value, 0.0f); }

// Maximum that propagates NaN.
ATTN_HD float max_nan(float a, float b) { return is_nan(a) ? a : (is_nan(b) ? b : (a > b ? a : b)); }

// exp(x) for x <= 0 or NaN.
ATTN_HD float exp_nonpositive(float x) {
  const float log2e = bits_to_float(0x3FB8AA3Bu);
  const float ln2_high = bits_to_float(0x3F317200u);
  const float ln2_low = bits_to_float(0x35BFBE8Eu);
  const bool underflows = x < -104.0f;
  const float argument = (underflows || is_nan(x)) ? 0.0f : x;
  const float n = floor(add(mul(argument, log2e), 0.5f));
  const float r = sub(sub(argument, mul(n, ln2_high)), mul(n, ln2_low));
  float p = bits_to_float(0x39500D01u);            // 1/5040
  p = add(mul(p, r), bits_to_float(0x3AB60B61u));  // 1/720
  p = add(mul(p, r), bits_to_float(0x3C088889u));  // 1/120
  p = add(mul(p, r), bits_to_float(0x3D2AAAABu));  // 1/24
  p = add(mul(p, r), bits_to_float(0x3E2AAAABu));  // 1/6
  p = add(mul(p, r), 0.5f);
  p = add(mul(p, r), 1.0f);
  p = add(mul(p, r), 1.0f);
  const int exponent = static_cast<int>(n);
  const bool low = exponent < -126;
  const float scaled = mul(p, bits_to_float(static_cast<uint32_t>((low ? exponent + 64 : exponent) + 127) << 23));
  const float result = low ? mul(scaled, bits_to_float(0x1F800000u)) : scaled;  // 2^-64
  return is_nan(x) ? x : (underflows ? 0.0f : result);
}

// Natural logarithm for z >= 1, +inf or NaN.
ATTN_HD float ln(float z) {
  const uint32_t bits = float_to_bits(z);
  if (bits >= 0x7F800000u) return z;
  int exponent = static_cast<int>(bits >> 23) - 127;
  float f = bits_to_float((bits & 0x7FFFFFu) | 0x3F800000u);
  if (float_to_bits(f) >= 0x3FB504F3u) {
    f = mul(f, 0.5f);
    exponent += 1;
  }
  const float k = static_cast<float>(exponent);
  const float t = sub(f, 1.0f);
  const float w = mul(t, t);
  float p = bits_to_float(0x3D9021BBu);
  p = add(mul(p, t), bits_to_float(0xBDEBD1B8u));
  p = add(mul(p, t), bits_to_float(0x3DEF251Au));
  p = add(mul(p, t), bits_to_float(0xBDFE5D4Fu));
  p = add(mul(p, t), bits_to_float(0x3E11E9BFu));
  p = add(mul(p, t), bits_to_float(0xBE2AAE50u));
  p = add(mul(p, t), bits_to_float(0x3E4CCEACu));
  p = add(mul(p, t), bits_to_float(0xBE7FFFFCu));
  p = add(mul(p, t), bits_to_float(0x3EAAAAAAu));
  float y = mul(mul(t, w), p);
  y = add(y, mul(k, bits_to_float(0xB95E8083u)));
  y = sub(y, mul(0.5f, w));
  y = add(t, y);
  return add(y, mul(k, bits_to_float(0x3F318000u)));
}

// The state of one softmax row: maximum and sum. A row that has met no live tile has sum 0 and maximum -inf.
struct RowState {
  float max;
  float sum;
};

ATTN_HD RowState empty_row() { return RowState{negative_infinity(), 0.0f}; }

ATTN_HD bool is_live(RowState state) { return !(state.max == negative_infinity()); }

// Appends the state of a later tile, or of the sink; a dead one changes nothing, the first live one is copied.
ATTN_HD RowState merge(RowState row, RowState tile) {
  if (!is_live(tile)) return row;
  if (!is_live(row)) return tile;
  const float max = max_nan(row.max, tile.max);
  const float kept = mul(row.sum, exp_nonpositive(sub(row.max, max)));
  const float added = mul(tile.sum, exp_nonpositive(sub(tile.max, max)));
  return RowState{max, add(kept, added)};
}

// P of an unmasked score in a live row.
ATTN_HD float probability(float score, RowState row) { return div(exp_nonpositive(sub(score, row.max)), row.sum); }

// Log-sum-exp of a row, -inf when dead.
ATTN_HD float log_sum_exp(RowState row) { return is_live(row) ? add(row.max, ln(row.sum)) : negative_infinity(); }

// dS of an unmasked pair.
ATTN_HD float score_gradient(float p, float dp, float delta) { return positive_zero(mul(p, sub(dp, delta))); }

}  // namespace attn
