// DS: the workgroup's local memory, and the lane permutations that run in its hardware.
#include "scalar.h"

namespace amd {
namespace {

std::string bytes_at(uint32_t address, uint32_t bytes) { return std::to_string(bytes) + " bytes of LDS at " + std::to_string(address); }

// Two waves meet at 4 bytes of LDS between two barriers, and at least one of them writes: the result would depend on their order.
void check_order(Wave& w, const Instruction& in, uint32_t address, uint32_t bytes, bool writes) {
  Workgroup& group = *w.group;
  const uint16_t self = 1 + w.id;
  const uint64_t bit = uint64_t{1} << w.id;
  for (uint32_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    auto& access = group.accesses[word];
    if (access.phase != group.phase) access = {group.phase, 0, 0};
    if (access.writer != 0 && access.writer != self)
      fail(in, "race: wave " + std::to_string(w.id) + (writes ? " writes " : " reads ") + bytes_at(address, bytes) + " that wave " +
                   std::to_string(access.writer - 1) + " wrote, with no barrier between");
    if (writes && (access.readers & ~bit) != 0)
      fail(in, "race: wave " + std::to_string(w.id) + " writes " + bytes_at(address, bytes) +
                   " that another wave read, with no barrier between");
    if (writes)
      access.writer = self;
    else
      access.readers |= bit;
  }
}

uint8_t* place(Wave& w, const Instruction& in, uint32_t address, uint32_t bytes, bool writes) {
  const uint64_t size = w.group->lds.size();
  if (uint64_t{address} + bytes > size) fail(in, bytes_at(address, bytes) + " of " + std::to_string(size));
  check_order(w, in, address, bytes, writes);
  return w.group->lds.data() + address;
}

// `words` registers a lane, or a part of one where `bytes` is less than 4.
template <int words, int bytes, bool is_signed>
void load(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t* addresses = w.v[in.operand[1].number];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    uint32_t data[4] = {0, 0, 0, 0};
    memcpy(data, place(w, in, addresses[lane] + in.offset, words * bytes, false), words * bytes);
    if (is_signed) data[0] = bytes == 1 ? static_cast<int8_t>(data[0]) : static_cast<int16_t>(data[0]);
    for (int i = 0; i < words; ++i) w.v[in.operand[0].number + i][lane] = data[i];
  }
}

template <int words, int bytes, int shift>
void store(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t* addresses = w.v[in.operand[0].number];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    uint32_t data[4];
    for (int i = 0; i < words; ++i) data[i] = w.v[in.operand[1].number + i][lane] >> shift;
    memcpy(place(w, in, addresses[lane] + in.offset, words * bytes, true), data, words * bytes);
  }
}

// Two places, at offsets that count `stride` bytes; `words` registers each.
template <int words, int stride>
void load_two(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t* addresses = w.v[in.operand[1].number];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    uint32_t data[2][2];
    const uint32_t address = addresses[lane];
    memcpy(data[0], place(w, in, address + in.offset * stride, 4 * words, false), 4 * words);
    memcpy(data[1], place(w, in, address + in.offset2 * stride, 4 * words, false), 4 * words);
    for (int i = 0; i < 2 * words; ++i) w.v[in.operand[0].number + i][lane] = data[i / words][i % words];
  }
}

template <int words, int stride>
void store_two(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t* addresses = w.v[in.operand[0].number];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    for (int half = 0; half < 2; ++half) {
      uint32_t data[2];
      for (int i = 0; i < words; ++i) data[i] = w.v[in.operand[1 + half].number + i][lane];
      memcpy(place(w, in, addresses[lane] + (half ? in.offset2 : in.offset) * stride, 4 * words, true), data, 4 * words);
    }
  }
}

// A lane takes the value of the lane that its address names; a disabled lane gives 0.
void backward_permute(Wave& w, const Instruction& in) {
  Lanes<uint32_t> results;
  const uint32_t *addresses = w.v[in.operand[1].number], *data = w.v[in.operand[2].number];
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t from = (addresses[lane] + in.offset) / 4 % kLanes;
    results.x[lane] = w.exec() >> from & 1 ? data[from] : 0;
  }
  write_words(w, in.operand[0].number, results.x, w.exec());
}

