#include "vector.h"

namespace amd {

int dpp_source(const Instruction& in, int lane, uint64_t exec) {
  const int row = lane & ~15, within = lane & 15, argument = in.dpp_argument;
  int from = -1;
  switch (in.dpp) {
    case Dpp::none:
      return lane;
    case Dpp::quad_perm:
      from = (lane & ~3) | (argument >> (2 * (lane & 3)) & 3);
      break;
    case Dpp::row_shl:
      from = within + argument < 16 ? lane + argument : -1;
      break;
    case Dpp::row_shr:
      from = within >= argument ? lane - argument : -1;
      break;
    case Dpp::row_ror:
      from = row | ((within - argument) & 15);
      break;
    case Dpp::wave_shl:
      from = lane < kLanes - 1 ? lane + 1 : -1;
      break;
    case Dpp::wave_rol:
      from = (lane + 1) & (kLanes - 1);
      break;
    case Dpp::wave_shr:
      from = lane - 1;
      break;
    case Dpp::wave_ror:
      from = (lane - 1) & (kLanes - 1);
      break;
    case Dpp::row_mirror:
      from = row | (15 - within);
      break;
    case Dpp::row_half_mirror:
      from = (lane & ~7) | (7 - (lane & 7));
      break;
    case Dpp::row_bcast15:
      from = row - 1;
      break;
    case Dpp::row_bcast31:
      from = lane >= 32 ? 31 : -1;
      break;
    case Dpp::row_newbcast:
      from = row | argument;
      break;
  }
  return from >= 0 && exec >> from & 1 ? from : -1;
}

void write_part(Wave& w, const Instruction& in, const Operand& operand, const uint32_t* words, uint64_t mask) {
  const bool byte = operand.part >= Part::byte0;
  const int shift = byte ? 8 * (static_cast<int>(operand.part) - static_cast<int>(Part::byte0)) : operand.part == Part::word1 ? 16 : 0;
  const uint32_t field = (byte ? 0xFFu : 0xFFFFu) << shift;
  Lanes<uint32_t> merged;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t placed = words[lane] << shift & field;
    uint32_t rest = 0;
    if (in.keep_unused) rest = w.v[operand.number][lane] & ~field;
    if (operand.extend) {  // the sign above, zeros below
      const int top = shift + (byte ? 8 : 16);
      if (top < 32 && placed >> (top - 1) & 1) rest = ~0u << top;
    }
    merged.x[lane] = placed | rest;
  }
  write_words(w, operand.number, merged.x, mask);
}

void finish(const Instruction& in, float* values) {
  for (int lane = 0; lane < kLanes; ++lane) {
    float value = values[lane] * in.output_scale;
    if (in.modifiers & kClamp) value = value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f;
    values[lane] = value;
  }
}

}  // namespace amd
