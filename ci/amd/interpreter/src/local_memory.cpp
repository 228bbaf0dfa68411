// DS: the workgroup's local memory, and the lane permutations that run in its hardware.
#include <algorithm>

#include "lds.h"
#include "scalar.h"

namespace amd {
namespace {

std::string bytes_at(uint32_t address, uint32_t bytes) { return std::to_string(bytes) + " bytes of LDS at " + std::to_string(address); }

[[noreturn]] void race(const Wave& w, const Instruction& in, const char* does, uint32_t address, uint32_t bytes, const char* did) {
  fail(in,
       "race: wave " + std::to_string(w.id) + does + bytes_at(address, bytes) + " that another wave " + did + ", with no barrier between");
}

// Calls `visit` with the record of each 4 bytes of an access, and which of them it touches.
template <typename F>
void each_record(Wave& w, uint32_t address, uint32_t bytes, F visit) {
  for (uint32_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    auto& access = w.group->accesses[word];
    if (access.phase != w.group->phase) access = {w.group->phase, 0, 0, 0, 0};
    const int first = static_cast<int>(address) - static_cast<int>(4 * word), end = first + static_cast<int>(bytes);
    visit(access, static_cast<uint8_t>((0xF << std::max(first, 0)) & (0xF >> std::max(4 - end, 0))));
  }
}

void bounds(const Wave& w, const Instruction& in, uint32_t address, uint32_t bytes) {
  const uint64_t size = w.group->lds.size();
  if (uint64_t{address} + bytes > size) fail(in, bytes_at(address, bytes) + " of " + std::to_string(size));
}

}  // namespace

// What two waves do to the same bytes between two barriers must not depend on their order: a wave may read only what no other wave wrote or
// what it wrote as well, and may write over another's access only the value that is there already, as waves do that hold copies of a value.
void read_lds(Wave& w, const Instruction& in, uint32_t address, void* to, uint32_t bytes) {
  bounds(w, in, address, bytes);
  const auto self = static_cast<uint16_t>(1u << w.id);
  each_record(w, address, bytes, [&](auto& access, uint8_t touched) {
    if ((access.written & touched) && !(access.writers & self)) race(w, in, " reads ", address, bytes, "wrote");
    access.readers |= self;
    access.read |= touched;
  });
  memcpy(to, w.group->lds.data() + address, bytes);
}

void write_lds(Wave& w, const Instruction& in, uint32_t address, const void* from, uint32_t bytes) {
  bounds(w, in, address, bytes);
  uint8_t* to = w.group->lds.data() + address;
  const bool changes = memcmp(to, from, bytes) != 0;
  const auto self = static_cast<uint16_t>(1u << w.id);
  each_record(w, address, bytes, [&](auto& access, uint8_t touched) {
    if (changes && (access.written & touched) && (access.writers & ~self)) race(w, in, " writes ", address, bytes, "wrote otherwise");
    if (changes && (access.read & touched) && (access.readers & ~self)) race(w, in, " writes ", address, bytes, "read");
    access.writers |= self;
    access.written |= touched;
  });
  memcpy(to, from, bytes);
}

namespace {

// `words` registers a lane, or a part of one where `bytes` is less than 4.
template <int words, int bytes, bool is_signed>
void load(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t* addresses = w.v[in.operand[1].number];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    uint32_t data[4] = {0, 0, 0, 0};
    read_lds(w, in, addresses[lane] + in.offset, data, words * bytes);
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
    write_lds(w, in, addresses[lane] + in.offset, data, words * bytes);
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
    read_lds(w, in, address + in.offset * stride, data[0], 4 * words);
    read_lds(w, in, address + in.offset2 * stride, data[1], 4 * words);
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
      write_lds(w, in, addresses[lane] + (half ? in.offset2 : in.offset) * stride, data, 4 * words);
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
