// FLAT, GLOBAL and SCRATCH loads and stores.
#include "access.h"
#include "lds.h"
#include "scalar.h"

namespace amd {
namespace {

enum class Segment { global, flat, scratch };

uint8_t* scratch_at(Wave& w, const Instruction& in, int lane, uint32_t offset, uint32_t bytes) {
  if (uint64_t{offset} + bytes > w.scratch_bytes)
    fail(in, std::to_string(bytes) + " bytes of scratch at " + std::to_string(offset) + " of " + std::to_string(w.scratch_bytes));
  return w.scratch.data() + uint64_t{w.scratch_bytes} * lane + offset;
}

bool is_shared(const Wave& w, const Operand& address, int lane) { return w.v[address.number + 1][lane] == kSharedAperture >> 32; }

// The address of one lane. Operands: address register or off, scalar base or off (a flat access has none).
template <Segment segment>
uint8_t* lane_at(Wave& w, const Instruction& in, const Operand& address, const Operand& base, int lane, uint32_t bytes) {
  if constexpr (segment == Segment::scratch) {
    uint32_t offset = static_cast<uint32_t>(in.offset);
    if (address.place == Place::vector) offset += w.v[address.number][lane];
    if (base.place == Place::scalar) offset += w.s[base.number];
    return scratch_at(w, in, lane, offset, bytes);
  } else {
    uint64_t at = w.v[address.number][lane];
    if (base.place == Place::scalar)
      at += w.pair(base.number);
    else
      at |= uint64_t{w.v[address.number + 1][lane]} << 32;
    at += static_cast<int64_t>(in.offset);
    if constexpr (segment == Segment::flat) {
      if (at >> 32 == kPrivateAperture >> 32) return scratch_at(w, in, lane, static_cast<uint32_t>(at), bytes);
    }
    return memory().at(at, bytes, in);
  }
}

template <Segment segment>
void load(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t bytes = in.shape.words * in.shape.bytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    uint8_t held[16];
    const uint8_t* from = held;
    if (segment == Segment::flat && is_shared(w, in.operand[1], lane))
      read_lds(w, in, w.v[in.operand[1].number][lane] + in.offset, held, bytes);
    else
      from = lane_at<segment>(w, in, in.operand[1], in.operand[2], lane, bytes);
    load_lane(w, in.operand[0].number, lane, from, in.shape);
  }
}

template <Segment segment>
void store(Wave& w, const Instruction& in) {
  const uint64_t exec = w.exec();
  const uint32_t bytes = in.shape.words * in.shape.bytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(exec >> lane & 1)) continue;
    if (segment == Segment::flat && is_shared(w, in.operand[0], lane)) {
      uint8_t held[16];
      store_lane(w, in.operand[1].number, lane, held, in.shape);
      write_lds(w, in, w.v[in.operand[0].number][lane] + in.offset, held, bytes);
    } else {
      store_lane(w, in.operand[1].number, lane, lane_at<segment>(w, in, in.operand[0], in.operand[2], lane, bytes), in.shape);
    }
  }
}

template <Segment segment>
void add_segment(Table& t, const std::string& prefix) {
  const std::vector<Type> types{Type::b32, Type::b32, Type::b32};
  each_load([&](const std::string& name, Shape shape) { t.add(prefix + name, {load<segment>, types, kOffset | kCache, false, shape}); });
  each_store([&](const std::string& name, Shape shape) { t.add(prefix + name, {store<segment>, types, kOffset | kCache, false, shape}); });
}

}  // namespace

void add_global_memory(Table& t) {
  add_segment<Segment::global>(t, "global_");
  add_segment<Segment::flat>(t, "flat_");
  add_segment<Segment::scratch>(t, "scratch_");
}

}  // namespace amd
