// Which bytes of this process the device may touch: allocations of the runtime, and ranges that a test registers.
#pragma once

#include <map>
#include <string>

#include "machine.h"

namespace amd {

class Memory {
 public:
  void add(uint64_t address, uint64_t bytes, const std::string& what);
  // Whether a range began at `address`.
  bool remove(uint64_t address);
  void forget(const std::string& what);
  void forget_mappings();

  // Permissive: any mapping of this process that can be written counts as an allocation, found when an access meets it.
  bool permissive = false;

  // The memory of `bytes` at `address`, or a fault.
  uint8_t* at(uint64_t address, uint32_t bytes, const Instruction& instruction) {
    if (address - first_ < size_ && address - first_ + bytes <= size_) return reinterpret_cast<uint8_t*>(address);
    return find(address, bytes, instruction);
  }

 private:
  uint8_t* find(uint64_t address, uint32_t bytes, const Instruction& instruction);

  struct Range {
    uint64_t bytes;
    std::string what;
  };
  std::map<uint64_t, Range> ranges_, mappings_;
  uint64_t first_ = 0, size_ = 0;  // the range that was met last
};

Memory& memory();

}  // namespace amd
