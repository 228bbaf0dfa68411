// VOPC: comparisons that write a mask.
#include <cmath>

#include "scalar.h"

namespace amd {
namespace {

template <typename F>
void run_compare(Wave& w, const Instruction& in) {
  alignas(64) uint8_t flags[kLanes];
  Lanes<bool> results;
  apply<F>(w, in, results.x);
  for (int lane = 0; lane < kLanes; ++lane) flags[lane] = results.x[lane];
  write_scalar(w, in.operand[0], mask_of(flags) & w.exec());
}

// v_cmpx: the mask becomes EXEC as well.
template <typename F>
void run_compare_exec(Wave& w, const Instruction& in) {
  run_compare<F>(w, in);
  w.set_pair(kExec, w.pair(in.operand[0].number));
}

template <typename F>
void compare(Table& table, const std::string& name, F) {
  auto types = types_of<F>(static_cast<typename Signature<F>::Arguments*>(nullptr));
  types[0] = Type::b64;
  table.add("v_cmp_" + name, {run_compare<F>, types, kSdwa | kInputs});
  table.add("v_cmpx_" + name, {run_compare_exec<F>, types, kSdwa | kInputs});
}

template <typename T>
void compare_integers(Table& t, const std::string& type) {
  compare(t, "lt_" + type, [](T a, T b) { return a < b; });
  compare(t, "eq_" + type, [](T a, T b) { return a == b; });
  compare(t, "le_" + type, [](T a, T b) { return a <= b; });
  compare(t, "gt_" + type, [](T a, T b) { return a > b; });
  compare(t, "ne_" + type, [](T a, T b) { return a != b; });
  compare(t, "ge_" + type, [](T a, T b) { return a >= b; });
}

template <typename T>
auto number(T value) {
  if constexpr (std::is_same_v<T, Half>)
    return to_float(value);
  else
    return value;
}

enum Class : uint32_t {
  kSignalling = 1,
  kQuiet = 2,
  kNegativeInfinity = 4,
  kNegativeNormal = 8,
  kNegativeSubnormal = 16,
  kNegativeZero = 32,
  kPositiveZero = 64,
  kPositiveSubnormal = 128,
  kPositiveNormal = 256,
  kPositiveInfinity = 512
};

uint32_t class_of(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7FFFFFFFu;
  const bool negative = bits >> 31;
  if (magnitude > 0x7F800000u) return magnitude & 0x00400000u ? kQuiet : kSignalling;
  if (magnitude == 0x7F800000u) return negative ? kNegativeInfinity : kPositiveInfinity;
  if (magnitude >= 0x00800000u) return negative ? kNegativeNormal : kPositiveNormal;
  if (magnitude != 0) return negative ? kNegativeSubnormal : kPositiveSubnormal;
  return negative ? kNegativeZero : kPositiveZero;
}

template <typename T>
void compare_floats(Table& t, const std::string& type) {
  compare(t, "lt_" + type, [](T a, T b) { return number(a) < number(b); });
  compare(t, "eq_" + type, [](T a, T b) { return number(a) == number(b); });
  compare(t, "le_" + type, [](T a, T b) { return number(a) <= number(b); });
  compare(t, "gt_" + type, [](T a, T b) { return number(a) > number(b); });
  compare(t, "lg_" + type, [](T a, T b) { return number(a) < number(b) || number(a) > number(b); });
  compare(t, "ge_" + type, [](T a, T b) { return number(a) >= number(b); });
  compare(t, "o_" + type, [](T a, T b) { return number(a) == number(a) && number(b) == number(b); });
  compare(t, "u_" + type, [](T a, T b) { return number(a) != number(a) || number(b) != number(b); });
  compare(t, "nge_" + type, [](T a, T b) { return !(number(a) >= number(b)); });
  compare(t, "nlg_" + type, [](T a, T b) { return !(number(a) < number(b) || number(a) > number(b)); });
  compare(t, "ngt_" + type, [](T a, T b) { return !(number(a) > number(b)); });
  compare(t, "nle_" + type, [](T a, T b) { return !(number(a) <= number(b)); });
  compare(t, "neq_" + type, [](T a, T b) { return number(a) != number(b); });
  compare(t, "nlt_" + type, [](T a, T b) { return !(number(a) < number(b)); });
}

}  // namespace

void add_vector_compare(Table& t) {
  compare_integers<int32_t>(t, "i32");
  compare_integers<uint32_t>(t, "u32");
  compare_integers<int64_t>(t, "i64");
  compare_integers<uint64_t>(t, "u64");
  compare_integers<int16_t>(t, "i16");
  compare_integers<uint16_t>(t, "u16");
  compare_floats<float>(t, "f32");
  compare_floats<double>(t, "f64");
  compare_floats<Half>(t, "f16");
  compare(t, "class_f32", [](float a, uint32_t classes) { return (class_of(a) & classes) != 0; });
}

}  // namespace amd
