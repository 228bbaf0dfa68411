// Device forms of the contract's arithmetic that give the bits of attn/ordered.h with fewer instructions, each with its reason.
// tests/exhaustive.cu compares them with attn/ordered.h: exp on every argument, division on random and structured pairs.
#pragma once

#include "attn/ordered.h"

namespace attn_cuda {

using attn::add;
using attn::bits_to_float;
using attn::float_to_bits;
using attn::mul;
using attn::sub;

// An FMA that is part of a derivation below. The braces let the tests tell it from one that a compiler contracted; they
// stay in PTX and leave no trace in machine code.
__device__ __forceinline__ float exact_fma(float a, float b, float c) {
  float result;
  asm("{ fma.rn.f32 %0, %1, %2, %3; }" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

// Maximum that propagates NaN. It may give +0 where attn::max_nan gives -0; both lead to the same exp, sum and P.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Minimum that propagates NaN.
__device__ __forceinline__ float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// exp(x) as n = floor(x * log2(e) + 1/2) and p = exp(x - n * ln 2): exp(x) = p * 2^n. `shifted` holds n in its low bits.
struct Exponential {
  float p;
  float shifted;
};

// - With y = RN(x * C1), RN(y + 1/2) has the floor of y + 1/2: it is exact below -1/2 and stays in [0, 1/2] above. That floor is y rounded
// to
//   the nearest integer, halves upwards. y * (1 - 2^-24) moves a half upwards and is never one itself, and it moves no other y past a half,
//   as |y| * 2^-24 is less than the spacing of floats there. So one FMA onto 1.5 * 2^23 + an integer rounds it.
// - n * C2 is exact (15 and 8 significant bits), so one FMA equals the product and the subtraction.
__device__ __forceinline__ Exponential exponential(float x, float shift) {
  const float shifted = exact_fma(mul(x, bits_to_float(0x3FB8AA3Bu)), bits_to_float(0x3F7FFFFFu), shift);
  const float n = sub(shifted, shift);
  const float r = sub(exact_fma(n, bits_to_float(0xBF317200u), x), mul(n, bits_to_float(0x35BFBE8Eu)));
  float p = bits_to_float(0x39500D01u);
  p = add(mul(p, r), bits_to_float(0x3AB60B61u));
  p = add(mul(p, r), bits_to_float(0x3C088889u));
  p = add(mul(p, r), bits_to_float(0x3D2AAAABu));
  p = add(mul(p, r), bits_to_float(0x3E2AAAABu));
  p = add(mul(p, r), 0.5f);
  p = add(mul(p, r), 1.0f);
  p = add(mul(p, r), 1.0f);
  return Exponential{p, shifted};
}

// exp(x) for x <= 0 or NaN: the bits of attn::exp_nonpositive.
// - Arguments below -105 give +0 by underflow, so clamping there replaces the test for x < -104.
// - The low bits of `shifted` are n + 191, which are then the exponent field of 2^(n + 64).
// - p * 2^(n + 64) is exact, so RN(. * 2^-64) is the one rounding of p * 2^n, for n on both sides of -126.
__device__ __forceinline__ float exp_nonpositive(float x) {
  const Exponential e = exponential(maximum(x, -105.0f), bits_to_float(0x4B4000BFu));
  return mul(mul(e.p, bits_to_float(float_to_bits(e.shifted) << 23)), bits_to_float(0x1F800000u));
}

// The same for x in [-87, 0], where the result is a normal number: n is added to the exponent field.
__device__ __forceinline__ float exp_normal(float x) {
  const Exponential e = exponential(x, bits_to_float(0x4B400000u));
  return bits_to_float(float_to_bits(e.p) + (float_to_bits(e.shifted) << 23));
}

// Division of many numerators by the sum of one row.
struct Divisor {
  float value;
  float reciprocal;  // RN(1 / value)
  float correction;  // 1 / value - reciprocal, rounded
};

__device__ __forceinline__ Divisor divisor(float value) {
  float reciprocal = attn::div(1.0f, value);
  // Opaque to the compiler, which would otherwise move this division into the loops that use it.
  asm volatile("" : "+f"(reciprocal));
  return Divisor{value, reciprocal, mul(exact_fma(-value, reciprocal, 1.0f), reciprocal)};
}

constexpr uint32_t kSmallestNumerator = 0x17800000u;  // 2^-80

// RN(numerator / divisor) for numerators in [2^-80, 1] and divisors in [1, 2^31]: Markstein's theorem. With the correctly rounded
// reciprocal, a quotient within one ulp (here half an ulp and a little) and its exact remainder, the corrected quotient is correctly
// rounded. The bounds keep the remainder exact.
__device__ __forceinline__ float quotient(float numerator, Divisor divisor) {
  const float guess = exact_fma(numerator, divisor.reciprocal, mul(numerator, divisor.correction));
  const float remainder = exact_fma(-guess, divisor.value, numerator);
  return exact_fma(remainder, divisor.reciprocal, guess);
}

// P of N scores of a live row: RN(exp(RN(x - m)) / s).
template <int N>
__device__ __forceinline__ void probabilities(const float (&scores)[N], float row_max, Divisor row_sum, float (&probs)[N]) {
  float smallest = 1.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    probs[k] = exp_nonpositive(sub(scores[k], row_max));
    smallest = fminf(smallest, probs[k]);
  }
  if (smallest >= bits_to_float(kSmallestNumerator)) {
#pragma unroll
    for (int k = 0; k < N; ++k) probs[k] = quotient(probs[k], row_sum);
  } else {
    // Rare: one copy of the division, through which the values rotate, keeps them in registers and the kernel small.
#pragma unroll 1
    for (int turn = 0; turn < N; ++turn) {
      const float divided = attn::div(probs[0], row_sum.value);
#pragma unroll
      for (int k = 0; k + 1 < N; ++k) probs[k] = probs[k + 1];
      probs[N - 1] = divided;
    }
  }
}

// The same where every x - m is in [-55, 0].
template <int N>
__device__ __forceinline__ void normal_probabilities(const float (&scores)[N], float row_max, Divisor row_sum, float (&probs)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) probs[k] = quotient(exp_normal(sub(scores[k], row_max)), row_sum);
}

// Conversions by the hardware: exact in, nearest even out, subnormals kept. Only the payload of a NaN differs from attn/float_bits.h.
__device__ __forceinline__ float widened(float value) { return value; }
__device__ __forceinline__ float widened(attn::bfloat16 value) { return attn::to_float(value); }
__device__ __forceinline__ float widened(attn::float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// `maximum` of the low and of the high halves of two words.
template <typename T>
__device__ __forceinline__ uint32_t maximum_of_pairs(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t maximum_of_pairs<attn::bfloat16>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
template <>
__device__ __forceinline__ uint32_t maximum_of_pairs<attn::float16>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <typename T>
__device__ __forceinline__ T rounded(float value);
template <>
__device__ __forceinline__ float rounded<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ attn::bfloat16 rounded<attn::bfloat16>(float value) {
  attn::bfloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
__device__ __forceinline__ attn::float16 rounded<attn::float16>(float value) {
  attn::float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

}  // namespace attn_cuda
