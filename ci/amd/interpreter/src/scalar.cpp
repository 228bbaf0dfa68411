// SOP1, SOP2, SOPC and SOPK: arithmetic on scalar registers.
#include "scalar.h"

#include <algorithm>

namespace amd {
namespace {

// The result alone.
template <typename F>
void plain(Table& table, const std::string& mnemonic, F) {
  using S = Signature<F>;
  table.add(mnemonic, {[](Wave& w, const Instruction& in) { write_scalar(w, in.operand[0], scalar_call<F, 1>(w, in)); },
                       types_of<F>(static_cast<typename S::Arguments*>(nullptr))});
}

// SCC = the result is not zero.
template <typename F>
void nonzero(Table& table, const std::string& mnemonic, F) {
  using S = Signature<F>;
  table.add(mnemonic, {[](Wave& w, const Instruction& in) {
                         const auto result = scalar_call<F, 1>(w, in);
                         write_scalar(w, in.operand[0], result);
                         w.scc = result != 0;
                       },
                       types_of<F>(static_cast<typename S::Arguments*>(nullptr))});
}

// The function gets SCC as its last argument and returns the result and the new SCC.
template <typename F>
void flagged(Table& table, const std::string& mnemonic, F) {
  table.add(mnemonic, {[](Wave& w, const Instruction& in) {
                         const std::pair<uint32_t, bool> result =
                             F{}(uniform<uint32_t>(w, in.operand[1]), uniform<uint32_t>(w, in.operand[2]), w.scc);
                         write_scalar(w, in.operand[0], result.first);
                         w.scc = result.second;
                       },
                       {Type::b32, Type::b32, Type::b32}});
}

template <typename F>
void compare(Table& table, const std::string& mnemonic, F) {
  using S = Signature<F>;
  auto types = types_of<F>(static_cast<typename S::Arguments*>(nullptr));
  types.erase(types.begin());
  table.add(mnemonic, {[](Wave& w, const Instruction& in) { w.scc = scalar_call<F, 0>(w, in); }, types});
}

template <typename F>
void save_exec(Table& table, const std::string& mnemonic, F) {
  table.add(mnemonic, {[](Wave& w, const Instruction& in) {
                         const uint64_t mask = uniform<uint64_t>(w, in.operand[1]), before = w.exec();
                         write_scalar(w, in.operand[0], before);
                         w.set_pair(kExec, F{}(mask, before));
                         w.scc = w.exec() != 0;
                       },
                       {Type::b64, Type::b64}});
}

template <typename F>
void write_exec(Table& table, const std::string& mnemonic, F) {
  table.add(mnemonic, {[](Wave& w, const Instruction& in) {
                         const uint64_t mask = F{}(uniform<uint64_t>(w, in.operand[1]), w.exec());
                         w.set_pair(kExec, mask);
                         write_scalar(w, in.operand[0], mask);
                         w.scc = mask != 0;
                       },
                       {Type::b64, Type::b64}});
}

template <typename T>
T field_mask(uint32_t width) {
  return width >= 8 * sizeof(T) ? ~T{0} : static_cast<T>((T{1} << width) - 1);
}

template <typename Unsigned, typename Signed, bool is_signed>
Unsigned bit_field(Unsigned value, uint32_t field) {
  const uint32_t offset = field & (8 * sizeof(Unsigned) - 1), width = std::min<uint32_t>(field >> 16 & 0x7F, 8 * sizeof(Unsigned));
  const Unsigned bits = static_cast<Unsigned>((value >> offset) & field_mask<Unsigned>(width));
  if (!is_signed || width == 0 || width == 8 * sizeof(Unsigned)) return bits;
  return bits >> (width - 1) & 1 ? static_cast<Unsigned>(bits | ~field_mask<Unsigned>(width)) : bits;
}

void add_moves(Table& t) {
  plain(t, "s_mov_b32", [](uint32_t a) { return a; });
  plain(t, "s_mov_b64", [](uint64_t a) { return a; });
  plain(t, "s_movk_i32", [](uint32_t a) { return static_cast<uint32_t>(static_cast<int16_t>(a)); });
  t.add("s_cmov_b32", {[](Wave& w, const Instruction& in) {
                         if (w.scc) write_scalar(w, in.operand[0], uniform<uint32_t>(w, in.operand[1]));
                       },
                       {Type::b32, Type::b32}});
  t.add("s_cmov_b64", {[](Wave& w, const Instruction& in) {
                         if (w.scc) write_scalar(w, in.operand[0], uniform<uint64_t>(w, in.operand[1]));
                       },
                       {Type::b64, Type::b64}});
  t.add("s_cmovk_i32", {[](Wave& w, const Instruction& in) {
                          if (w.scc) w.s[in.operand[0].number] = static_cast<int16_t>(in.operand[1].value);
                        },
                        {Type::b32, Type::b32}});
  t.add("s_cselect_b32",
        {[](Wave& w, const Instruction& in) { write_scalar(w, in.operand[0], uniform<uint32_t>(w, in.operand[w.scc ? 1 : 2])); },
         {Type::b32, Type::b32, Type::b32}});
  t.add("s_cselect_b64",
        {[](Wave& w, const Instruction& in) { write_scalar(w, in.operand[0], uniform<uint64_t>(w, in.operand[w.scc ? 1 : 2])); },
         {Type::b64, Type::b64, Type::b64}});
}

void add_arithmetic(Table& t) {
  using Flagged = std::pair<uint32_t, bool>;
  flagged(t, "s_add_u32", [](uint32_t a, uint32_t b, bool) { return Flagged(a + b, a + b < a); });
  flagged(t, "s_addc_u32", [](uint32_t a, uint32_t b, bool carry) {
    const uint64_t sum = uint64_t{a} + b + carry;
    return Flagged(static_cast<uint32_t>(sum), sum >> 32 != 0);
  });
  flagged(t, "s_sub_u32", [](uint32_t a, uint32_t b, bool) { return Flagged(a - b, b > a); });
  flagged(t, "s_subb_u32", [](uint32_t a, uint32_t b, bool borrow) { return Flagged(a - b - borrow, uint64_t{b} + borrow > a); });
  flagged(t, "s_add_i32", [](uint32_t a, uint32_t b, bool) { return Flagged(a + b, ((a ^ (a + b)) & (b ^ (a + b))) >> 31); });
  flagged(t, "s_sub_i32", [](uint32_t a, uint32_t b, bool) { return Flagged(a - b, ((a ^ b) & (a ^ (a - b))) >> 31); });
  flagged(t, "s_min_i32", [](uint32_t a, uint32_t b, bool) { return int32_t(a) < int32_t(b) ? Flagged(a, true) : Flagged(b, false); });
  flagged(t, "s_max_i32", [](uint32_t a, uint32_t b, bool) { return int32_t(a) > int32_t(b) ? Flagged(a, true) : Flagged(b, false); });
  flagged(t, "s_min_u32", [](uint32_t a, uint32_t b, bool) { return a < b ? Flagged(a, true) : Flagged(b, false); });
  flagged(t, "s_max_u32", [](uint32_t a, uint32_t b, bool) { return a > b ? Flagged(a, true) : Flagged(b, false); });
  const auto shift_add = [](uint32_t a, uint32_t b, int shift) {
    const uint64_t sum = (uint64_t{a} << shift) + b;
    return Flagged(static_cast<uint32_t>(sum), sum >> 32 != 0);
  };
  static constexpr auto shifted = decltype(shift_add){};
  flagged(t, "s_lshl1_add_u32", [](uint32_t a, uint32_t b, bool) { return shifted(a, b, 1); });
  flagged(t, "s_lshl2_add_u32", [](uint32_t a, uint32_t b, bool) { return shifted(a, b, 2); });
  flagged(t, "s_lshl3_add_u32", [](uint32_t a, uint32_t b, bool) { return shifted(a, b, 3); });
  flagged(t, "s_lshl4_add_u32", [](uint32_t a, uint32_t b, bool) { return shifted(a, b, 4); });
  plain(t, "s_mul_i32", [](uint32_t a, uint32_t b) { return a * b; });
  plain(t, "s_mul_hi_u32", [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); });
  plain(t, "s_mul_hi_i32", [](int32_t a, int32_t b) { return static_cast<uint32_t>(int64_t{a} * b >> 32); });
  nonzero(t, "s_abs_i32", [](uint32_t a) { return a >> 31 ? 0u - a : a; });
  nonzero(t, "s_absdiff_i32", [](int32_t a, int32_t b) { return static_cast<uint32_t>(a > b ? int64_t{a} - b : int64_t{b} - a); });
  plain(t, "s_sext_i32_i8", [](uint32_t a) { return static_cast<uint32_t>(static_cast<int8_t>(a)); });
  plain(t, "s_sext_i32_i16", [](uint32_t a) { return static_cast<uint32_t>(static_cast<int16_t>(a)); });
  t.add("s_addk_i32", {[](Wave& w, const Instruction& in) {
                         uint32_t& to = w.s[in.operand[0].number];
                         const uint32_t a = to, b = static_cast<int16_t>(in.operand[1].value);
                         to = a + b;
                         w.scc = ((a ^ to) & (b ^ to)) >> 31;
                       },
                       {Type::b32, Type::b32}});
  t.add("s_mulk_i32", {[](Wave& w, const Instruction& in) {
                         w.s[in.operand[0].number] *= static_cast<uint32_t>(static_cast<int16_t>(in.operand[1].value));
                       },
                       {Type::b32, Type::b32}});
}

void add_bits(Table& t) {
  nonzero(t, "s_and_b32", [](uint32_t a, uint32_t b) { return a & b; });
  nonzero(t, "s_and_b64", [](uint64_t a, uint64_t b) { return a & b; });
  nonzero(t, "s_or_b32", [](uint32_t a, uint32_t b) { return a | b; });
  nonzero(t, "s_or_b64", [](uint64_t a, uint64_t b) { return a | b; });
  nonzero(t, "s_xor_b32", [](uint32_t a, uint32_t b) { return a ^ b; });
  nonzero(t, "s_xor_b64", [](uint64_t a, uint64_t b) { return a ^ b; });
  nonzero(t, "s_andn2_b32", [](uint32_t a, uint32_t b) { return a & ~b; });
  nonzero(t, "s_andn2_b64", [](uint64_t a, uint64_t b) { return a & ~b; });
  nonzero(t, "s_orn2_b32", [](uint32_t a, uint32_t b) { return a | ~b; });
  nonzero(t, "s_orn2_b64", [](uint64_t a, uint64_t b) { return a | ~b; });
  nonzero(t, "s_nand_b32", [](uint32_t a, uint32_t b) { return ~(a & b); });
  nonzero(t, "s_nand_b64", [](uint64_t a, uint64_t b) { return ~(a & b); });
  nonzero(t, "s_nor_b32", [](uint32_t a, uint32_t b) { return ~(a | b); });
  nonzero(t, "s_nor_b64", [](uint64_t a, uint64_t b) { return ~(a | b); });
  nonzero(t, "s_xnor_b32", [](uint32_t a, uint32_t b) { return ~(a ^ b); });
  nonzero(t, "s_xnor_b64", [](uint64_t a, uint64_t b) { return ~(a ^ b); });
  nonzero(t, "s_not_b32", [](uint32_t a) { return ~a; });
  nonzero(t, "s_not_b64", [](uint64_t a) { return ~a; });
  nonzero(t, "s_lshl_b32", [](uint32_t a, uint32_t b) { return a << (b & 31); });
  nonzero(t, "s_lshl_b64", [](uint64_t a, uint32_t b) { return a << (b & 63); });
  nonzero(t, "s_lshr_b32", [](uint32_t a, uint32_t b) { return a >> (b & 31); });
  nonzero(t, "s_lshr_b64", [](uint64_t a, uint32_t b) { return a >> (b & 63); });
  nonzero(t, "s_ashr_i32", [](int32_t a, uint32_t b) { return a >> (b & 31); });
  nonzero(t, "s_ashr_i64", [](int64_t a, uint32_t b) { return a >> (b & 63); });
  nonzero(t, "s_bfe_u32", [](uint32_t a, uint32_t b) { return bit_field<uint32_t, int32_t, false>(a, b); });
  nonzero(t, "s_bfe_i32", [](uint32_t a, uint32_t b) { return bit_field<uint32_t, int32_t, true>(a, b); });
  nonzero(t, "s_bfe_u64", [](uint64_t a, uint32_t b) { return bit_field<uint64_t, int64_t, false>(a, b); });
  nonzero(t, "s_bfe_i64", [](uint64_t a, uint32_t b) { return bit_field<uint64_t, int64_t, true>(a, b); });
  plain(t, "s_bfm_b32", [](uint32_t a, uint32_t b) { return ((1u << (a & 31)) - 1) << (b & 31); });
  plain(t, "s_bfm_b64", [](uint32_t a, uint32_t b) { return ((uint64_t{1} << (a & 63)) - 1) << (b & 63); });
  plain(t, "s_brev_b32", [](uint32_t a) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
    return reversed;
  });
  plain(t, "s_brev_b64", [](uint64_t a) {
    uint64_t reversed = 0;
    for (int i = 0; i < 64; ++i) reversed |= (a >> i & 1u) << (63 - i);
    return reversed;
  });
  nonzero(t, "s_bcnt0_i32_b32", [](uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(~a)); });
  nonzero(t, "s_bcnt0_i32_b64", [](uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(~a)); });
  nonzero(t, "s_bcnt1_i32_b32", [](uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); });
  nonzero(t, "s_bcnt1_i32_b64", [](uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(a)); });
  plain(t, "s_ff1_i32_b32", [](uint32_t a) { return a ? static_cast<uint32_t>(__builtin_ctz(a)) : ~0u; });
  plain(t, "s_ff1_i32_b64", [](uint64_t a) { return a ? static_cast<uint32_t>(__builtin_ctzll(a)) : ~0u; });
  plain(t, "s_ff0_i32_b32", [](uint32_t a) { return ~a ? static_cast<uint32_t>(__builtin_ctz(~a)) : ~0u; });
  plain(t, "s_ff0_i32_b64", [](uint64_t a) { return ~a ? static_cast<uint32_t>(__builtin_ctzll(~a)) : ~0u; });
  plain(t, "s_flbit_i32_b32", [](uint32_t a) { return a ? static_cast<uint32_t>(__builtin_clz(a)) : ~0u; });
  plain(t, "s_flbit_i32_b64", [](uint64_t a) { return a ? static_cast<uint32_t>(__builtin_clzll(a)) : ~0u; });
  plain(t, "s_flbit_i32", [](int32_t a) {
    const uint32_t magnitude = a < 0 ? ~a : a;
    return magnitude ? static_cast<uint32_t>(__builtin_clz(magnitude)) : ~0u;
  });
  plain(t, "s_pack_ll_b32_b16", [](uint32_t a, uint32_t b) { return (a & 0xFFFF) | b << 16; });
  plain(t, "s_pack_lh_b32_b16", [](uint32_t a, uint32_t b) { return (a & 0xFFFF) | (b & 0xFFFF0000u); });
  plain(t, "s_pack_hh_b32_b16", [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xFFFF0000u); });
  t.add("s_bitset0_b32",
        {[](Wave& w, const Instruction& in) { w.s[in.operand[0].number] &= ~(1u << (uniform<uint32_t>(w, in.operand[1]) & 31)); },
         {Type::b32, Type::b32}});
  t.add("s_bitset1_b32",
        {[](Wave& w, const Instruction& in) { w.s[in.operand[0].number] |= 1u << (uniform<uint32_t>(w, in.operand[1]) & 31); },
         {Type::b32, Type::b32}});
}

