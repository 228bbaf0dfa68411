// Device forms of the arithmetic of attn/sm90.h, for values spread over the accumulators of a warpgroup (wgmma.cuh): a thread holds two
// rows, `h` 0 and 1, and of each the classes 2 (t mod 4) + {0, 1}; the four threads of a quad hold a row.
// Source: docs/contracts/sm90-v1.md, sections 1 and 3.
#pragma once

#include "attn/sm90.h"

namespace attn_cuda::hopper {

using attn::add;
using attn::fma;
using attn::mul;
using attn::sub;

// The instruction that the contract's ex2 is.
__device__ __forceinline__ float ex2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float dead() { return attn::negative_infinity(); }

// Origin of the exponents: n, or +0 where no score was seen.
__device__ __forceinline__ float origin_of(float n) { return n == dead() ? 0.0f : n; }

// Largest of the quad's values; a NaN is passed over, and shows in the sums.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 1));
}

// Sum by halves; a template for each length, which keeps the values in registers.
template <int kLength>
__device__ __forceinline__ float sum_by_halves(const float (&x)[kLength]) {
  if constexpr (kLength == 1) {
    return x[0];
  } else {
    float y[kLength / 2];
#pragma unroll
    for (int j = 0; j < kLength / 2; ++j) y[j] = add(x[j], x[j + kLength / 2]);
    return sum_by_halves(y);
  }
}

// Columns of one class in a thread: values d[4 j + 2 h + e], j = 0 .. kGroups - 1, by halves of j.
template <int kGroups, int kCount>
__device__ __forceinline__ float class_of(const float (&d)[kCount], int h, int e) {
  static_assert(kCount == 4 * kGroups);
  float x[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) x[j] = d[4 * j + 2 * h + e];
  return sum_by_halves(x);
}

// The eight classes of a row by halves: 4 and 2 are the distances between threads, 1 between the two classes of a thread. Addition
// commutes, so every thread of the quad gets the same bits.
__device__ __forceinline__ float row_sum(float even, float odd) {
  even = add(even, __shfl_xor_sync(~0u, even, 2));
  odd = add(odd, __shfl_xor_sync(~0u, odd, 2));
  even = add(even, __shfl_xor_sync(~0u, even, 1));
  odd = add(odd, __shfl_xor_sync(~0u, odd, 1));
  return add(even, odd);
}

// Whether no key was seen. The sum tells a row whose scores were all NaN, which is live.
__device__ __forceinline__ bool is_dead(float n, float sum) { return n == dead() && sum == 0.0f; }

// Factors of two states, left and right: x = fma(right, b, RN(left * a)). That of a dead state is -0, with which the formula copies the
// other one, the sign of a zero included: fma(x, 1, +0 * -0) is x, and so is fma(+0, -0, x).
struct Factors {
  float n, a, b;
};

__device__ __forceinline__ Factors merge_factors(float n, float sum, float n_s, float sum_s) {
  const float top = fmaxf(n, n_s), origin = origin_of(top);
  return Factors{top, is_dead(n, sum) ? -0.0f : ex2(sub(n, origin)), is_dead(n_s, sum_s) ? -0.0f : ex2(sub(n_s, origin))};
}

__device__ __forceinline__ float merged(float left, float right, Factors factors) { return fma(right, factors.b, mul(left, factors.a)); }

// Factor of O, and LSE, of a row with a merged state; `sink` is -inf without one. A dead row keeps out = +0: its O is +0.
struct RowResult {
  float factor, lse;
};

__device__ __forceinline__ RowResult row_result(float n, float sum, float sink) {
  if (is_dead(n, sum)) return RowResult{0.0f, sink};
  float a = 1.0f;
  if (sink != dead()) {
    const float logit = mul(sink, attn::bits_to_float(attn::sm90::kLog2EBits));
    const float top = fmaxf(n, logit), origin = origin_of(top);
    a = ex2(sub(n, origin));
    sum = fma(sum, a, ex2(sub(logit, origin)));
    n = top;
  }
  return RowResult{attn::div(a, sum), fma(n, attn::bits_to_float(attn::sm90::kLn2Bits), attn::ln(sum))};
}

// Two halves, the first low: nearest even, overflow to infinity, subnormals kept.
template <typename Half>
__device__ __forceinline__ uint32_t pair_of(float low, float high);
template <>
__device__ __forceinline__ uint32_t pair_of<attn::bfloat16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ __forceinline__ uint32_t pair_of<attn::float16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// The operand of a step of columns 16 s .. 16 s + 15 from accumulator d.
template <typename Half, int kCount>
__device__ __forceinline__ void operand_of(const float (&d)[kCount], int step, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pair_of<Half>(d[8 * step + 2 * i], d[8 * step + 2 * i + 1]);
}

}  // namespace attn_cuda::hopper
