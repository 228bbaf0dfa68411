// v_div_scale_f32, v_div_fmas_f32 and v_div_fixup_f32: the steps of an IEEE division around v_rcp_f32.
//
// The guides' listings say when each operand is scaled by 2^64 or 2^-64; where a listing cannot be meant as printed (a denominator above
// 2^126 scaled up overflows), the scale follows from what v_div_fmas_f32 undoes: 2^64 for a quotient near overflow, 2^-64 for a subnormal
// one.
#include "float_rules.h"
#include "scalar.h"

namespace amd {
namespace {

int exponent(float x) { return bits_as<uint32_t>(x) >> 23 & 0xFF; }
bool is_subnormal(float x) { return exponent(x) == 0 && x != 0.0f; }

struct Scaled {
  float value;
  bool post;  // v_div_fmas_f32 has to scale the quotient
};

// `value` is the denominator or the numerator.
Scaled scale(float value, float denominator, float numerator) {
  const double quotient = std::fabs(static_cast<double>(numerator) / denominator);
  const bool small_quotient = quotient != 0.0 && quotient < 0x1p-126;
  const bool large_denominator = std::fabs(denominator) > 0x1p126f && std::isfinite(denominator);
  const bool is_denominator = value == denominator, is_numerator = value == numerator;
  if (numerator == 0.0f || denominator == 0.0f) return {bits_as<float>(0x7FC00000u), false};
  if (exponent(numerator) - exponent(denominator) >= 96) return {is_denominator ? value * 0x1p64f : value, true};
  if (is_subnormal(denominator)) return {value * 0x1p64f, false};
  if (large_denominator && small_quotient) return {is_denominator ? value * 0x1p-64f : value, true};
  if (large_denominator) return {value * 0x1p-64f, false};
  if (small_quotient) return {is_numerator ? value * 0x1p64f : value, true};
  if (exponent(numerator) <= 23) return {value * 0x1p64f, false};
  return {value, false};
}

// a * b + c times a power of two, rounded once: the sum is made odd in binary64 where it is not exact.
float scaled_fma(float a, float b, float c, double factor) {
  const double product = static_cast<double>(a) * b, addend = c;  // both exact
  double sum = product + addend;
  const double part = sum - product, error = (product - (sum - part)) + (addend - part);
  if (std::isfinite(sum) && error != 0.0) {
    auto bits = bits_as<uint64_t>(sum);
    if (!(bits & 1)) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
    sum = bits_as<double>(bits);
  }
  return static_cast<float>(sum * factor);
}

float fused(float a, float b, float c, bool post) {
  if (!post) return std::fma(a, b, c);
  return scaled_fma(a, b, c, exponent(c) > 127 ? 0x1p64 : 0x1p-64);
}

float fix(float quotient, float denominator, float numerator) {
  const bool negative = std::signbit(denominator) != std::signbit(numerator);
  const auto with = [negative](float magnitude) { return negative ? -magnitude : magnitude; };
  if (numerator != numerator) return quiet(numerator);
  if (denominator != denominator) return quiet(denominator);
  if ((numerator == 0.0f && denominator == 0.0f) || (std::isinf(numerator) && std::isinf(denominator))) return bits_as<float>(0xFFC00000u);
  if (denominator == 0.0f || std::isinf(numerator)) return with(std::numeric_limits<float>::infinity());
  if (std::isinf(denominator) || numerator == 0.0f) return with(0.0f);
  if (exponent(numerator) - exponent(denominator) < -150) return with(0.0f);
  return with(std::fabs(quotient));
}

void run_scale(Wave& w, const Instruction& in) {
  Lanes<float> buffers[3], results;
  const float* from[3];
  for (int i = 0; i < 3; ++i) from[i] = source<float>(w, in, in.operand[2 + i], i, buffers[i].x);
  alignas(64) uint8_t flags[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Scaled scaled = scale(from[0][lane], from[1][lane], from[2][lane]);
    results.x[lane] = scaled.value;
    flags[lane] = scaled.post;
  }
  write_scalar(w, in.operand[1], mask_of(flags) & w.exec());
  write(w, in, in.operand[0], results.x);
}

void run_fmas(Wave& w, const Instruction& in) {
  Lanes<float> buffers[3], results;
  const float* from[3];
  for (int i = 0; i < 3; ++i) from[i] = source<float>(w, in, in.operand[1 + i], i, buffers[i].x);
  for (int lane = 0; lane < kLanes; ++lane) results.x[lane] = fused(from[0][lane], from[1][lane], from[2][lane], w.vcc() >> lane & 1);
  write(w, in, in.operand[0], results.x);
}

}  // namespace

void add_division(Table& t) {
  t.add("v_div_scale_f32", {run_scale, {Type::f32, Type::b64, Type::f32, Type::f32, Type::f32}, kInputs});
  t.add("v_div_fmas_f32", {run_fmas, {Type::f32, Type::f32, Type::f32, Type::f32}, kInputs});
  each_lane(t, "v_div_fixup_f32", [](float q, float denominator, float numerator) { return fix(q, denominator, numerator); });
}

}  // namespace amd
