// What the loads and stores of global, flat, scratch and buffer memory share: how many bytes, and which bits of which register.
#pragma once

#include "memory.h"
#include "vector.h"

namespace amd {

constexpr Shape kWords[] = {{1, 4}, {2, 4}, {3, 4}, {4, 4}};

inline void load_lane(Wave& w, int number, int lane, const uint8_t* from, const Shape& shape) {
  if (shape.bytes == 4) {
    for (int i = 0; i < shape.words; ++i) memcpy(&w.v[number + i][lane], from + 4 * i, 4);
    return;
  }
  uint32_t data = 0;
  memcpy(&data, from, shape.bytes);
  if (shape.is_signed) data = shape.bytes == 1 ? static_cast<int8_t>(data) : static_cast<int16_t>(data);
  uint32_t& to = w.v[number][lane];
  if (shape.fill == Fill::low_half)
    to = (to & 0xFFFF0000u) | (data & 0xFFFFu);
  else if (shape.fill == Fill::high_half)
    to = (to & 0xFFFFu) | data << 16;
  else
    to = data;
}

inline void store_lane(const Wave& w, int number, int lane, uint8_t* to, const Shape& shape) {
  if (shape.bytes == 4) {
    for (int i = 0; i < shape.words; ++i) memcpy(to + 4 * i, &w.v[number + i][lane], 4);
    return;
  }
  const uint32_t data = w.v[number][lane] >> (shape.fill == Fill::high_half ? 16 : 0);
  memcpy(to, &data, shape.bytes);
}

// Calls `add` with each suffix of a load's name and its shape.
template <typename F>
void each_load(F add) {
  static constexpr const char* kSizes[] = {"dword", "dwordx2", "dwordx3", "dwordx4"};
  for (int i = 0; i < 4; ++i) add(std::string("load_") + kSizes[i], kWords[i]);
  add("load_ubyte", Shape{1, 1});
  add("load_sbyte", Shape{1, 1, true});
  add("load_ushort", Shape{1, 2});
  add("load_sshort", Shape{1, 2, true});
  add("load_short_d16", Shape{1, 2, false, Fill::low_half});
  add("load_short_d16_hi", Shape{1, 2, false, Fill::high_half});
  add("load_ubyte_d16", Shape{1, 1, false, Fill::low_half});
  add("load_ubyte_d16_hi", Shape{1, 1, false, Fill::high_half});
  add("load_sbyte_d16", Shape{1, 1, true, Fill::low_half});
  add("load_sbyte_d16_hi", Shape{1, 1, true, Fill::high_half});
}

template <typename F>
void each_store(F add) {
  static constexpr const char* kSizes[] = {"dword", "dwordx2", "dwordx3", "dwordx4"};
  for (int i = 0; i < 4; ++i) add(std::string("store_") + kSizes[i], kWords[i]);
  add("store_byte", Shape{1, 1});
  add("store_short", Shape{1, 2});
  add("store_byte_d16_hi", Shape{1, 1, false, Fill::high_half});
  add("store_short_d16_hi", Shape{1, 2, false, Fill::high_half});
}

}  // namespace amd
