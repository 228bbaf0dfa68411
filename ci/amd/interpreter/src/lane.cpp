// Instructions that move values between lanes, apart from DPP and LDS.
#include "scalar.h"

namespace amd {
namespace {

void read_first_lane(Wave& w, const Instruction& in) {
  const int lane = w.exec() ? __builtin_ctzll(w.exec()) : 0;
  const Operand& from = in.operand[1];
  w.s[in.operand[0].number] = from.place == Place::vector ? w.v[from.number][lane] : uniform<uint32_t>(w, from);
}

void read_lane(Wave& w, const Instruction& in) {
  const uint32_t lane = uniform<uint32_t>(w, in.operand[2]) & (kLanes - 1);
  w.s[in.operand[0].number] = w.v[in.operand[1].number][lane];
}

void write_lane(Wave& w, const Instruction& in) {
  const uint32_t lane = uniform<uint32_t>(w, in.operand[2]) & (kLanes - 1);
  w.v[in.operand[0].number][lane] = uniform<uint32_t>(w, in.operand[1]);
}

// Bits of a mask below this lane, in its low or its high half, plus a number.
template <bool high>
void count_below(Wave& w, const Instruction& in) {
  Lanes<uint32_t> first, second, results;
  const uint32_t* masks = source<uint32_t>(w, in, in.operand[1], 0, first.x);
  const uint32_t* base = source<uint32_t>(w, in, in.operand[2], 1, second.x);
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t below = (uint64_t{1} << lane) - 1;
    results.x[lane] =
        static_cast<uint32_t>(__builtin_popcount(masks[lane] & static_cast<uint32_t>(high ? below >> 32 : below))) + base[lane];
  }
  write(w, in, in.operand[0], results.x);
}

// Odd rows of the first register against even rows of the second; a row has `row` lanes. EXEC must enable all of them.
template <int row>
void swap_rows(Wave& w, const Instruction& in) {
  if (w.exec() != ~uint64_t{0}) fail(in, "with lanes disabled");
  uint32_t* first = w.v[in.operand[0].number];
  uint32_t* second = w.v[in.operand[1].number];
  for (int start = 0; start < kLanes; start += 2 * row)
    for (int lane = 0; lane < row; ++lane) std::swap(first[start + row + lane], second[start + lane]);
}

void swap_registers(Wave& w, const Instruction& in) {
  Lanes<uint32_t> first, second;
  memcpy(first.x, w.v[in.operand[0].number], sizeof first);
  memcpy(second.x, w.v[in.operand[1].number], sizeof second);
  write_words(w, in.operand[0].number, second.x, w.exec());
  write_words(w, in.operand[1].number, first.x, w.exec());
}

}  // namespace

void add_lane(Table& t) {
  t.add("v_readfirstlane_b32", {read_first_lane, {Type::b32, Type::b32}});
  t.add("v_readlane_b32", {read_lane, {Type::b32, Type::b32, Type::b32}});
  t.add("v_writelane_b32", {write_lane, {Type::b32, Type::b32, Type::b32}});
  t.add("v_mbcnt_lo_u32_b32", {count_below<false>, {Type::b32, Type::b32, Type::b32}});
  t.add("v_mbcnt_hi_u32_b32", {count_below<true>, {Type::b32, Type::b32, Type::b32}});
  t.add("v_permlane16_swap_b32", {swap_rows<16>, {Type::b32, Type::b32}});
  t.add("v_permlane32_swap_b32", {swap_rows<32>, {Type::b32, Type::b32}});
  t.add("v_swap_b32", {swap_registers, {Type::b32, Type::b32}});
}

}  // namespace amd
