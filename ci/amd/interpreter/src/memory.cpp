#include "memory.h"

#include <cstdio>
#include <fstream>

namespace amd {

namespace {

// The writable mapping that holds `address`: its first byte and size, or (0, 0).
std::pair<uint64_t, uint64_t> mapping_of(uint64_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long first = 0, end = 0;
    char mode[5] = {};
    if (std::sscanf(line.c_str(), "%llx-%llx %4s", &first, &end, mode) == 3 && first <= address && address < end && mode[1] == 'w')
      return {first, end - first};
  }
  return {0, 0};
}

}  // namespace

Memory& memory() {
  static Memory known;
  return known;
}

void Memory::add(uint64_t address, uint64_t bytes, const std::string& what) {
  ranges_[address] = {bytes, what};
  first_ = size_ = 0;
}

bool Memory::remove(uint64_t address) {
  first_ = size_ = 0;
  return ranges_.erase(address) > 0;
}

void Memory::forget(const std::string& what) {
  for (auto range = ranges_.begin(); range != ranges_.end();) range = range->second.what == what ? ranges_.erase(range) : ++range;
  first_ = size_ = 0;
}

void Memory::forget_mappings() {
  mappings_.clear();
  first_ = size_ = 0;
}

uint8_t* Memory::find(uint64_t address, uint32_t bytes, const Instruction& instruction) {
  const auto holds = [&](const std::map<uint64_t, Range>& ranges) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return false;
    const auto& [first, range] = *--after;
    if (address - first + bytes > range.bytes) return false;
    first_ = first;
    size_ = range.bytes;
    return true;
  };
  if (holds(ranges_)) return reinterpret_cast<uint8_t*>(address);
  if (permissive) {
    if (holds(mappings_)) return reinterpret_cast<uint8_t*>(address);
    if (const auto [first, size] = mapping_of(address); size != 0) mappings_[first] = {size, "a mapping of this process"};
    if (holds(mappings_)) return reinterpret_cast<uint8_t*>(address);
  }
  char text[160];
  std::snprintf(text, sizeof text, "%u bytes at 0x%llx lie in no allocation", bytes, static_cast<unsigned long long>(address));
  std::string what = text;
  if (const auto after = ranges_.upper_bound(address); after != ranges_.begin()) {
    const auto& [first, range] = *std::prev(after);
    std::snprintf(text, sizeof text, "; the nearest before it is %s, %llu bytes at 0x%llx", range.what.c_str(),
                  static_cast<unsigned long long>(range.bytes), static_cast<unsigned long long>(first));
    what += text;
  }
  fail(instruction, what);
}

}  // namespace amd
