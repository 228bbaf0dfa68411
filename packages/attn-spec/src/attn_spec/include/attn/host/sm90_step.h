// The tensor-core step of sm90-v1 for many outputs at once: exact integer sums in vectors, and the scalar law where they would not fit.
#pragma once

#include "attn/host/simd.h"
#include "attn/sm90.h"

namespace attn::host::ATTN_HOST_VARIANT {
namespace {

typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));

ATTN_HD Mask load_exponents(const int32_t* from) {
  Mask value;
  memcpy(&value, from, sizeof value);
  return value;
}

ATTN_HD bool any(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256(reinterpret_cast<__m256i>(mask), reinterpret_cast<__m256i>(mask)) == 0;
#elif defined(__aarch64__)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0;
#else
  return ((mask[0] | mask[1]) | (mask[2] | mask[3])) != 0;
#endif
}

ATTN_HD Mask larger(Mask a, Mask b) { return a > b ? a : b; }

// Rows of half operands in binary32 with their exponents.
struct Operands {
  const float* values;
  const int32_t* exponents;
};

// Exponents between which the vector path is exact: products and scaled terms stay normal or vanish below the unit.
constexpr int kLowest = -100, kHighest = 100;

// Vectors of outputs that are worked on in lockstep.
constexpr int kStepVectors = 4;
constexpr int kStepLanes = kStepVectors * kLanes;

// c[i] = step(c[i], a[0..15], b[0..15][i]) for i < kStepLanes; rows of b are `width` apart.
inline void step_lanes(Operands a, Operands b, int64_t width, int least, float* c) {
  Mask e[kStepVectors];
  for (int v = 0; v < kStepVectors; ++v) {
    const Bits bits = reinterpret_cast<Bits>(load(c + v * kLanes));
    const Mask exponent = reinterpret_cast<Mask>((bits >> 23) & 255u) - 127;
    e[v] = reinterpret_cast<Mask>(bits << 1) == 0 ? Mask{} + sm90::kAbsent : exponent;
  }
  for (int k = 0; k < sm90::kStep; ++k)
    for (int v = 0; v < kStepVectors; ++v) e[v] = larger(e[v], load_exponents(b.exponents + k * width + v * kLanes) + a.exponents[k]);
  Mask outside{};
  for (int v = 0; v < kStepVectors; ++v) {
    const Mask none = e[v] < sm90::kAbsent / 2;
    outside |= (e[v] > kHighest) | ((e[v] < kLowest) & ~none);
    e[v] &= ~none;
  }
  if (__builtin_expect(!any(outside), 1)) {
    Vec unit[kStepVectors];
    Bits first[kStepVectors], second[kStepVectors];
    const auto term = [](Vec value) { return reinterpret_cast<Bits>(__builtin_convertvector(value, Mask)); };
    for (int v = 0; v < kStepVectors; ++v) {
      unit[v] = reinterpret_cast<Vec>((25 + 127 - e[v]) << 23);
      first[v] = term(load(c + v * kLanes) * unit[v]);
      second[v] = Bits{};
    }
    for (int k = 0; k < sm90::kStep / 2; ++k)
      for (int v = 0; v < kStepVectors; ++v) {
        first[v] += term(load(b.values + k * width + v * kLanes) * a.values[k] * unit[v]);
        const int l = k + sm90::kStep / 2;
        second[v] += term(load(b.values + l * width + v * kLanes) * a.values[l] * unit[v]);
      }
    Vec result[kStepVectors];
    for (int v = 0; v < kStepVectors; ++v) {
      const Bits sum = first[v] + second[v];
      const Mask negative = reinterpret_cast<Mask>(sum) < 0;
      const Mask magnitude = (reinterpret_cast<Mask>(sum) ^ negative) - negative;
      outside |= reinterpret_cast<Mask>((first[v] ^ sum) & (second[v] ^ sum)) < 0;
      outside |= (magnitude > 0x7FFFFF00) | (magnitude < 0);
      const Vec nearest = __builtin_convertvector(magnitude, Vec);
      const Mask above = __builtin_convertvector(nearest, Mask) > magnitude;
      const Vec truncated = reinterpret_cast<Vec>(reinterpret_cast<Mask>(nearest) + above);
      const Vec value = truncated * reinterpret_cast<Vec>((e[v] + 127 - 25) << 23);
      result[v] = reinterpret_cast<Vec>(reinterpret_cast<Mask>(value) | (negative & INT32_MIN));
    }
    if (__builtin_expect(!any(outside), 1)) {
      for (int v = 0; v < kStepVectors; ++v) store(c + v * kLanes, result[v]);
      return;
    }
  }
  for (int i = 0; i < kStepLanes; ++i) c[i] = sm90::tensor_step(c[i], a.values, 1, b.values + i, width, least);
}

ATTN_HD bool all_zero(const int32_t* exponents) {
  int32_t most = sm90::kAbsent;
  for (int k = 0; k < sm90::kStep; ++k) most = exponents[k] > most ? exponents[k] : most;
  return most == sm90::kAbsent;
}

// c[0..columns-1] = chain over `terms` terms, a multiple of 16, from c; no c is -0. Steps whose terms of a are all zero change nothing.
inline void chain_lanes(Operands a, int terms, Operands b, int64_t width, int columns, int least, float* c) {
  for (int k = 0; k < terms; k += sm90::kStep) {
    if (all_zero(a.exponents + k)) continue;
    for (int i = 0; i < columns; i += kStepLanes)
      step_lanes(Operands{a.values + k, a.exponents + k}, Operands{b.values + k * width + i, b.exponents + k * width + i}, width, least,
                 c + i);
  }
}

}  // namespace
}  // namespace attn::host::ATTN_HOST_VARIANT
