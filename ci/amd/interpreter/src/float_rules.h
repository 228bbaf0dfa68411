// Rules of the ISA guides for binary32 that C++ has no operator for. IEEE mode is on, as the runtime demands of every kernel.
#pragma once

#include <cmath>
#include <limits>

#include "machine.h"

namespace amd {

inline bool is_signalling(float x) {
  return (bits_as<uint32_t>(x) & 0x7FC00000u) == 0x7F800000u && (bits_as<uint32_t>(x) & 0x3FFFFFu) != 0;
}
inline float quiet(float x) { return bits_as<float>(bits_as<uint32_t>(x) | 0x00400000u); }
inline bool is_signalling(double x) {
  const auto bits = bits_as<uint64_t>(x);
  return (bits >> 51 & 0xFFF) == 0xFFE && (bits & 0x7FFFFFFFFFFFFull) != 0;
}
inline double quiet(double x) { return bits_as<double>(bits_as<uint64_t>(x) | uint64_t{1} << 51); }

// maxNum and minNum of IEEE 754-2008, with +0 above -0.
template <typename T>
inline T max_number(T a, T b) {
  if (is_signalling(a)) return quiet(a);
  if (is_signalling(b)) return quiet(b);
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

template <typename T>
inline T min_number(T a, T b) {
  if (is_signalling(a)) return quiet(a);
  if (is_signalling(b)) return quiet(b);
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

inline float flushed(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  return (bits & 0x7F800000u) == 0 ? bits_as<float>(bits & 0x80000000u) : x;
}

// v_mad_f32 and v_mac_f32: two roundings, subnormals taken and given as zeros whatever the mode.
inline float multiply_add_flushed(float a, float b, float c) { return flushed(flushed(flushed(a) * flushed(b)) + flushed(c)); }

inline int32_t to_int(double x) {
  if (x != x) return 0;
  if (x >= 2147483647.0) return std::numeric_limits<int32_t>::max();
  if (x <= -2147483648.0) return std::numeric_limits<int32_t>::min();
  return static_cast<int32_t>(x);
}

inline uint32_t to_uint(double x) {
  if (!(x > 0.0)) return 0;
  return x >= 4294967295.0 ? 0xFFFFFFFFu : static_cast<uint32_t>(x);
}

// The hardware's reciprocal is within one unit in the last place. Correctly rounded here, unless a test asks for an error.
void set_reciprocal_error(uint32_t seed);
float reciprocal(float x);

}  // namespace amd
