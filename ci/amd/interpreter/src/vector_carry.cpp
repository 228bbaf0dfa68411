// Integer operations that give or take a mask: carries, 64-bit products, selection.
#include "scalar.h"

namespace amd {
namespace {

// F gives (result, carry) of two values and a carry in. Operands: result, carries out, values, carries in.
template <typename F, bool carry_in>
void run_carry(Wave& w, const Instruction& in) {
  Lanes<uint32_t> first, second, results;
  const uint32_t* a = source<uint32_t>(w, in, in.operand[2], 0, first.x);
  const uint32_t* b = source<uint32_t>(w, in, in.operand[3], 1, second.x);
  const uint64_t carries = carry_in ? uniform<uint64_t>(w, in.operand[4]) : 0;
  alignas(64) uint8_t out[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const std::pair<uint32_t, bool> result = F{}(a[lane], b[lane], static_cast<uint32_t>(carries >> lane & 1));
    results.x[lane] = result.first;
    out[lane] = result.second;
  }
  write_scalar(w, in.operand[1], mask_of(out) & w.exec());
  write(w, in, in.operand[0], results.x);
}

template <typename F>
void carry(Table& table, const std::string& mnemonic, F) {
  table.add(mnemonic, {run_carry<F, false>, {Type::b32, Type::b64, Type::b32, Type::b32}, kDpp});
}

template <typename F>
void carry_on(Table& table, const std::string& mnemonic, F) {
  table.add(mnemonic, {run_carry<F, true>, {Type::b32, Type::b64, Type::b32, Type::b32, Type::b64}, kDpp});
}

// Operands: 64-bit result, carries out, two 32-bit factors, 64-bit addend.
template <typename Factor>
void multiply_add(Wave& w, const Instruction& in) {
  Lanes<Factor> first, second;
  Lanes<uint64_t> third, results;
  const Factor* a = source<Factor>(w, in, in.operand[2], 0, first.x);
  const Factor* b = source<Factor>(w, in, in.operand[3], 1, second.x);
  const uint64_t* c = source<uint64_t>(w, in, in.operand[4], 2, third.x);
  alignas(64) uint8_t out[kLanes];
  using Wide = std::conditional_t<std::is_signed_v<Factor>, int64_t, uint64_t>;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Wide product = static_cast<Wide>(a[lane]) * static_cast<Wide>(b[lane]);
    results.x[lane] = static_cast<uint64_t>(product) + c[lane];
    out[lane] =
        std::is_signed_v<Factor> ? __builtin_add_overflow_p(product, static_cast<Wide>(c[lane]), Wide{}) : results.x[lane] < c[lane];
  }
  write_scalar(w, in.operand[1], mask_of(out) & w.exec());
  write(w, in, in.operand[0], results.x);
}

// Operands: result, value where the mask's bit is 0, value where it is 1, mask.
void select(Wave& w, const Instruction& in) {
  Lanes<uint32_t> first, second, results;
  const uint32_t* zero = source<uint32_t>(w, in, in.operand[1], 0, first.x);
  const uint32_t* one = source<uint32_t>(w, in, in.operand[2], 1, second.x);
  const uint64_t mask = uniform<uint64_t>(w, in.operand[3]);
  const uint32_t halves[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
  for (int half = 0; half < 2; ++half)
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t chosen = 0u - (halves[half] >> lane & 1u);
      const int at = 32 * half + lane;
      results.x[at] = (one[at] & chosen) | (zero[at] & ~chosen);
    }
  write(w, in, in.operand[0], results.x);
}

}  // namespace

void add_vector_carry(Table& t) {
  using Carried = std::pair<uint32_t, bool>;
  carry(t, "v_add_co_u32", [](uint32_t a, uint32_t b, uint32_t) { return Carried(a + b, a + b < a); });
  carry(t, "v_sub_co_u32", [](uint32_t a, uint32_t b, uint32_t) { return Carried(a - b, b > a); });
  carry(t, "v_subrev_co_u32", [](uint32_t a, uint32_t b, uint32_t) { return Carried(b - a, a > b); });
  carry_on(t, "v_addc_co_u32", [](uint32_t a, uint32_t b, uint32_t c) {
    const uint64_t sum = uint64_t{a} + b + c;
    return Carried(static_cast<uint32_t>(sum), sum >> 32 != 0);
  });
  carry_on(t, "v_subb_co_u32", [](uint32_t a, uint32_t b, uint32_t c) { return Carried(a - b - c, uint64_t{b} + c > a); });
  carry_on(t, "v_subbrev_co_u32", [](uint32_t a, uint32_t b, uint32_t c) { return Carried(b - a - c, uint64_t{a} + c > b); });
  t.add("v_mad_u64_u32", {multiply_add<uint32_t>, {Type::b64, Type::b64, Type::b32, Type::b32, Type::b64}});
  t.add("v_mad_i64_i32", {multiply_add<int32_t>, {Type::b64, Type::b64, Type::b32, Type::b32, Type::i64}});
  t.add("v_cndmask_b32", {select, {Type::b32, Type::b32, Type::b32, Type::b64}, kDpp | kSdwa | kInputs});
}

}  // namespace amd
