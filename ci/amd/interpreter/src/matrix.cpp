// MFMA: one matrix product a wave. Layouts are those of AMD's CDNA3 instruction set guide, chapter "Matrix Arithmetic Instructions"; EXEC
// means nothing to them, and gfx942 keeps subnormals. How the hardware orders and rounds its sums is not written down: here products are
// exact in binary64, added to C in binary64 with k ascending, and each element is rounded to binary32 once.
#include "vector.h"

namespace amd {
namespace {

constexpr int kRun = 4;  // neighbouring k in the two registers of a lane of A or B, and neighbouring rows in four registers of C or D

double bfloat16_at(const Wave& w, const Operand& operand, int lane, int item) {
  const uint32_t word = w.v[operand.number + item / 2][lane];
  return bits_as<float>(item % 2 != 0 ? word & 0xFFFF0000u : word << 16);
}

// D = A B + C with A [side, depth] and B [depth, side] of bfloat16 and C, D [side, side] of binary32.
template <int side, int depth>
void multiply(Wave& w, const Instruction& in) {
  constexpr int groups = kLanes / side;  // of lanes, which split k in A and B, and rows in C and D
  static_assert(depth == kRun * groups);
  for (int place : {1, 2})
    if (in.operand[place].place != Place::vector) fail(in, "a matrix outside of vector registers");
  double a[side][depth], b[depth][side];
  for (int i = 0; i < side; ++i)
    for (int k = 0; k < depth; ++k) {
      const int lane = i + side * (k / kRun);
      a[i][k] = bfloat16_at(w, in.operand[1], lane, k % kRun);
      b[k][i] = bfloat16_at(w, in.operand[2], lane, k % kRun);
    }
  const Operand& added = in.operand[3];
  float result[side][side];
  for (int i = 0; i < side; ++i) {
    const int number = kRun * (i / (kRun * groups)) + i % kRun, first = side * (i / kRun % groups);
    double row[side];
    for (int j = 0; j < side; ++j)
      row[j] = added.place == Place::vector ? bits_as<float>(w.v[added.number + number][first + j]) : uniform<float>(w, added);
    for (int k = 0; k < depth; ++k)
      for (int j = 0; j < side; ++j) row[j] += a[i][k] * b[k][j];
    for (int j = 0; j < side; ++j) result[i][j] = static_cast<float>(row[j]);
  }
  for (int i = 0; i < side; ++i) {
    const int number = kRun * (i / (kRun * groups)) + i % kRun, first = side * (i / kRun % groups);
    memcpy(&w.v[in.operand[0].number + number][first], result[i], sizeof result[i]);
  }
}

template <int side, int depth>
void add(Table& t, const char* mnemonic) {
  t.add(mnemonic, {multiply<side, depth>, {Type::f32, Type::b32, Type::b32, Type::f32}});
}

}  // namespace

void add_matrix(Table& t) {
  add<32, 8>(t, "v_mfma_f32_32x32x8_bf16");
  add<16, 16>(t, "v_mfma_f32_16x16x16_bf16");
}

}  // namespace amd