void add_masks(Table& t) {
  save_exec(t, "s_and_saveexec_b64", [](uint64_t s, uint64_t exec) { return s & exec; });
  save_exec(t, "s_or_saveexec_b64", [](uint64_t s, uint64_t exec) { return s | exec; });
  save_exec(t, "s_xor_saveexec_b64", [](uint64_t s, uint64_t exec) { return s ^ exec; });
  save_exec(t, "s_andn2_saveexec_b64", [](uint64_t s, uint64_t exec) { return s & ~exec; });
  save_exec(t, "s_orn2_saveexec_b64", [](uint64_t s, uint64_t exec) { return s | ~exec; });
  save_exec(t, "s_nand_saveexec_b64", [](uint64_t s, uint64_t exec) { return ~(s & exec); });
  save_exec(t, "s_nor_saveexec_b64", [](uint64_t s, uint64_t exec) { return ~(s | exec); });
  save_exec(t, "s_xnor_saveexec_b64", [](uint64_t s, uint64_t exec) { return ~(s ^ exec); });
  save_exec(t, "s_andn1_saveexec_b64", [](uint64_t s, uint64_t exec) { return ~s & exec; });
  save_exec(t, "s_orn1_saveexec_b64", [](uint64_t s, uint64_t exec) { return ~s | exec; });
  write_exec(t, "s_andn1_wrexec_b64", [](uint64_t s, uint64_t exec) { return ~s & exec; });
  write_exec(t, "s_andn2_wrexec_b64", [](uint64_t s, uint64_t exec) { return s & ~exec; });
}

