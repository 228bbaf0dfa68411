// MUBUF loads and stores through a buffer resource of four scalar registers, and SMEM.
#include "access.h"
#include "lds.h"
#include "scalar.h"

namespace amd {
namespace {

struct Resource {
  uint64_t base;
  uint32_t records;
};

Resource resource(const Wave& w, const Instruction& in, const Operand& operand) {
  const uint32_t* words = &w.s[operand.number];
  const uint32_t stride = words[1] >> 16 & 0x3FFF;
  if (stride != 0 && (in.idxen || words[1] >> 31)) fail(in, "a buffer with a stride");
  return {words[0] | uint64_t{words[1] & 0xFFFF} << 32, words[2]};
}

// Operands: data (none with `lds`), offset register or off, resource, scalar offset. What is out of the resource's range reads as 0 and is
// not written; what is in range must lie in an allocation. The resource of the private segment leads to the lane's scratch memory.
template <typename F>
void each_word(Wave& w, const Instruction& in, F access) {
  const uint64_t exec = w.exec();
  const Operand* operands = in.operand + (in.modifiers & kToLds ? 0 : 1);
  const uint32_t scalar = uniform<uint32_t>(w, operands[2]);
  const bool is_private = (w.s[operands[1].number + 1] & 0xFFFF) == kPrivateResourceHigh && w.s[operands[1].number] == 0;
  const Resource buffer = is_private ? Resource{0, 0} : resource(w, in, operands[1]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    const uint32_t offset = static_cast<uint32_t>(in.offset) + (in.offen ? w.v[operands[0].number][lane] : 0);
    for (int word = 0; word < in.shape.words; ++word) {
      const uint64_t at = uint64_t{offset} + 4 * word;
      if (is_private) {
        if (at + scalar + in.shape.bytes > w.scratch_bytes) fail(in, "scratch at " + std::to_string(at + scalar));
        access(lane, word, w.scratch.data() + uint64_t{w.scratch_bytes} * lane + at + scalar);
      } else if (at + in.shape.bytes + scalar > buffer.records) {
        access(lane, word, nullptr);
      } else {
        access(lane, word, memory().at(buffer.base + at + scalar, in.shape.bytes, in));
      }
    }
  }
}

void load(Wave& w, const Instruction& in) {
  Shape one = in.shape;
  one.words = 1;
  static constexpr uint8_t kZero[4] = {};
  if (in.modifiers & kToLds) {  // "Memory Buffer Load to LDS": four bytes a lane, side by side from M0 and the instruction's offset on
    const uint32_t first = (w.s[kM0] & 0xFFFFu) + static_cast<uint32_t>(in.offset);
    each_word(w, in, [&](int lane, int, const uint8_t* from) { write_lds(w, in, first + 4 * lane, from == nullptr ? kZero : from, 4); });
    return;
  }
  each_word(w, in, [&](int lane, int word, const uint8_t* from) {
    load_lane(w, in.operand[0].number + word, lane, from == nullptr ? kZero : from, one);
  });
}

void store(Wave& w, const Instruction& in) {
  Shape one = in.shape;
  one.words = 1;
  each_word(w, in, [&](int lane, int word, uint8_t* to) {
    if (to != nullptr) store_lane(w, in.operand[0].number + word, lane, to, one);
  });
}

// Operands: first register, base address, offset (a constant or a register); `offset` adds to a register.
template <int words>
void scalar_load(Wave& w, const Instruction& in) {
  const Operand& offset = in.operand[2];
  const int64_t added = offset.place == Place::scalar ? int64_t{w.s[offset.number]} + in.offset : static_cast<int32_t>(offset.value);
  const uint64_t address = (w.pair(in.operand[1].number) + added) & ~uint64_t{3};
  memcpy(&w.s[in.operand[0].number], memory().at(address, 4 * words, in), 4 * words);
}

template <int words>
void scalar_buffer_load(Wave& w, const Instruction& in) {
  const Resource buffer = resource(w, in, in.operand[1]);
  const uint64_t offset = (uniform<uint32_t>(w, in.operand[2]) + in.offset) & ~3u;
  for (int word = 0; word < words; ++word) {
    uint32_t& to = w.s[in.operand[0].number + word];
    if (offset + 4 * word + 4 > buffer.records)
      to = 0;
    else
      memcpy(&to, memory().at(buffer.base + offset + 4 * word, 4, in), 4);
  }
}

template <int words>
void add_scalar_loads(Table& t, const std::string& suffix) {
  t.add("s_load_dword" + suffix, {scalar_load<words>, {Type::b32, Type::b64, Type::b32}, kOffset | kCache});
  t.add("s_buffer_load_dword" + suffix, {scalar_buffer_load<words>, {Type::b32, Type::b64, Type::b32}, kOffset | kCache});
}

}  // namespace

void add_scalar_memory(Table& t) {
  add_scalar_loads<1>(t, "");
  add_scalar_loads<2>(t, "x2");
  add_scalar_loads<4>(t, "x4");
  add_scalar_loads<8>(t, "x8");
  add_scalar_loads<16>(t, "x16");
}

void add_buffer_memory(Table& t) {
  const std::vector<Type> types{Type::b32, Type::b32, Type::b32, Type::b32};
  each_load([&](const std::string& name, Shape shape) {
    const uint32_t to_lds = name == "load_dword" ? kToLds : 0u;
    t.add("buffer_" + name, {load, types, kOffset | kCache | kBuffer | to_lds, false, shape});
  });
  each_store(
      [&](const std::string& name, Shape shape) { t.add("buffer_" + name, {store, types, kOffset | kCache | kBuffer, false, shape}); });
}

}  // namespace amd
