// SOPP and the instructions that move the program counter.
#include "program.h"
#include "scalar.h"

namespace amd {
namespace {

void nothing(Wave&, const Instruction&) {}

template <typename F>
void branch(Table& table, const std::string& mnemonic, F) {
  table.add(mnemonic, {[](Wave& w, const Instruction& in) {
                         if (F{}(w)) w.pc = in.target;
                       },
                       {},
                       0,
                       true});
}

void jump(Wave& w, const Instruction& in, uint64_t address) { w.pc = w.program->instruction_at(address, in); }

}  // namespace

void add_program_flow(Table& t) {
  branch(t, "s_branch", [](const Wave&) { return true; });
  branch(t, "s_cbranch_scc0", [](const Wave& w) { return !w.scc; });
  branch(t, "s_cbranch_scc1", [](const Wave& w) { return w.scc; });
  branch(t, "s_cbranch_vccz", [](const Wave& w) { return w.vcc() == 0; });
  branch(t, "s_cbranch_vccnz", [](const Wave& w) { return w.vcc() != 0; });
  branch(t, "s_cbranch_execz", [](const Wave& w) { return w.exec() == 0; });
  branch(t, "s_cbranch_execnz", [](const Wave& w) { return w.exec() != 0; });
  t.add("s_getpc_b64", {[](Wave& w, const Instruction& in) { write_scalar(w, in.operand[0], in.address + in.bytes); }, {Type::b64}});
  t.add("s_setpc_b64", {[](Wave& w, const Instruction& in) { jump(w, in, uniform<uint64_t>(w, in.operand[0])); }, {Type::b64}});
  t.add("s_swappc_b64", {[](Wave& w, const Instruction& in) {
                           const uint64_t to = uniform<uint64_t>(w, in.operand[1]);
                           write_scalar(w, in.operand[0], in.address + in.bytes);
                           jump(w, in, to);
                         },
                         {Type::b64, Type::b64}});
  t.add("s_barrier", {[](Wave& w, const Instruction&) { w.status = Status::barrier; }, {}, 0, true});
  t.add("s_endpgm", {[](Wave& w, const Instruction&) { w.status = Status::ended; }, {}, 0, true});
  // Waves run in order and memory is written at once, so that waiting, priorities and caches mean nothing here.
  for (const char* mnemonic :
       {"s_waitcnt", "s_nop", "s_sleep", "s_setprio", "s_wakeup", "s_inst_prefetch", "s_icache_inv", "s_dcache_inv", "s_dcache_wb",
        "s_waitcnt_depctr", "buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol", "v_nop"})
    t.add(mnemonic, {nothing, {}, 0, true});
}

}  // namespace amd
