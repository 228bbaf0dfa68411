// Vector arithmetic in binary32, binary64 and binary16.
#include "float_rules.h"
#include "vector.h"

namespace amd {
namespace {

uint32_t reciprocal_seed = 0;

void add_binary32(Table& t) {
  each_lane(t, "v_add_f32", [](float a, float b) { return a + b; });
  each_lane(t, "v_sub_f32", [](float a, float b) { return a - b; });
  each_lane(t, "v_subrev_f32", [](float a, float b) { return b - a; });
  each_lane(t, "v_mul_f32", [](float a, float b) { return a * b; });
  each_lane(t, "v_mul_legacy_f32", [](float a, float b) { return a == 0.0f || b == 0.0f ? 0.0f : a * b; });
  each_lane(t, "v_fma_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  each_lane(t, "v_fmaak_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  each_lane(t, "v_fmamk_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  accumulate(t, "v_fmac_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  each_lane(t, "v_mad_f32", [](float a, float b, float c) { return multiply_add_flushed(a, b, c); });
  each_lane(t, "v_madak_f32", [](float a, float b, float c) { return multiply_add_flushed(a, b, c); });
  each_lane(t, "v_madmk_f32", [](float a, float b, float c) { return multiply_add_flushed(a, b, c); });
  accumulate(t, "v_mac_f32", [](float a, float b, float c) { return multiply_add_flushed(a, b, c); });
  each_lane(t, "v_max_f32", [](float a, float b) { return max_number(a, b); });
  each_lane(t, "v_min_f32", [](float a, float b) { return min_number(a, b); });
  each_lane(t, "v_max3_f32", [](float a, float b, float c) { return max_number(max_number(a, b), c); });
  each_lane(t, "v_min3_f32", [](float a, float b, float c) { return min_number(min_number(a, b), c); });
  each_lane(t, "v_med3_f32", [](float a, float b, float c) {
    if (a != a || b != b || c != c) return min_number(min_number(a, b), c);
    return max_number(min_number(a, b), min_number(max_number(a, b), c));
  });
  each_lane(t, "v_floor_f32", [](float a) { return std::floor(a); });
  each_lane(t, "v_ceil_f32", [](float a) { return std::ceil(a); });
  each_lane(t, "v_trunc_f32", [](float a) { return std::trunc(a); });
  each_lane(t, "v_rndne_f32", [](float a) { return std::nearbyint(a); });
  each_lane(t, "v_fract_f32", [](float a) { return std::fmin(a - std::floor(a), 0x1.fffffep-1f); });
  each_lane(t, "v_ldexp_f32", [](float a, int32_t exponent) { return std::ldexp(a, exponent); });
  each_lane(t, "v_frexp_exp_i32_f32", [](float a) {
    int exponent = 0;
    if (std::isfinite(a)) std::frexp(a, &exponent);
    return static_cast<uint32_t>(exponent);
  });
  each_lane(t, "v_frexp_mant_f32", [](float a) {
    int exponent = 0;
    return std::isfinite(a) ? std::frexp(a, &exponent) : a;
  });
}

// Approximations: rounded from binary64 here, within one or two units in the last place on hardware. Subnormals count as zeros.
void add_approximations(Table& t) {
  each_lane(t, "v_rcp_f32", [](float a) { return reciprocal(a); });
  each_lane(t, "v_rcp_iflag_f32", [](float a) { return reciprocal(a); });
  each_lane(t, "v_rsq_f32", [](float a) { return flushed(static_cast<float>(1.0 / std::sqrt(static_cast<double>(flushed(a))))); });
  each_lane(t, "v_sqrt_f32", [](float a) { return std::sqrt(flushed(a)); });
  each_lane(t, "v_exp_f32", [](float a) { return flushed(static_cast<float>(std::exp2(static_cast<double>(flushed(a))))); });
  each_lane(t, "v_log_f32", [](float a) { return flushed(static_cast<float>(std::log2(static_cast<double>(flushed(a))))); });
  each_lane(t, "v_rcp_f64", [](double a) { return 1.0 / a; });
  each_lane(t, "v_rsq_f64", [](double a) { return 1.0 / std::sqrt(a); });
  each_lane(t, "v_sqrt_f64", [](double a) { return std::sqrt(a); });
}

void add_binary64(Table& t) {
  each_lane(t, "v_add_f64", [](double a, double b) { return a + b; });
  each_lane(t, "v_mul_f64", [](double a, double b) { return a * b; });
  each_lane(t, "v_fma_f64", [](double a, double b, double c) { return std::fma(a, b, c); });
  accumulate(t, "v_fmac_f64", [](double a, double b, double c) { return std::fma(a, b, c); });
  each_lane(t, "v_max_f64", [](double a, double b) { return max_number(a, b); });
  each_lane(t, "v_min_f64", [](double a, double b) { return min_number(a, b); });
  each_lane(t, "v_floor_f64", [](double a) { return std::floor(a); });
  each_lane(t, "v_ceil_f64", [](double a) { return std::ceil(a); });
  each_lane(t, "v_trunc_f64", [](double a) { return std::trunc(a); });
  each_lane(t, "v_rndne_f64", [](double a) { return std::nearbyint(a); });
  each_lane(t, "v_ldexp_f64", [](double a, int32_t exponent) { return std::ldexp(a, exponent); });
}

// A binary32 result of two binary16 values, rounded once more, is the rounded exact result: 24 >= 2 * 11 + 2.
void add_binary16(Table& t) {
  each_lane(t, "v_add_f16", [](Half a, Half b) { return to_half(to_float(a) + to_float(b)); });
  each_lane(t, "v_sub_f16", [](Half a, Half b) { return to_half(to_float(a) - to_float(b)); });
  each_lane(t, "v_subrev_f16", [](Half a, Half b) { return to_half(to_float(b) - to_float(a)); });
  each_lane(t, "v_mul_f16", [](Half a, Half b) { return to_half(to_float(a) * to_float(b)); });
  each_lane(t, "v_max_f16", [](Half a, Half b) { return to_half(max_number(to_float(a), to_float(b))); });
  each_lane(t, "v_min_f16", [](Half a, Half b) { return to_half(min_number(to_float(a), to_float(b))); });
}

}  // namespace

void set_reciprocal_error(uint32_t seed) { reciprocal_seed = seed; }

float reciprocal(float x) {
  const float exact = flushed(1.0f / flushed(x));
  if (reciprocal_seed == 0 || !std::isfinite(exact) || exact == 0.0f) return exact;
  const uint32_t draw = (bits_as<uint32_t>(x) ^ reciprocal_seed) * 0x9E3779B1u;
  const uint32_t moved = bits_as<uint32_t>(exact) + (draw >> 16) % 3 - 1;
  return flushed(bits_as<float>(moved));
}

void add_vector_float(Table& t) {
  add_binary32(t);
  add_approximations(t);
  add_binary64(t);
  add_binary16(t);
}

}  // namespace amd
