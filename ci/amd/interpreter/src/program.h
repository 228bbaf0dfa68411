// A code object of one AMD GPU, loaded and decoded: https://llvm.org/docs/AMDGPUUsage.html, "Code Object".
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace amd {

struct Argument {
  uint32_t offset = 0, size = 0;
  std::string kind;  // .value_kind of the metadata
};

struct Kernel {
  std::string name;
  uint64_t entry = 0;  // address in the loaded image
  uint32_t lds_bytes = 0, scratch_bytes = 0, kernarg_bytes = 0;
  uint32_t rsrc1 = 0, rsrc2 = 0;
  uint16_t properties = 0, preload = 0;
  std::vector<Argument> arguments;
};

struct Program {
  std::string target;  // gfx90a, ...
  uint8_t* image = nullptr;
  uint64_t image_bytes = 0;
  std::vector<Instruction> code;
  std::unordered_map<uint64_t, uint32_t> number_at;  // address -> number of the instruction
  std::vector<std::string> names;                    // mnemonics
  std::map<std::string, Kernel> kernels;
  mutable std::vector<uint64_t> executed;  // times, by mnemonic

  uint32_t instruction_at(uint64_t address, const Instruction& from) const;
};

// Loads an ELF code object. Throws std::runtime_error with what is wrong with it.
std::unique_ptr<Program> load(const void* elf, size_t bytes);

// The metadata note of a code object (MessagePack): arguments by kernel name.
std::map<std::string, std::vector<Argument>> read_metadata(const uint8_t* data, size_t bytes);

// Fills `program.code` from the text that llvm-objdump prints for `file`; `bias` is what loading adds to an address.
void disassemble(Program& program, const std::string& file, uint64_t bias);

}  // namespace amd
