// Checked access to the workgroup's local memory.
#pragma once

#include "machine.h"

namespace amd {

void read_lds(Wave& w, const Instruction& in, uint32_t address, void* to, uint32_t bytes);
void write_lds(Wave& w, const Instruction& in, uint32_t address, const void* from, uint32_t bytes);

}  // namespace amd
