// Vector arithmetic on integers and bits.
#include <algorithm>

#include "vector.h"

namespace amd {
namespace {

uint32_t low24(uint32_t a) { return a & 0xFFFFFFu; }
int32_t low24(int32_t a) { return static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8; }

uint32_t field_mask(uint32_t width) { return (1u << width) - 1; }

uint32_t permuted_byte(uint64_t bytes, uint32_t selector) {
  if (selector >= 0x0D) return 0xFF;
  if (selector == 0x0C) return 0x00;
  if (selector >= 0x08) return bytes >> (16 * (selector - 8) + 15) & 1 ? 0xFF : 0x00;
  return bytes >> (8 * selector) & 0xFF;
}

void add_arithmetic(Table& t) {
  each_lane(t, "v_add_u32", [](uint32_t a, uint32_t b) { return a + b; });
  each_lane(t, "v_sub_u32", [](uint32_t a, uint32_t b) { return a - b; });
  each_lane(t, "v_subrev_u32", [](uint32_t a, uint32_t b) { return b - a; });
  each_lane(t, "v_add3_u32", [](uint32_t a, uint32_t b, uint32_t c) { return a + b + c; });
  each_lane(t, "v_mul_lo_u32", [](uint32_t a, uint32_t b) { return a * b; });
  each_lane(t, "v_mul_hi_u32", [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); });
  each_lane(t, "v_mul_hi_i32", [](int32_t a, int32_t b) { return static_cast<uint32_t>(int64_t{a} * b >> 32); });
  each_lane(t, "v_mul_u32_u24", [](uint32_t a, uint32_t b) { return low24(a) * low24(b); });
  each_lane(t, "v_mul_hi_u32_u24", [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{low24(a)} * low24(b) >> 32); });
  each_lane(t, "v_mul_i32_i24", [](int32_t a, int32_t b) { return static_cast<uint32_t>(int64_t{low24(a)} * low24(b)); });
  each_lane(t, "v_mad_u32_u24", [](uint32_t a, uint32_t b, uint32_t c) { return low24(a) * low24(b) + c; });
  each_lane(t, "v_mad_i32_i24", [](int32_t a, int32_t b, uint32_t c) { return static_cast<uint32_t>(int64_t{low24(a)} * low24(b)) + c; });
  each_lane(t, "v_min_i32", [](int32_t a, int32_t b) { return std::min(a, b); });
  each_lane(t, "v_max_i32", [](int32_t a, int32_t b) { return std::max(a, b); });
  each_lane(t, "v_min_u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
  each_lane(t, "v_max_u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
  each_lane(t, "v_min3_i32", [](int32_t a, int32_t b, int32_t c) { return std::min(std::min(a, b), c); });
  each_lane(t, "v_max3_i32", [](int32_t a, int32_t b, int32_t c) { return std::max(std::max(a, b), c); });
  each_lane(t, "v_min3_u32", [](uint32_t a, uint32_t b, uint32_t c) { return std::min(std::min(a, b), c); });
  each_lane(t, "v_max3_u32", [](uint32_t a, uint32_t b, uint32_t c) { return std::max(std::max(a, b), c); });
  each_lane(t, "v_med3_i32", [](int32_t a, int32_t b, int32_t c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
  each_lane(t, "v_med3_u32", [](uint32_t a, uint32_t b, uint32_t c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
  each_lane(t, "v_sad_u32", [](uint32_t a, uint32_t b, uint32_t c) { return std::max(a, b) - std::min(a, b) + c; });
}

void add_bits(Table& t) {
  each_lane(t, "v_mov_b32", [](uint32_t a) { return a; });
  each_lane(t, "v_mov_b64", [](uint64_t a) { return a; });
  each_lane(t, "v_accvgpr_read_b32", [](uint32_t a) { return a; });
  each_lane(t, "v_accvgpr_write_b32", [](uint32_t a) { return a; });
  each_lane(t, "v_accvgpr_mov_b32", [](uint32_t a) { return a; });
  each_lane(t, "v_and_b32", [](uint32_t a, uint32_t b) { return a & b; });
  each_lane(t, "v_or_b32", [](uint32_t a, uint32_t b) { return a | b; });
  each_lane(t, "v_xor_b32", [](uint32_t a, uint32_t b) { return a ^ b; });
  each_lane(t, "v_xnor_b32", [](uint32_t a, uint32_t b) { return ~(a ^ b); });
  each_lane(t, "v_not_b32", [](uint32_t a) { return ~a; });
  each_lane(t, "v_or3_b32", [](uint32_t a, uint32_t b, uint32_t c) { return a | b | c; });
  each_lane(t, "v_and_or_b32", [](uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; });
  each_lane(t, "v_xad_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a ^ b) + c; });
  each_lane(t, "v_lshl_add_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a << (b & 31)) + c; });
  each_lane(t, "v_add_lshl_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a + b) << (c & 31); });
  each_lane(t, "v_lshl_or_b32", [](uint32_t a, uint32_t b, uint32_t c) { return a << (b & 31) | c; });
  each_lane(t, "v_lshlrev_b32", [](uint32_t a, uint32_t b) { return b << (a & 31); });
  each_lane(t, "v_lshrrev_b32", [](uint32_t a, uint32_t b) { return b >> (a & 31); });
  each_lane(t, "v_ashrrev_i32", [](uint32_t a, int32_t b) { return b >> (a & 31); });
  each_lane(t, "v_lshlrev_b64", [](uint32_t a, uint64_t b) { return b << (a & 63); });
  each_lane(t, "v_lshrrev_b64", [](uint32_t a, uint64_t b) { return b >> (a & 63); });
  each_lane(t, "v_ashrrev_i64", [](uint32_t a, int64_t b) { return b >> (a & 63); });
  each_lane(t, "v_lshl_add_u64", [](uint64_t a, uint32_t b, uint64_t c) { return (a << (b & 7)) + c; });
  each_lane(t, "v_bfe_u32", [](uint32_t a, uint32_t b, uint32_t c) { return (a >> (b & 31)) & field_mask(c & 31); });
  each_lane(t, "v_bfe_i32", [](uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t width = c & 31, bits = (a >> (b & 31)) & field_mask(width);
    return width != 0 && bits >> (width - 1) & 1 ? bits | ~field_mask(width) : bits;
  });
  each_lane(t, "v_bfi_b32", [](uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (~a & c); });
  each_lane(t, "v_bfm_b32", [](uint32_t a, uint32_t b) { return field_mask(a & 31) << (b & 31); });
  each_lane(t, "v_bfrev_b32", [](uint32_t a) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
    return reversed;
  });
  each_lane(t, "v_perm_b32", [](uint32_t a, uint32_t b, uint32_t selectors) {
    const uint64_t bytes = uint64_t{a} << 32 | b;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= permuted_byte(bytes, selectors >> (8 * i) & 0xFF) << (8 * i);
    return result;
  });
  each_lane(t, "v_alignbit_b32",
            [](uint32_t a, uint32_t b, uint32_t c) { return static_cast<uint32_t>((uint64_t{a} << 32 | b) >> (c & 31)); });
  each_lane(t, "v_alignbyte_b32",
            [](uint32_t a, uint32_t b, uint32_t c) { return static_cast<uint32_t>((uint64_t{a} << 32 | b) >> (8 * (c & 3))); });
  each_lane(t, "v_bcnt_u32_b32", [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(__builtin_popcount(a)) + b; });
  each_lane(t, "v_ffbh_u32", [](uint32_t a) { return a ? static_cast<uint32_t>(__builtin_clz(a)) : ~0u; });
  each_lane(t, "v_ffbl_b32", [](uint32_t a) { return a ? static_cast<uint32_t>(__builtin_ctz(a)) : ~0u; });
  each_lane(t, "v_ffbh_i32", [](int32_t a) {
    const uint32_t magnitude = a < 0 ? ~a : a;
    return magnitude ? static_cast<uint32_t>(__builtin_clz(magnitude)) : ~0u;
  });
}

void add_sixteen_bits(Table& t) {
  each_lane(t, "v_add_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a + b); });
  each_lane(t, "v_sub_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(a - b); });
  each_lane(t, "v_subrev_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b - a); });
  each_lane(t, "v_mul_lo_u16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(uint32_t{a} * b); });
  each_lane(t, "v_mad_u16", [](uint16_t a, uint16_t b, uint16_t c) { return static_cast<uint16_t>(uint32_t{a} * b + c); });
  each_lane(t, "v_lshlrev_b16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b << (a & 15)); });
  each_lane(t, "v_lshrrev_b16", [](uint16_t a, uint16_t b) { return static_cast<uint16_t>(b >> (a & 15)); });
  each_lane(t, "v_ashrrev_i16", [](uint16_t a, int16_t b) { return static_cast<int16_t>(b >> (a & 15)); });
  each_lane(t, "v_min_u16", [](uint16_t a, uint16_t b) { return std::min(a, b); });
  each_lane(t, "v_max_u16", [](uint16_t a, uint16_t b) { return std::max(a, b); });
  each_lane(t, "v_min_i16", [](int16_t a, int16_t b) { return std::min(a, b); });
  each_lane(t, "v_max_i16", [](int16_t a, int16_t b) { return std::max(a, b); });
}

// v_bitop3_b32: bit (4 a + 2 b + c) of a table of truth values.
void bit_operation(Wave& w, const Instruction& in) {
  Lanes<uint32_t> buffers[3], results;
  const uint32_t* sources[3];
  for (int i = 0; i < 3; ++i) sources[i] = source<uint32_t>(w, in, in.operand[1 + i], i, buffers[i].x);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t result = 0;
    for (int entry = 0; entry < 8; ++entry) {
      const uint32_t a = entry & 4 ? sources[0][lane] : ~sources[0][lane], b = entry & 2 ? sources[1][lane] : ~sources[1][lane],
                     c = entry & 1 ? sources[2][lane] : ~sources[2][lane];
      if (in.truth >> entry & 1) result |= a & b & c;
    }
    results.x[lane] = result;
  }
  write(w, in, in.operand[0], results.x);
}

}  // namespace

void add_vector_integer(Table& t) {
  add_arithmetic(t);
  add_bits(t);
  add_sixteen_bits(t);
  t.add("v_bitop3_b32", {bit_operation, {Type::b32, Type::b32, Type::b32, Type::b32}, kTruth});
}

}  // namespace amd
