// Runs a kernel over a grid.
#pragma once

#include "program.h"

namespace amd {

struct Launch {
  uint32_t blocks[3] = {1, 1, 1}, threads[3] = {1, 1, 1};
  uint32_t dynamic_lds = 0;
  std::vector<uint8_t> kernarg;  // explicit arguments at their offsets; hidden ones are filled in by run()
};

struct Settings {
  uint64_t order_seed = 0;              // 0: workgroups and waves in ascending order; else a permutation of both
  uint64_t step_limit = 4000000000ull;  // instructions of one launch
};

Settings& settings();

struct Totals {
  uint64_t launches = 0, workgroups = 0, instructions = 0;
};

Totals& totals();

// Throws Fault with the instruction, its address, and the workgroup and wave that ran it.
void run(const Program& program, const Kernel& kernel, Launch launch);

}  // namespace amd
