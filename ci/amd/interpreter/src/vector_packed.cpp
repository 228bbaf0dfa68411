// VOP3P: two binary32 values in a pair of registers, or two 16-bit integers in one.
#include "float_rules.h"
#include "vector.h"

namespace amd {
namespace {

// The 32-bit word of a pair, and its sign, that `half` of the result reads.
const uint32_t* packed_source(const Wave& w, const Instruction& in, const Operand& operand, int place, int half, Lanes<uint32_t>& buffer) {
  const bool high = (half ? in.select_high : in.select) >> place & 1;
  const bool negate = (half ? in.negate_high : in.negate_low) >> place & 1;
  const uint32_t sign = negate ? 0x80000000u : 0u;
  if (operand.place == Place::vector) {
    const uint32_t* from = w.v[operand.number + high];
    if (!negate) return from;
    for (int lane = 0; lane < kLanes; ++lane) buffer.x[lane] = from[lane] ^ sign;
    return buffer.x;
  }
  // What the high half of an inline constant holds is not written down; compilers select the low one for both.
  if (operand.place == Place::constant && high) fail(in, "the high half of a constant");
  const uint32_t value = (operand.place == Place::scalar ? w.s[operand.number + high] : static_cast<uint32_t>(operand.value)) ^ sign;
  for (int lane = 0; lane < kLanes; ++lane) buffer.x[lane] = value;
  return buffer.x;
}

template <typename F, int sources>
void run_packed(Wave& w, const Instruction& in) {
  Lanes<float> results[2];
  for (int half = 0; half < 2; ++half) {
    Lanes<uint32_t> buffers[3];
    const float* from[3] = {};
    for (int i = 0; i < sources; ++i)
      from[i] = reinterpret_cast<const float*>(packed_source(w, in, in.operand[1 + i], i, half, buffers[i]));
    for (int lane = 0; lane < kLanes; ++lane) {
      if constexpr (sources == 3)
        results[half].x[lane] = F{}(from[0][lane], from[1][lane], from[2][lane]);
      else
        results[half].x[lane] = F{}(from[0][lane], from[1][lane]);
    }
    if (in.modifiers & kClamp) finish(in, results[half].x);
  }
  for (int half = 0; half < 2; ++half)
    write_words(w, in.operand[0].number + half, reinterpret_cast<const uint32_t*>(results[half].x), w.exec());
}

template <typename F>
void packed(Table& table, const std::string& mnemonic, F) {
  constexpr int sources = Signature<F>::count;
  std::vector<Type> types(1 + sources, Type::f32);
  table.add(mnemonic, {run_packed<F, sources>, types, kSelect | kClamp});
}

// The 16 bits of each lane that `half` of the result reads.
void packed_integers(const Wave& w, const Instruction& in, int place, int half, uint16_t* values) {
  const Operand& operand = in.operand[1 + place];
  const bool high = (half ? in.select_high : in.select) >> place & 1;
  if (operand.place == Place::constant && high) fail(in, "the high half of a constant");
  Lanes<uint32_t> buffer;
  const uint32_t* words = source<uint32_t>(w, in, operand, place, buffer.x);
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = static_cast<uint16_t>(words[lane] >> (high ? 16 : 0));
}

template <typename F, int sources>
void run_packed_integers(Wave& w, const Instruction& in) {
  Lanes<uint32_t> results;
  for (int half = 0; half < 2; ++half) {
    Lanes<uint16_t> from[3];
    for (int i = 0; i < sources; ++i) packed_integers(w, in, i, half, from[i].x);
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t result = 0;
      if constexpr (sources == 3)
        result = static_cast<uint16_t>(F{}(from[0].x[lane], from[1].x[lane], from[2].x[lane]));
      else
        result = static_cast<uint16_t>(F{}(from[0].x[lane], from[1].x[lane]));
      results.x[lane] = half ? results.x[lane] | result << 16 : result;
    }
  }
  write_words(w, in.operand[0].number, results.x, w.exec());
}

template <typename F>
void packed_integer(Table& table, const std::string& mnemonic, F) {
  constexpr int sources = Signature<F>::count;
  table.add(mnemonic, {run_packed_integers<F, sources>, std::vector<Type>(1 + sources, Type::b32), kSelect});
}

// v_pk_mov_b32: op_sel says which word of the first source becomes the low one, and which of the second the high one.
void packed_move(Wave& w, const Instruction& in) {
  Lanes<uint32_t> words[2];
  for (int half = 0; half < 2; ++half) {
    const Operand& operand = in.operand[1 + half];
    const bool high = in.select >> half & 1;
    for (int lane = 0; lane < kLanes; ++lane)
      words[half].x[lane] = operand.place == Place::vector   ? w.v[operand.number + high][lane]
                            : operand.place == Place::scalar ? w.s[operand.number + high]
                                                             : static_cast<uint32_t>(operand.value);
  }
  for (int half = 0; half < 2; ++half) write_words(w, in.operand[0].number + half, words[half].x, w.exec());
}

}  // namespace

void add_vector_packed(Table& t) {
  packed(t, "v_pk_add_f32", [](float a, float b) { return a + b; });
  packed(t, "v_pk_mul_f32", [](float a, float b) { return a * b; });
  packed(t, "v_pk_fma_f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  packed_integer(t, "v_pk_add_u16", [](uint32_t a, uint32_t b) { return a + b; });
  packed_integer(t, "v_pk_sub_u16", [](uint32_t a, uint32_t b) { return a - b; });
  packed_integer(t, "v_pk_mul_lo_u16", [](uint32_t a, uint32_t b) { return a * b; });
  packed_integer(t, "v_pk_mad_u16", [](uint32_t a, uint32_t b, uint32_t c) { return a * b + c; });
  packed_integer(t, "v_pk_lshlrev_b16", [](uint32_t a, uint32_t b) { return b << (a & 15); });
  packed_integer(t, "v_pk_lshrrev_b16", [](uint32_t a, uint32_t b) { return b >> (a & 15); });
  packed_integer(t, "v_pk_max_u16", [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  packed_integer(t, "v_pk_min_u16", [](uint32_t a, uint32_t b) { return a < b ? a : b; });
  packed_integer(t, "v_pk_max_i16", [](int16_t a, int16_t b) { return a > b ? a : b; });
  packed_integer(t, "v_pk_min_i16", [](int16_t a, int16_t b) { return a < b ? a : b; });
  packed_integer(t, "v_pk_ashrrev_i16", [](uint16_t a, int16_t b) { return b >> (a & 15); });
  t.add("v_pk_mov_b32", {packed_move, {Type::b64, Type::b32, Type::b32}, kSelect});
}

}  // namespace amd
