// Initial registers, workgroups and barriers: AMDGPUUsage, "Initial Kernel Execution State" and "Kernel Descriptor".
#include "dispatch.h"

#include <algorithm>
#include <numeric>

#include "attn/host/float_environment.h"
#include "memory.h"
#include "table.h"

namespace amd {
namespace {

enum Properties : uint16_t {
  kPrivateBuffer = 1,
  kDispatchPointer = 2,
  kQueuePointer = 4,
  kKernargPointer = 8,
  kDispatchId = 16,
  kFlatScratchInit = 32,
  kPrivateSize = 64
};

uint64_t next(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

std::vector<uint32_t> order(uint32_t count, uint64_t& state) {
  std::vector<uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0u);
  if (state != 0)
    for (uint32_t i = count; i > 1; --i) std::swap(numbers[i - 1], numbers[next(state) % i]);
  return numbers;
}

// A packet of 64 bytes as the dispatch pointer shows it: grid and workgroup sizes are what kernels read of it.
struct Packet {
  uint16_t header = 0, setup = 3;
  uint16_t workgroup[3] = {1, 1, 1};
  uint16_t reserved = 0;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t private_bytes = 0, group_bytes = 0;
  uint64_t object = 0, kernarg = 0, reserved2 = 0, signal = 0;
};
static_assert(sizeof(Packet) == 64);

void put(std::vector<uint8_t>& kernarg, const Argument& argument, uint64_t value) {
  memcpy(kernarg.data() + argument.offset, &value, std::min<size_t>(argument.size, 8));
}

void fill_hidden(const Kernel& kernel, Launch& launch) {
  for (const Argument& argument : kernel.arguments) {
    if (argument.kind.rfind("hidden_", 0) != 0) continue;
    if (argument.offset + argument.size > launch.kernarg.size())
      throw std::runtime_error("a hidden argument lies outside the kernarg segment");
    const std::string name = argument.kind.substr(7);
    const int axis = name.back() == 'y' ? 1 : name.back() == 'z' ? 2 : 0;
    uint64_t value = 0;
    if (name.rfind("block_count_", 0) == 0)
      value = launch.blocks[axis];
    else if (name.rfind("group_size_", 0) == 0)
      value = launch.threads[axis];
    else if (name == "grid_dims")
      value = launch.blocks[2] * launch.threads[2] > 1 ? 3 : launch.blocks[1] * launch.threads[1] > 1 ? 2 : 1;
    else if (name == "dynamic_lds_size")
      value = launch.dynamic_lds;
    else if (name == "private_base")
      value = kPrivateAperture >> 32;
    else if (name == "shared_base")
      value = kSharedAperture >> 32;
    // The rest are pointers to services that this runtime has not (printf, a heap): null, and an access faults.
    put(launch.kernarg, argument, value);
  }
}

class Dispatch {
 public:
  Dispatch(const Program& program, const Kernel& kernel, Launch& launch)
      : program_(program), kernel_(kernel), launch_(launch), random_(settings().order_seed) {
    check_mode();
    threads_ = launch.threads[0] * launch.threads[1] * launch.threads[2];
    const uint32_t limit = 1024;
    if (threads_ == 0 || threads_ > limit) throw std::runtime_error("a workgroup of " + std::to_string(threads_) + " work-items");
    waves_.resize((threads_ + kLanes - 1) / kLanes);
    for (int axis = 0; axis < 3; ++axis) {
      packet_.workgroup[axis] = launch.threads[axis];
      packet_.grid[axis] = launch.threads[axis] * launch.blocks[axis];
    }
    packet_.private_bytes = kernel.scratch_bytes;
    packet_.group_bytes = kernel.lds_bytes + launch.dynamic_lds;
    if (packet_.group_bytes > (program.target == "gfx950" ? 160u : 64u) * 1024)
      throw std::runtime_error(std::to_string(packet_.group_bytes) + " bytes of LDS on " + program.target);
    packet_.kernarg = reinterpret_cast<uint64_t>(launch.kernarg.data());
  }

