// Bit casts and conversions between binary32, bfloat16 and binary16. Compiled by g++, nvcc and clang-hip.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__HIP__)
#define ATTN_HD __host__ __device__ __forceinline__
#else
#define ATTN_HD inline __attribute__((always_inline))
#endif

#if defined(__FAST_MATH__) || defined(__USE_FAST_MATH__)
#error "attn: a fast-math build cannot keep the bits of a contract; remove -ffast-math / --use_fast_math"
#endif

namespace attn {

ATTN_HD float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ATTN_HD uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ATTN_HD bool is_nan(float value) { return (float_to_bits(value) & 0x7FFFFFFFu) > 0x7F800000u; }

constexpr uint32_t kNegativeInfinityBits = 0xFF800000u;
constexpr uint32_t kQuietNaNBits = 0x7FC00000u;

ATTN_HD float negative_infinity() { return bits_to_float(kNegativeInfinityBits); }

// bfloat16 and binary16 as storage: the arithmetic is always binary32.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

ATTN_HD float to_float(float value) { return value; }

ATTN_HD float to_float(bfloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

ATTN_HD float to_float(float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1Fu;
  uint32_t mantissa = value.bits & 0x3FFu;
  if (exponent == 0x1F) return bits_to_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, exact in binary32.
  const float magnitude = static_cast<float>(mantissa) * bits_to_float(0x33800000u);
  return bits_to_float(sign | float_to_bits(magnitude));
}

template <typename T>
ATTN_HD T from_float(float value);

template <>
ATTN_HD float from_float<float>(float value) {
  return value;
}

// Nearest even; overflow gives infinity; NaN stays a quiet NaN.
template <>
ATTN_HD bfloat16 from_float<bfloat16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return bfloat16{static_cast<uint16_t>(is_nan(value) ? 0x7FC0u : rounded)};
}

template <>
ATTN_HD float16 from_float<float16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Selects instead of branches, so that loops vectorise. One unit of a subnormal binary16 is one ulp of a sum with 0.5, which the addition
  // rounds.
  const uint32_t rebased = magnitude - 0x38000000u;
  const uint32_t normal = (rebased + 0x0FFFu + ((rebased >> 13) & 1u)) >> 13;
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t infinite = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t result = magnitude >= 0x477FF000u ? infinite : finite;  // 65520 and above round to infinity
  return float16{static_cast<uint16_t>(sign | result)};
}

}  // namespace attn
