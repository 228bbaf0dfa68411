// Vectors of the instruction set that this translation unit is compiled for. Included once a variant, inside its own namespace: nothing
// here may be merged by the linker with the code of another variant.
#pragma once

#include <cstdint>
#include <cstring>

#include "attn/tile_tree.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

// kRows x kVectors accumulators, kVectors operands and one broadcast fill the register file.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kRows = 6;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kVectors = 4, kRows = 6;
#else
constexpr int kLanes = 4, kVectors = 2, kRows = 2;
#endif
constexpr int kPanel = kLanes * kVectors;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Mask __attribute__((vector_size(kLanes * 4)));

ATTN_HD Vec load(const float* from) {
  Vec value;
  memcpy(&value, from, sizeof value);
  return value;
}

ATTN_HD void store(float* to, Vec value) { memcpy(to, &value, sizeof value); }

ATTN_HD Vec broadcast(float value) { return value - Vec{}; }

// One rounding in every lane.
#if defined(__AVX512F__)
ATTN_HD Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
ATTN_HD Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
ATTN_HD Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
#else
typedef double Wide __attribute__((vector_size(kLanes * 8)));
typedef int64_t WideBits __attribute__((vector_size(kLanes * 8)));

// The product of two binary32 numbers is exact in binary64. Their sum is rounded to odd there, so that the second rounding is the only one.
ATTN_HD Vec fma(Vec a, Vec b, Vec c) {
  const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
  const Wide addend = __builtin_convertvector(c, Wide);
  const Wide sum = product + addend;
  const Wide part = sum - product;
  const Wide error = (product - (sum - part)) + (addend - part);
  const WideBits inexact = (error < 0.0) | (error > 0.0);  // NaN: no correction
  const WideBits direction = ((error > 0.0) ^ (sum > 0.0)) | 1;
  WideBits bits = reinterpret_cast<WideBits>(sum);
  bits += direction & inexact & ((bits & 1) - 1);
  return __builtin_convertvector(reinterpret_cast<Wide>(bits), Vec);
}
#endif

// Lane i of the result is lane i + N.
template <int N>
ATTN_HD Vec rotate(Vec value) {
#if defined(__clang__)
  Vec result;
  for (int i = 0; i < kLanes; ++i) result[i] = value[(i + N) % kLanes];
  return result;
#else
  Mask index{};
  for (int i = 0; i < kLanes; ++i) index[i] = (i + N) % kLanes;
  return __builtin_shuffle(value, index);
#endif
}

ATTN_HD Vec max_or_second(Vec a, Vec b) { return a > b ? a : b; }

ATTN_HD Vec floor(Vec value) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_floor_ps(value);
#elif defined(__aarch64__)
  return vrndmq_f32(value);
#else
  const Vec toward_zero = __builtin_convertvector(__builtin_convertvector(value, Mask), Vec);
  return toward_zero > value ? toward_zero - 1.0f : toward_zero;
#endif
}

// Vectors that exp_nonpositive works on in lockstep: one chain of dependent operations would leave the multipliers idle.
constexpr int kLockstep = kLanes == 16 ? 4 : 2;

template <typename Step>
ATTN_HD void lockstep(Step step) {
#pragma GCC unroll 4
  for (int i = 0; i < kLockstep; ++i) step(i);
}

// exp_nonpositive of ordered.h in every lane, without its selects: below -104 the polynomial is taken at -104, where it rounds to +0; NaN
// passes through the polynomial; and p * 2^(n + 64) is exact, so that the product with 2^-64 is the only rounding at every n.
ATTN_HD void exp_nonpositive(Vec (&x)[kLockstep]) {
  Vec n[kLockstep], p[kLockstep];
  const Vec lowest = broadcast(-104.0f);
  lockstep([&](int i) { x[i] = lowest > x[i] ? lowest : x[i]; });
  lockstep([&](int i) { n[i] = floor(x[i] * bits_to_float(0x3FB8AA3Bu) + 0.5f); });
  lockstep([&](int i) { x[i] = (x[i] - n[i] * bits_to_float(0x3F317200u)) - n[i] * bits_to_float(0x35BFBE8Eu); });
  lockstep([&](int i) { p[i] = x[i] * bits_to_float(0x39500D01u) + bits_to_float(0x3AB60B61u); });
  lockstep([&](int i) { p[i] = p[i] * x[i] + bits_to_float(0x3C088889u); });
  lockstep([&](int i) { p[i] = p[i] * x[i] + bits_to_float(0x3D2AAAABu); });
  lockstep([&](int i) { p[i] = p[i] * x[i] + bits_to_float(0x3E2AAAABu); });
  lockstep([&](int i) { p[i] = p[i] * x[i] + 0.5f; });
  lockstep([&](int i) { p[i] = p[i] * x[i] + 1.0f; });
  lockstep([&](int i) { p[i] = p[i] * x[i] + 1.0f; });
  lockstep([&](int i) {
    const Mask scale = (__builtin_convertvector(n[i], Mask) + (64 + 127)) << 23;
    x[i] = p[i] * reinterpret_cast<Vec>(scale) * bits_to_float(0x1F800000u);
  });
}

// tree_sum of tile_tree.h with the slots in registers: the same pairs in the same order.
ATTN_HD float tile_sum(const float* slots) {
  constexpr int count = kTile / kLanes;
  Vec part[count];
  for (int i = 0; i < count; ++i) part[i] = load(slots + i * kLanes);
  for (int half = count / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) part[i] = part[i] + part[i + half];
  Vec sum = part[0];
  if constexpr (kLanes > 8) sum = sum + rotate<8 % kLanes>(sum);
  if constexpr (kLanes > 4) sum = sum + rotate<4 % kLanes>(sum);
  sum = sum + rotate<2>(sum);
  sum = sum + rotate<1>(sum);
  return sum[0];
}

// tree_max of tile_tree.h without its care for NaN: a NaN is passed over. A maximum has no rounding, so every order gives the same number
// up to the sign of a zero.
ATTN_HD float tile_max_of_numbers(const float* slots) {
  Vec part[4];
  for (int k = 0; k < 4; ++k) part[k] = broadcast(negative_infinity());
  for (int i = 0; i < kTile; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) part[k] = max_or_second(load(slots + i + k * kLanes), part[k]);
  Vec largest = max_or_second(max_or_second(part[0], part[1]), max_or_second(part[2], part[3]));
  if constexpr (kLanes > 8) largest = max_or_second(largest, rotate<8 % kLanes>(largest));
  if constexpr (kLanes > 4) largest = max_or_second(largest, rotate<4 % kLanes>(largest));
  largest = max_or_second(largest, rotate<2>(largest));
  largest = max_or_second(largest, rotate<1>(largest));
  return positive_zero(largest[0]);
}

ATTN_HD bool tile_has_nan(const float* slots) {
  int found = 0;
  for (int i = 0; i < kTile; ++i) found |= is_nan(slots[i]);
  return found != 0;
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