  void run() {
    const uint64_t blocks = uint64_t{launch_.blocks[0]} * launch_.blocks[1] * launch_.blocks[2];
    for (uint32_t number : order(blocks, random_)) {
      group_.id[0] = number % launch_.blocks[0];
      group_.id[1] = number / launch_.blocks[0] % launch_.blocks[1];
      group_.id[2] = number / launch_.blocks[0] / launch_.blocks[1];
      run_workgroup();
      ++totals().workgroups;
    }
  }

  const Packet& packet() const { return packet_; }

 private:
  void check_mode() const {
    const uint32_t mode = kernel_.rsrc1 >> 12 & 0xFF;
    if (mode != 0xF0) throw std::runtime_error(kernel_.name + ": float mode other than nearest even with subnormals");
    if (!(kernel_.rsrc1 >> 23 & 1)) throw std::runtime_error(kernel_.name + ": IEEE mode is off");
    if (kernel_.properties & (kQueuePointer | kDispatchId))
      throw std::runtime_error(kernel_.name + ": wants a queue pointer or dispatch id");
    if (kernel_.properties >> 11 & 1) throw std::runtime_error(kernel_.name + ": uses a dynamic stack");
  }

  void start_wave(Wave& w, uint32_t id) {
    for (auto& lanes : w.v) std::fill(std::begin(lanes), std::end(lanes), kPoison);
    std::fill(std::begin(w.s), std::end(w.s), kPoison);
    w.id = id;
    w.program = &program_;
    w.group = &group_;
    w.scc = false;
    w.status = Status::running;
    w.scratch_bytes = kernel_.scratch_bytes;
    w.scratch.assign(size_t{kernel_.scratch_bytes} * kLanes, 0xA5);
    int s = user_registers(w);
    if (kernel_.rsrc2 >> 7 & 1) w.s[s++] = group_.id[0];
    if (kernel_.rsrc2 >> 8 & 1) w.s[s++] = group_.id[1];
    if (kernel_.rsrc2 >> 9 & 1) w.s[s++] = group_.id[2];
    if (kernel_.rsrc2 >> 10 & 1) w.s[s++] = 0;
    if (kernel_.rsrc2 & 1) w.s[s++] = 0;  // offset of this wave's scratch: each wave has memory of its own
    uint64_t exec = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t item = id * kLanes + lane;
      if (item >= threads_) break;
      exec |= uint64_t{1} << lane;
      const uint32_t x = item % launch_.threads[0], y = item / launch_.threads[0] % launch_.threads[1],
                     z = item / launch_.threads[0] / launch_.threads[1];
      w.v[0][lane] = x | y << 10 | z << 20;
    }
    w.set_pair(kExec, exec);
    uint64_t entry = kernel_.entry;
    if (preloaded() > 0) entry += 256;
    const auto at = program_.number_at.find(entry);
    if (at == program_.number_at.end()) throw std::runtime_error(kernel_.name + ": no instruction at its entry");
    w.pc = at->second;
  }

  uint32_t preloaded() const { return kernel_.preload & 0x7F; }

  // The user SGPRs; returns how many there are.
  int user_registers(Wave& w) const {
    int s = 0;
    const auto pointer = [&](const void* to) {
      w.set_pair(s, reinterpret_cast<uint64_t>(to));
      s += 2;
    };
    if (kernel_.properties & kPrivateBuffer) {
      w.s[0] = 0, w.s[1] = kPrivateResourceHigh | 0x80000000u, w.s[2] = 0xFFFFFFFFu, w.s[3] = 0;
      s = 4;
    }
    if (kernel_.properties & kDispatchPointer) pointer(&packet_);
    if (kernel_.properties & kKernargPointer) pointer(launch_.kernarg.data());
    if (kernel_.properties & kFlatScratchInit) pointer(nullptr);
    if (kernel_.properties & kPrivateSize) w.s[s++] = kernel_.scratch_bytes;
    const uint32_t offset = kernel_.preload >> 7;
    for (uint32_t word = 0; word < preloaded(); ++word) {
      const size_t from = 4 * (offset + word);
      if (from + 4 <= launch_.kernarg.size()) memcpy(&w.s[s], launch_.kernarg.data() + from, 4);
      ++s;
    }
    const uint32_t count = kernel_.rsrc2 >> 1 & 0x1F;
    return std::max<int>(s, preloaded() > 0 ? s : count);
  }

