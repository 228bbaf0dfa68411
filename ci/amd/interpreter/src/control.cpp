// What tests ask of the interpreter, beside HIP: the GPU that it plays, known memory, settings, and what it has run.
#include <cstring>

#include "float_rules.h"
#include "memory.h"
#include "runtime.h"

using amd::runtime;

extern "C" {

const amd::Program* amd_program(hipModule_t module);

// Returns 0, or 1 for a GPU that the interpreter does not play.
int amd_play(const char* target) {
  for (const char* known : {"gfx90a", "gfx942", "gfx950"}) {
    if (strcmp(target, known) != 0) continue;
    runtime().target = target;
    return 0;
  }
  return 1;
}

void amd_register_memory(void* pointer, uint64_t bytes) {
  const std::lock_guard lock(runtime().mutex);
  amd::memory().add(reinterpret_cast<uint64_t>(pointer), bytes, "registered memory");
}

void amd_forget_registered_memory() {
  const std::lock_guard lock(runtime().mutex);
  amd::memory().forget("registered memory");
}

void amd_allow_host_memory(int allowed) { amd::memory().permissive = allowed != 0; }

// 0: ascending order of workgroups and waves; else a permutation of both that follows from the seed.
void amd_set_order(uint64_t seed) { amd::settings().order_seed = seed; }

// 0: v_rcp_f32 is rounded correctly; else it is off by -1, 0 or 1 units in the last place, by a hash of its argument.
void amd_set_reciprocal_error(uint32_t seed) { amd::set_reciprocal_error(seed); }

void amd_set_step_limit(uint64_t instructions) { amd::settings().step_limit = instructions; }

// The text of the last fault; empty when there was none since the last call.
const char* amd_take_fault() {
  static thread_local std::string taken;
  const std::lock_guard lock(runtime().mutex);
  taken.swap(runtime().message);
  runtime().message.clear();
  runtime().error = hipSuccess;
  return taken.c_str();
}

void amd_totals(uint64_t* launches, uint64_t* workgroups, uint64_t* instructions) {
  *launches = amd::totals().launches;
  *workgroups = amd::totals().workgroups;
  *instructions = amd::totals().instructions;
}

// Times that instructions of a module ran whose mnemonic begins with `prefix`.
uint64_t amd_executed(hipModule_t module, const char* prefix) {
  const amd::Program& program = *amd_program(module);
  uint64_t sum = 0;
  for (size_t i = 0; i < program.names.size(); ++i)
    if (program.names[i].rfind(prefix, 0) == 0) sum += program.executed[i];
  return sum;
}

}  // extern "C"
