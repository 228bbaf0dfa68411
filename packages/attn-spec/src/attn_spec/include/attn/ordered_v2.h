// Scalar arithmetic of contract ordered-v2 (docs/contracts/ordered-v2.md): exp by FMAs, the merge of tiles and the factor of a tile.
// Everything else of a softmax row is ordered-v1's (ordered.h). Compile without contraction, as that header says.
#pragma once

#include "attn/ordered.h"

namespace attn::v2 {

constexpr int kTile = 1024;

constexpr uint32_t kLeastBits = 0xC2ADFADDu;    // the least argument whose exp is not +0, -86.98997
constexpr uint32_t kLog2EBits = 0x3FB8AA3Bu;    // log2 e
constexpr uint32_t kRoundBits = 0x4B400000u;    // 1.5 * 2^23: adding it rounds to an integer, in the low bits
constexpr uint32_t kLn2HighBits = 0xBF317218u;  // -ln 2, high part
constexpr uint32_t kLn2LowBits = 0x3102E308u;   // -ln 2, low part
constexpr uint32_t kExp6Bits = 0x3AB51226u;     // coefficients of r^6, ..., r^2
constexpr uint32_t kExp5Bits = 0x3C091CEAu;
constexpr uint32_t kExp4Bits = 0x3D2AAC79u;
constexpr uint32_t kExp3Bits = 0x3E2AAA49u;
constexpr uint32_t kExp2Bits = 0x3EFFFFFEu;

// exp(x) for x <= 0 or NaN.
ATTN_HD float exp_nonpositive(float x) {
  const bool none = x < bits_to_float(kLeastBits);
  const float argument = none || is_nan(x) ? 0.0f : x;
  const float rounded = fma(argument, bits_to_float(kLog2EBits), bits_to_float(kRoundBits));
  const float n = sub(rounded, bits_to_float(kRoundBits));
  const float r = fma(n, bits_to_float(kLn2LowBits), fma(n, bits_to_float(kLn2HighBits), argument));
  float p = bits_to_float(kExp6Bits);
  p = fma(p, r, bits_to_float(kExp5Bits));
  p = fma(p, r, bits_to_float(kExp4Bits));
  p = fma(p, r, bits_to_float(kExp3Bits));
  p = fma(p, r, bits_to_float(kExp2Bits));
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  const float result = bits_to_float(float_to_bits(p) + (float_to_bits(rounded) << 23));
  return is_nan(x) ? x : (none ? 0.0f : result);
}

// Appends the state of a later tile: attn::merge with this exp.
ATTN_HD RowState merge(RowState row, RowState tile) {
  if (!is_live(tile)) return row;
  if (!is_live(row)) return tile;
  const float max = max_nan(row.max, tile.max);
  const float kept = mul(row.sum, exp_nonpositive(sub(row.max, max)));
  const float added = mul(tile.sum, exp_nonpositive(sub(tile.max, max)));
  return RowState{max, add(kept, added)};
}

// What turns the exponentials of a live tile into P.
ATTN_HD float tile_factor(float tile_max, RowState row) { return div(exp_nonpositive(sub(tile_max, row.max)), row.sum); }

}  // namespace attn::v2
