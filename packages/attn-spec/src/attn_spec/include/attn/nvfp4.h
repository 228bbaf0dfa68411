// The NVFP4 quantizer of docs/contracts/nvfp4-v1.md: E2M1 codes, blocks of 16, E4M3 block scales, an outer binary32 scale.
// Compile without contraction, as ordered.h says.
#pragma once

#include "attn/ordered.h"

namespace attn::nvfp4 {

constexpr int kBlock = 16;
constexpr uint8_t kNaNScale = 0x7F;

// The scales above the block scales; {1, 1} is none.
struct Outer {
  float encode;
  float decode;
};

// From a constant encoding scale.
ATTN_HD Outer constant_outer(float encode) { return Outer{encode, div(1.0f, encode)}; }

// From the largest magnitude of a row or tile; NaN where that is no finite number.
ATTN_HD Outer outer_of(float largest) {
  if (is_nan(largest) || largest == -negative_infinity()) return Outer{bits_to_float(kQuietNaNBits), bits_to_float(kQuietNaNBits)};
  return constant_outer(div(2688.0f, largest > 1e-8f ? largest : 1e-8f));
}

// Nearest, ties to the even code; beyond 6 saturates; the sign of a zero is kept. Not for NaN.
ATTN_HD uint8_t encode_e2m1(float value) {
  const uint32_t bits = float_to_bits(value);
  const float a = bits_to_float(bits & 0x7FFFFFFFu);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return static_cast<uint8_t>(code | static_cast<int>((bits >> 28) & 8u));
}

ATTN_HD float decode_e2m1(uint8_t code) {
  const uint32_t exponent = (code >> 1) & 3u;
  const uint32_t mantissa = code & 1u;
  const uint32_t magnitude = exponent != 0 ? ((exponent + 126) << 23) | (mantissa << 22) : (mantissa != 0 ? 0x3F000000u : 0u);
  return bits_to_float(magnitude | (static_cast<uint32_t>(code & 8u) << 28));
}

// For value >= 0 or NaN: nearest even; beyond 448 saturates.
ATTN_HD uint8_t encode_e4m3(float value) {
  if (is_nan(value)) return kNaNScale;
  if (value < 0.015625f) return static_cast<uint8_t>(float_to_bits(add(mul(value, 512.0f), 8388608.0f)) & 0xFu);
  const uint32_t bits = float_to_bits(value);
  const uint32_t code = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - 960u;
  return static_cast<uint8_t>(code < 0x7Eu ? code : 0x7Eu);
}

ATTN_HD float decode_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == kNaNScale) return bits_to_float(sign | kQuietNaNBits);
  if (magnitude >= 8) return bits_to_float(sign | ((magnitude + 960u) << 20));
  return bits_to_float(sign | float_to_bits(mul(static_cast<float>(magnitude), 0.001953125f)));
}

// The scale of a block whose largest magnitude is `largest`; a NaN or an infinity in the block gives the NaN scale.
ATTN_HD uint8_t block_scale(float largest, Outer outer) {
  if (is_nan(largest) || largest == -negative_infinity()) return kNaNScale;
  return encode_e4m3(mul(div(largest, 6.0f), outer.encode));
}

// What a value of the block is multiplied by to be coded; 0 for a block without codes, whose values are all 0 or NaN.
ATTN_HD float block_inverse(uint8_t scale, Outer outer) {
  return scale == 0 || scale == kNaNScale ? 0.0f : div(1.0f, mul(decode_e4m3(scale), outer.decode));
}

ATTN_HD uint8_t encode(float value, float inverse) { return inverse == 0.0f ? static_cast<uint8_t>(0) : encode_e2m1(mul(value, inverse)); }

ATTN_HD float decode(uint8_t code, uint8_t scale, Outer outer) {
  return scale == 0 ? 0.0f : mul(mul(decode_e2m1(code), decode_e4m3(scale)), outer.decode);
}

// Quantizes one block of 16 values and returns its scale; value 2 i is the low half of codes[i].
ATTN_HD uint8_t quantize_block(const float* values, Outer outer, uint8_t* codes) {
  float largest = 0.0f;
  for (int i = 0; i < kBlock; ++i) largest = max_nan(largest, bits_to_float(float_to_bits(values[i]) & 0x7FFFFFFFu));
  const uint8_t scale = block_scale(largest, outer);
  const float inverse = block_inverse(scale, outer);
  for (int i = 0; i < kBlock / 2; ++i) {
    codes[i] = static_cast<uint8_t>(encode(values[2 * i], inverse) | (encode(values[2 * i + 1], inverse) << 4));
  }
  return scale;
}

}  // namespace attn::nvfp4