void add_comparisons(Table& t) {
  compare(t, "s_cmp_eq_i32", [](uint32_t a, uint32_t b) { return a == b; });
  compare(t, "s_cmp_lg_i32", [](uint32_t a, uint32_t b) { return a != b; });
  compare(t, "s_cmp_gt_i32", [](int32_t a, int32_t b) { return a > b; });
  compare(t, "s_cmp_ge_i32", [](int32_t a, int32_t b) { return a >= b; });
  compare(t, "s_cmp_lt_i32", [](int32_t a, int32_t b) { return a < b; });
  compare(t, "s_cmp_le_i32", [](int32_t a, int32_t b) { return a <= b; });
  compare(t, "s_cmp_eq_u32", [](uint32_t a, uint32_t b) { return a == b; });
  compare(t, "s_cmp_lg_u32", [](uint32_t a, uint32_t b) { return a != b; });
  compare(t, "s_cmp_gt_u32", [](uint32_t a, uint32_t b) { return a > b; });
  compare(t, "s_cmp_ge_u32", [](uint32_t a, uint32_t b) { return a >= b; });
  compare(t, "s_cmp_lt_u32", [](uint32_t a, uint32_t b) { return a < b; });
  compare(t, "s_cmp_le_u32", [](uint32_t a, uint32_t b) { return a <= b; });
  compare(t, "s_cmp_eq_u64", [](uint64_t a, uint64_t b) { return a == b; });
  compare(t, "s_cmp_lg_u64", [](uint64_t a, uint64_t b) { return a != b; });
  compare(t, "s_bitcmp0_b32", [](uint32_t a, uint32_t b) { return (a >> (b & 31) & 1) == 0; });
  compare(t, "s_bitcmp1_b32", [](uint32_t a, uint32_t b) { return (a >> (b & 31) & 1) == 1; });
  compare(t, "s_bitcmp0_b64", [](uint64_t a, uint32_t b) { return (a >> (b & 63) & 1) == 0; });
  compare(t, "s_bitcmp1_b64", [](uint64_t a, uint32_t b) { return (a >> (b & 63) & 1) == 1; });
  compare(t, "s_cmpk_eq_i32", [](int32_t a, int32_t b) { return a == static_cast<int16_t>(b); });
  compare(t, "s_cmpk_lg_i32", [](int32_t a, int32_t b) { return a != static_cast<int16_t>(b); });
  compare(t, "s_cmpk_gt_i32", [](int32_t a, int32_t b) { return a > static_cast<int16_t>(b); });
  compare(t, "s_cmpk_ge_i32", [](int32_t a, int32_t b) { return a >= static_cast<int16_t>(b); });
  compare(t, "s_cmpk_lt_i32", [](int32_t a, int32_t b) { return a < static_cast<int16_t>(b); });
  compare(t, "s_cmpk_le_i32", [](int32_t a, int32_t b) { return a <= static_cast<int16_t>(b); });
  compare(t, "s_cmpk_eq_u32", [](uint32_t a, uint32_t b) { return a == (b & 0xFFFF); });
  compare(t, "s_cmpk_lg_u32", [](uint32_t a, uint32_t b) { return a != (b & 0xFFFF); });
  compare(t, "s_cmpk_gt_u32", [](uint32_t a, uint32_t b) { return a > (b & 0xFFFF); });
  compare(t, "s_cmpk_ge_u32", [](uint32_t a, uint32_t b) { return a >= (b & 0xFFFF); });
  compare(t, "s_cmpk_lt_u32", [](uint32_t a, uint32_t b) { return a < (b & 0xFFFF); });
  compare(t, "s_cmpk_le_u32", [](uint32_t a, uint32_t b) { return a <= (b & 0xFFFF); });
}

}  // namespace

void add_scalar(Table& t) {
  add_moves(t);
  add_arithmetic(t);
  add_bits(t);
  add_masks(t);
  add_comparisons(t);
}

}  // namespace amd