void forward_permute(Wave& w, const Instruction& in) {
  Lanes<uint32_t> results{};
  const uint32_t *addresses = w.v[in.operand[1].number], *data = w.v[in.operand[2].number];
  for (int lane = 0; lane < kLanes; ++lane)
    if (w.exec() >> lane & 1) results.x[(addresses[lane] + in.offset) / 4 % kLanes] = data[lane];
  write_words(w, in.operand[0].number, results.x, w.exec());
}

// Bit 15 of the pattern: a permutation of each four lanes. Else and, or and xor masks of the lane number within 32.
void swizzle(Wave& w, const Instruction& in) {
  Lanes<uint32_t> results;
  const uint32_t pattern = in.word[0] & 0xFFFF;
  const uint32_t* data = w.v[in.operand[1].number];
  if (pattern >= 0xC000) fail(in, "a rotation or Fourier pattern");
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t from = pattern >> 15 ? (lane & ~3u) | (pattern >> (2 * (lane & 3)) & 3)
                                        : (lane & 32u) | ((((lane & pattern) | pattern >> 5) ^ pattern >> 10) & 31);
    results.x[lane] = w.exec() >> from & 1 ? data[from] : 0;
  }
  write_words(w, in.operand[0].number, results.x, w.exec());
}

}  // namespace

void add_local_memory(Table& t) {
  const std::vector<Type> load_types{Type::b32, Type::b32}, two_types{Type::b32, Type::b32, Type::b32};
  t.add("ds_read_b32", {load<1, 4, false>, load_types, kOffset});
  t.add("ds_read_b64", {load<2, 4, false>, load_types, kOffset});
  t.add("ds_read_b96", {load<3, 4, false>, load_types, kOffset});
  t.add("ds_read_b128", {load<4, 4, false>, load_types, kOffset});
  t.add("ds_read_u8", {load<1, 1, false>, load_types, kOffset});
  t.add("ds_read_i8", {load<1, 1, true>, load_types, kOffset});
  t.add("ds_read_u16", {load<1, 2, false>, load_types, kOffset});
  t.add("ds_read_i16", {load<1, 2, true>, load_types, kOffset});
  t.add("ds_write_b32", {store<1, 4, 0>, load_types, kOffset});
  t.add("ds_write_b64", {store<2, 4, 0>, load_types, kOffset});
  t.add("ds_write_b96", {store<3, 4, 0>, load_types, kOffset});
  t.add("ds_write_b128", {store<4, 4, 0>, load_types, kOffset});
  t.add("ds_write_b8", {store<1, 1, 0>, load_types, kOffset});
  t.add("ds_write_b16", {store<1, 2, 0>, load_types, kOffset});
  t.add("ds_write_b8_d16_hi", {store<1, 1, 16>, load_types, kOffset});
  t.add("ds_write_b16_d16_hi", {store<1, 2, 16>, load_types, kOffset});
  t.add("ds_read2_b32", {load_two<1, 4>, load_types, kOffset2});
  t.add("ds_read2_b64", {load_two<2, 8>, load_types, kOffset2});
  t.add("ds_read2st64_b32", {load_two<1, 256>, load_types, kOffset2});
  t.add("ds_read2st64_b64", {load_two<2, 512>, load_types, kOffset2});
  t.add("ds_write2_b32", {store_two<1, 4>, two_types, kOffset2});
  t.add("ds_write2_b64", {store_two<2, 8>, two_types, kOffset2});
  t.add("ds_write2st64_b32", {store_two<1, 256>, two_types, kOffset2});
  t.add("ds_write2st64_b64", {store_two<2, 512>, two_types, kOffset2});
  t.add("ds_bpermute_b32", {backward_permute, two_types, kOffset});
  t.add("ds_permute_b32", {forward_permute, two_types, kOffset});
  t.add("ds_swizzle_b32", {swizzle, load_types, kOffset});
}

}  // namespace amd