  void run_workgroup() {
    const uint32_t lds = packet_.group_bytes;
    group_.lds.resize(lds);
    for (size_t at = 0; at < lds; ++at) group_.lds[at] = kPoison >> (8 * (at & 3)) & 0xFF;
    group_.accesses.assign(lds / 4 + 1, {});
    group_.phase = 1;
    for (uint32_t id = 0; id < waves_.size(); ++id) start_wave(waves_[id], id);
    for (;;) {
      uint32_t waiting = 0, ended = 0;
      for (uint32_t id : order(waves_.size(), random_)) {
        if (waves_[id].status == Status::barrier) waves_[id].status = Status::running;
        run_wave(waves_[id]);
        waiting += waves_[id].status == Status::barrier;
        ended += waves_[id].status == Status::ended;
      }
      if (waiting == 0) break;
      ++group_.phase;
    }
  }

  void run_wave(Wave& w) {
    const Instruction* code = program_.code.data();
    const uint32_t end = program_.code.size();
    const uint64_t limit = settings().step_limit;
    uint64_t* executed = program_.executed.data();
    uint64_t& steps = totals().instructions;
    try {
      while (w.status == Status::running) {
        if (w.pc >= end) throw Fault("the wave ran past the end of the code");
        const Instruction& in = code[w.pc++];
        ++executed[in.name];
        ++steps;
        if (++steps_ > limit) fail(in, "more instructions than the limit of " + std::to_string(limit));
        in.run(w, in);
      }
    } catch (const Fault& fault) {
      throw Fault(kernel_.name + ", workgroup (" + std::to_string(group_.id[0]) + ", " + std::to_string(group_.id[1]) + ", " +
                  std::to_string(group_.id[2]) + "), wave " + std::to_string(w.id) + ", at " + fault.what());
    }
  }

  const Program& program_;
  const Kernel& kernel_;
  Launch& launch_;
  uint64_t random_;
  uint32_t threads_ = 0;
  uint64_t steps_ = 0;
  Packet packet_;
  Workgroup group_;
  std::vector<Wave> waves_;
};

}  // namespace

Settings& settings() {
  static Settings chosen;
  return chosen;
}

Totals& totals() {
  static Totals counted;
  return counted;
}

const Table& table() {
  static const Table filled = [] {
    Table t;
    for (auto add : {add_scalar, add_program_flow, add_scalar_memory, add_vector_float, add_vector_convert, add_vector_integer,
                     add_vector_carry, add_vector_compare, add_vector_packed, add_division, add_lane, add_matrix, add_local_memory,
                     add_global_memory, add_buffer_memory})
      add(t);
    return t;
  }();
  return filled;
}

void run(const Program& program, const Kernel& kernel, Launch launch) {
  const attn::host::DefaultFloatEnvironment environment;  // XLA's threads flush subnormals
  if (launch.kernarg.size() < kernel.kernarg_bytes) launch.kernarg.resize(kernel.kernarg_bytes, 0xA5);
  fill_hidden(kernel, launch);
  Dispatch dispatch(program, kernel, launch);
  const auto kernarg = reinterpret_cast<uint64_t>(launch.kernarg.data());
  const auto packet = reinterpret_cast<uint64_t>(&dispatch.packet());
  memory().add(kernarg, launch.kernarg.size(), "kernarg segment");
  memory().add(packet, sizeof(Packet), "dispatch packet");
  const auto forget = [&] {
    memory().remove(kernarg);
    memory().remove(packet);
    memory().forget_mappings();
  };
  try {
    dispatch.run();
  } catch (...) {
    forget();
    throw;
  }
  forget();
  ++totals().launches;
}

}  // namespace amd
