// Conversions between the number formats.
#include "float_rules.h"
#include "vector.h"

namespace amd {
namespace {

// Nearest even; a NaN stays one and becomes quiet.
uint32_t to_bfloat16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if (value != value) return bits >> 16 | 0x40u;
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

uint32_t to_half_toward_zero(float value) {
  const Half nearest = to_half(value);
  const float back = to_float(nearest);
  if (std::isinf(back) && !std::isinf(value)) return (nearest.bits & 0x8000u) | 0x7BFFu;
  return std::fabs(back) > std::fabs(value) ? nearest.bits - 1u : nearest.bits;
}

template <int byte>
void unsigned_byte(Table& t, const std::string& mnemonic) {
  each_lane(t, mnemonic, [](uint32_t a) { return static_cast<float>(a >> (8 * byte) & 0xFFu); });
}

}  // namespace

void add_vector_convert(Table& t) {
  each_lane(t, "v_cvt_f32_i32", [](int32_t a) { return static_cast<float>(a); });
  each_lane(t, "v_cvt_f32_u32", [](uint32_t a) { return static_cast<float>(a); });
  each_lane(t, "v_cvt_i32_f32", [](float a) { return static_cast<uint32_t>(to_int(a)); });
  each_lane(t, "v_cvt_u32_f32", [](float a) { return to_uint(a); });
  each_lane(t, "v_cvt_rpi_i32_f32", [](float a) { return static_cast<uint32_t>(to_int(std::floor(static_cast<double>(a) + 0.5))); });
  each_lane(t, "v_cvt_flr_i32_f32", [](float a) { return static_cast<uint32_t>(to_int(std::floor(a))); });
  each_lane(t, "v_cvt_f64_f32", [](float a) { return static_cast<double>(a); });
  each_lane(t, "v_cvt_f32_f64", [](double a) { return static_cast<float>(a); });
  each_lane(t, "v_cvt_f64_i32", [](int32_t a) { return static_cast<double>(a); });
  each_lane(t, "v_cvt_f64_u32", [](uint32_t a) { return static_cast<double>(a); });
  each_lane(t, "v_cvt_i32_f64", [](double a) { return static_cast<uint32_t>(to_int(a)); });
  each_lane(t, "v_cvt_u32_f64", [](double a) { return to_uint(a); });
  each_lane(t, "v_cvt_f32_f16", [](Half a) { return to_float(a); });
  each_lane(t, "v_cvt_f16_f32", [](float a) { return to_half(a); });
  each_lane(t, "v_cvt_f16_u16", [](uint16_t a) { return to_half(static_cast<float>(a)); });
  each_lane(t, "v_cvt_f16_i16", [](int16_t a) { return to_half(static_cast<float>(a)); });
  each_lane(t, "v_cvt_pk_bf16_f32", [](float a, float b) { return to_bfloat16(a) | to_bfloat16(b) << 16; });
  each_lane(t, "v_cvt_pkrtz_f16_f32", [](float a, float b) { return to_half_toward_zero(a) | to_half_toward_zero(b) << 16; });
  each_lane(t, "v_cvt_pk_f16_f32", [](float a, float b) { return uint32_t{to_half(a).bits} | uint32_t{to_half(b).bits} << 16; });
  each_lane(t, "v_cvt_pk_u16_u32", [](uint32_t a, uint32_t b) { return std::min(a, 0xFFFFu) | std::min(b, 0xFFFFu) << 16; });
  unsigned_byte<0>(t, "v_cvt_f32_ubyte0");
  unsigned_byte<1>(t, "v_cvt_f32_ubyte1");
  unsigned_byte<2>(t, "v_cvt_f32_ubyte2");
  unsigned_byte<3>(t, "v_cvt_f32_ubyte3");
  each_lane(t, "v_pack_b32_f16", [](Half a, Half b) { return uint32_t{a.bits} | uint32_t{b.bits} << 16; });
  Entry pack = *t.find("v_pack_b32_f16");
  pack.modifiers |= kSelect;
  t.add("v_pack_b32_f16", pack);
}

}  // namespace amd
