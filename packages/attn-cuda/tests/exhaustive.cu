// Compares csrc/arithmetic.cuh with attn/ordered.h on the device: exp on every float <= 0 and every NaN, maximum on pairs of special
// values, division on hashed pairs and on quotients beside rounding boundaries. Prints one line a check; exits 1 on any difference.
#include <cstdio>

#include "arithmetic.cuh"

namespace {

__device__ unsigned long long differences;

__device__ bool same(float a, float b) { return (attn::is_nan(a) && attn::is_nan(b)) || attn::float_to_bits(a) == attn::float_to_bits(b); }

__device__ void count(bool equal) {
  if (!equal) atomicAdd(&differences, 1ull);
}

__global__ void exp_kernel(uint64_t first, uint64_t count_of_values) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count_of_values; i += step) {
    const float x = attn::bits_to_float(static_cast<uint32_t>(first + i));
    const float wanted = attn::exp_nonpositive(x);
    count(same(attn_cuda::exp_nonpositive(x), wanted));
    if (x >= -87.0f && x <= 0.0f) count(same(attn_cuda::exp_normal(x), wanted));
  }
}

// The special function unit's exp is not the contract's: this comparison must find differences, or the counting sees nothing.
__global__ void control_kernel() {
  const float x = -1.0f - static_cast<float>(threadIdx.x) / 1024.0f;
  count(same(__expf(x), attn::exp_nonpositive(x)));
}

__device__ uint64_t hashed(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Numerators 2^-80 .. 1 and divisors 1 .. 2^31. Every second numerator is near (q + half an ulp) * divisor, where a wrong rounding would
// show.
__global__ void division_kernel(uint64_t pairs) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += step) {
    const uint64_t random = hashed(i), more = hashed(random);
    const uint32_t divisor_exponent = 127 + (more >> 8) % 31;
    const float divisor = attn::bits_to_float((divisor_exponent << 23) | (static_cast<uint32_t>(random) & 0x7FFFFFu));
    float numerator =
        attn::bits_to_float(((47 + static_cast<uint32_t>((more >> 16) % 80)) << 23) | (static_cast<uint32_t>(random >> 32) & 0x7FFFFFu));
    if (i & 1) {
      const float quotient = attn::div(numerator, divisor);
      const double boundary = static_cast<double>(quotient) + static_cast<double>(quotient) * 0x1p-25 * (1 + ((more >> 40) & 1));
      numerator = static_cast<float>(boundary * divisor);
      if (!(numerator >= attn::bits_to_float(attn_cuda::kSmallestNumerator) && numerator <= 1.0f)) continue;
    }
    count(same(attn_cuda::quotient(numerator, attn_cuda::divisor(divisor)), attn::div(numerator, divisor)));
  }
}

__global__ void maximum_kernel() {
  const uint32_t values[] = {0xFF800000u, 0xC0000000u, 0x80000001u, 0x00000001u, 0x3F800000u,
                             0x7F7FFFFFu, 0x7F800000u, 0x7FC00000u, 0xFFC00000u, 0x7F800001u};
  for (const uint32_t a : values)
    for (const uint32_t b : values) {
      const float x = attn::bits_to_float(a), y = attn::bits_to_float(b);
      count(same(attn_cuda::maximum(x, y), attn::max_nan(x, y)));
      if (attn::is_nan(x) || attn::is_nan(y)) count(attn::float_to_bits(attn_cuda::maximum(x, y)) == 0x7FFFFFFFu);
    }
}

bool report(const char* name) {
  cudaError_t error = cudaDeviceSynchronize();
  unsigned long long found = 0;
  if (error == cudaSuccess) error = cudaMemcpyFromSymbol(&found, differences, sizeof found);
  const unsigned long long zero = 0;
  if (error == cudaSuccess) error = cudaMemcpyToSymbol(differences, &zero, sizeof zero);
  std::printf("%s: %llu differences%s%s\n", name, found, error == cudaSuccess ? "" : ", ",
              error == cudaSuccess ? "" : cudaGetErrorString(error));
  return error == cudaSuccess && found == 0;
}

}  // namespace

int main() {
  bool good = true;
  exp_kernel<<<4096, 256>>>(0x80000000ull, 0x80000000ull);  // -0 .. -inf and the NaNs with a sign
  good &= report("exp of every float with a sign");
  exp_kernel<<<4096, 256>>>(0x7F800001ull, 0x7FFFFFull);
  good &= report("exp of every NaN without a sign");
  exp_kernel<<<1, 1>>>(0, 1);
  good &= report("exp of +0");
  maximum_kernel<<<1, 1>>>();
  good &= report("maximum of special values");
  division_kernel<<<4096, 256>>>(1ull << 33);
  good &= report("division of 2^33 pairs");
  control_kernel<<<1, 1024>>>();
  const bool control = !report("control: approximate exp (must differ)");
  return good && control ? 0 : 1;
}
