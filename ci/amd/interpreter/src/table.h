// What the interpreter does for each mnemonic.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace amd {

struct Entry {
  Handler run = nullptr;
  std::vector<Type> types;  // of the operands in their order, the destination first
  uint32_t modifiers = 0;   // that the handler honours
  bool plain_text = false;  // what follows the mnemonic is no list of operands
  Shape shape = {};
};

class Table {
 public:
  void add(const std::string& mnemonic, Entry entry) { entries_[mnemonic] = std::move(entry); }
  const Entry* find(const std::string& mnemonic) const {
    const auto found = entries_.find(mnemonic);
    return found == entries_.end() ? nullptr : &found->second;
  }

 private:
  std::unordered_map<std::string, Entry> entries_;
};

void add_scalar(Table&);
void add_program_flow(Table&);
void add_scalar_memory(Table&);
void add_vector_float(Table&);
void add_vector_convert(Table&);
void add_vector_integer(Table&);
void add_vector_carry(Table&);
void add_vector_compare(Table&);
void add_vector_packed(Table&);
void add_division(Table&);
void add_lane(Table&);
void add_matrix(Table&);
void add_local_memory(Table&);
void add_global_memory(Table&);
void add_buffer_memory(Table&);

const Table& table();

}  // namespace amd
